"""PyTorch execution traces (ET): ops and their tensors in order, without times.

Written by `torch.profiler.ExecutionTraceObserver`. Two layouts are read; each node shows which:
up to 1.0.1 its fields lie flat (``parent``, ``rf_id``, ``inputs``, ``input_shapes``, ...); since
1.0.2-chakra.0.0.4 it has ``ctrl_deps``, ``inputs: {values, shapes, types}`` and a list ``attrs``
(PyTorch `torch/csrc/profiler/standalone/execution_trace_observer.cpp`). A tensor is
``[id, storage id, offset, elements, bytes of an element, device]`` in both.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from predictor.errors import InputError
from predictor.trace.comms import collective_kind, groups_of, in_group, info_of_args
from predictor.trace.events import CollectiveCall
from predictor.trace.files import rank_of

NODES = "nodes"
COMMS = "record_param_comms"
GROUPS = "## process_group:init ##"
ROOTS = re.compile(r"\[pytorch\|profiler\|execution_(graph|trace)\|(process|thread)\]")
TENSOR = re.compile(r"Tensor\(")
WAITS = frozenset({"wait", "init"})
"""Names in `record_param_comms` that are not collectives."""
ATTRS = {
    "collective_name": "Collective name",
    "dtype": "dtype",
    "in_msg_nelems": "In msg nelems",
    "out_msg_nelems": "Out msg nelems",
    "in_split_size": "In split size",
    "out_split_size": "Out split size",
    "global_rank_start": "Global rank start",
    "global_rank_stride": "Global rank stride",
    "pg_name": "Process Group Name",
    "pg_size": "Group size",
}
"""Attribute of a node -> argument of Kineto with the same meaning."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as an op saw it.

    Args:
        id: of the tensor object; used again after it died.
        storage: id of the memory it views.
        offset: of its first element in the storage, in elements.
        numel: elements.
        item_bytes: of one element.
        device: such as ``cuda:0`` or ``cpu``.
    """

    id: int
    storage: int
    offset: int
    numel: int
    item_bytes: int
    device: str

    @property
    def size_bytes(self) -> int:
        return self.numel * self.item_bytes


Value = Tensor | int | float | bool | str | None | tuple["Value", ...]
Shape = tuple["int | Shape", ...]


@dataclass(frozen=True, slots=True)
class Argument:
    """An input or output of a node.

    Args:
        value: tensors as `Tensor`, lists as tuples, None for ``<None>``; values that
            the trace does not hold as their text, such as ``<Object>``.
        shape: of a tensor; nested as the value is.
        type: as the trace spells it, such as ``Tensor(float)`` or ``GenericList[Int,Int]``.
        strides: in elements, nested as the shape is; empty in traces of before 1.1.1.
    """

    value: Value
    shape: Shape
    type: str
    strides: Shape = ()

    def tensors(self) -> Iterator[Tensor]:
        yield from _tensors(self.value)


@dataclass(frozen=True, slots=True)
class Node:
    """One op, or a root that stands for a thread.

    Args:
        id: counts up in the order in which nodes start.
        parent: id of the node that called it.
        record: PyTorch's number of the call (``rf_id``).
        thread: counts from 1.
        sequence: autograd's number that forward and backward share; -1: none.
        scope: `at::RecordScope`: 0 function, 1 backward function, 7 user annotation.
        schema: of the op, with the overload; empty for annotations.
        comm: sizes and group of a collective.
    """

    id: int
    parent: int
    name: str
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    record: int | None = None
    thread: int = 0
    sequence: int = -1
    scope: int = 0
    schema: str = ""
    comm: CollectiveCall | None = None


@dataclass(frozen=True)
class ExecutionTrace:
    """Ops of one rank in the order in which they started.

    Args:
        schema: version that the file names.
        nodes: by id, thus in the order of their starts; without the roots.
        notes: missing data, for the user.
    """

    source: str
    schema: str
    rank: int
    world_size: int | None
    nodes: tuple[Node, ...]
    notes: tuple[str, ...] = field(default=())

    def collectives(self) -> Iterator[Node]:
        """Return the nodes that exchange data between ranks, in order."""
        return (node for node in self.nodes if node.comm is not None)

    def op_counts(self) -> Counter[str]:
        """Count the ops by name, without annotations."""
        return Counter(node.name for node in self.nodes if node.schema)

    def input_bytes(self) -> int:
        """Sum the input bytes of the innermost ops: an upper bound of the bytes they read."""
        callers = {node.parent for node in self.nodes}
        inner = (node for node in self.nodes if node.schema and node.id not in callers)
        return sum(t.size_bytes for n in inner for a in n.inputs for t in a.tensors())


def execution_trace(source: str, document: Mapping[str, object]) -> ExecutionTrace:
    """Read the trace in a document.

    Raises:
        InputError: it has no readable node.
    """
    items = document[NODES]
    raw_nodes = items if isinstance(items, list) else []
    nodes: list[Node] = []
    unreadable = 0
    for item in raw_nodes:
        try:
            node = _node(_flat(item))
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            unreadable += 1
            continue
        if not ROOTS.match(node.name):
            nodes.append(node)
    if not nodes:
        raise InputError(f"{source}: an execution trace without nodes")
    ranks = Counter(rank for node in nodes if (rank := _rank(node)) is not None)
    distributed = {"rank": ranks.most_common(1)[0][0]} if ranks else {}
    rank, world_size, notes = rank_of(source, distributed, name_first=True)
    if unreadable:
        notes = (*notes, f"{unreadable:,} of {len(raw_nodes):,} nodes could not be read")
    groups = _groups(nodes)
    grouped = (
        replace(node, comm=in_group(node.comm, groups)) if node.comm is not None else node
        for node in nodes
    )
    return ExecutionTrace(
        source,
        str(document.get("schema", "not said")),
        rank,
        world_size,
        tuple(sorted(grouped, key=lambda node: node.id)),
        notes,
    )


def _rank(node: Node) -> int | None:
    """Read the rank, which `record_param_comms` has before the name of the collective."""
    at = next((i for i, a in enumerate(node.inputs) if a.type == "String"), 0)
    rank = node.inputs[at - 1].value if node.name == COMMS and at > 0 else None
    return rank if isinstance(rank, int) else None


def _groups(nodes: Iterable[Node]) -> dict[str, tuple[int, ...]]:
    """Read the ranks of the job's process groups from the node that lists them."""
    config = next((node.inputs for node in nodes if node.name == GROUPS), ())
    try:
        return groups_of(json.loads(str(config[0].value)) if config else None)
    except (ValueError, RecursionError):
        return {}


def _flat(node: object) -> dict[str, Any]:
    """Return a node of either layout with the field names of the older one."""
    if not isinstance(node, dict):
        raise TypeError
    inputs, outputs = node["inputs"], node["outputs"]
    if not isinstance(inputs, dict):
        return node
    flat = {a["name"]: a["value"] for a in node.get("attrs", ())}
    for side, arguments in (("input", inputs), ("output", outputs)):
        flat[f"{side}s"] = arguments["values"]
        flat[f"{side}_shapes"] = arguments["shapes"]
        flat[f"{side}_types"] = arguments["types"]
        flat[f"{side}_strides"] = arguments.get("strides", ())
    return {**flat, "id": node["id"], "name": node["name"], "parent": node["ctrl_deps"]}


def _node(fields: Mapping[str, Any]) -> Node:
    name = fields["name"]
    if not isinstance(name, str):
        raise TypeError
    inputs, outputs = _arguments(fields, "input"), _arguments(fields, "output")
    return Node(
        id=_whole(fields["id"]),
        parent=_whole(fields["parent"]),
        name=sys.intern(name),
        inputs=inputs,
        outputs=outputs,
        record=_whole(fields["rf_id"]) if "rf_id" in fields else None,
        thread=_whole(fields.get("tid", 0)),
        sequence=_whole(fields.get("seq_id", -1)),
        scope=_whole(fields.get("scope", 0)),
        schema=sys.intern(str(fields.get("op_schema", ""))),
        comm=_comm(fields, inputs, outputs) if name == COMMS else None,
    )


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


def _arguments(fields: Mapping[str, Any], side: str) -> tuple[Argument, ...]:
    values, shapes, types = fields[f"{side}s"], fields[f"{side}_shapes"], fields[f"{side}_types"]
    strides = fields.get(f"{side}_strides") or [[]] * len(values)
    return tuple(
        Argument(_value(v, str(t)), _shape(s), sys.intern(str(t)), _shape(w))
        for v, s, t, w in zip(values, shapes, types, strides, strict=True)
    )


def _value(value: object, kind: str) -> Value:
    if kind == "None" or value == "<None>":
        return None
    if isinstance(value, list):
        # types nest without saying which item is which
        listed = "Tensor(" in kind and len(value) == 6 and isinstance(value[5], str)
        if listed or TENSOR.match(kind):
            return _tensor(value)
        return tuple(_value(item, kind) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError


def _tensor(items: Sequence[Any]) -> Tensor:
    number, storage, offset, numel, item_bytes = (_whole(n) for n in items[:5])
    device = sys.intern(str(items[5])) if len(items) > 5 else ""
    return Tensor(number, storage, offset, numel, item_bytes, device)


def _shape(sizes: object) -> Shape:
    if not isinstance(sizes, list):
        raise TypeError
    return tuple(_shape(s) if isinstance(s, list) else _whole(s) for s in sizes)


def _tensors(value: Value) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)


def _comm(
    fields: Mapping[str, Any], inputs: Sequence[Argument], outputs: Sequence[Argument]
) -> CollectiveCall | None:
    """Read a collective from its attributes, or else from its inputs.

    The inputs are ``tensor, sequence number, group, rank, name, input splits, output splits``
    (PyTorch `torch/csrc/distributed/c10d/ParamCommsUtils.hpp`).
    """
    described = info_of_args({ATTRS[k]: v for k, v in fields.items() if k in ATTRS})
    name = next((a.value for a in inputs if a.type == "String"), None)
    if not isinstance(name, str) or name in WAITS:
        return described if described and name not in WAITS else None
    sent, received = _bytes(inputs[:1]), _bytes(outputs[:1])
    at = [a.type for a in inputs].index("String")
    item = next((t.item_bytes for t in inputs[0].tensors()), None)
    from_inputs = CollectiveCall(
        collective_kind(name),
        sent,
        output_bytes=received,
        send_bytes=_splits(inputs[at + 1 : at + 2], item),
        receive_bytes=_splits(inputs[at + 2 : at + 3], item),
    )
    return described.or_else(from_inputs) if described else from_inputs


def _bytes(arguments: Iterable[Argument]) -> int | None:
    sizes = [t.size_bytes for a in arguments for t in a.tensors()]
    return sum(sizes) if sizes else None


def _splits(arguments: Sequence[Argument], item: int | None) -> tuple[int, ...] | None:
    value = arguments[0].value if arguments else None
    if item is None or not isinstance(value, tuple) or not value:
        return None
    return tuple(size * item for size in value if isinstance(size, int)) or None
