"""PyTorch execution traces (ET): what ran and on which tensors, without times.

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
        comm: what a collective exchanges.
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
    """What one rank ran.

    Args:
        schema: version that the file names.
        nodes: by id, thus in the order of their starts; without the roots.
        notes: what was missing, for the user.
    """

    source: str
    schema: str
    rank: int
    world_size: int | None
    nodes: tuple[Node, ...]
    notes: tuple[str, ...] = field(default=())

    def collectives(self) -> Iterator[Node]:
        """The nodes that exchange data between ranks, in order."""
        return (node for node in self.nodes if node.comm is not None)

    def op_counts(self) -> Counter[str]:
        """Number of ops by name, without annotations."""
        return Counter(node.name for node in self.nodes if node.schema)

    def input_bytes(self) -> int:
        """Bytes of all tensors that the innermost ops take: an upper bound of what they read."""
        callers = {node.parent for node in self.nodes}
        inner = (node for node in self.nodes if node.schema and node.id not in callers)
        return sum(t.size_bytes for n in inner for a in n.inputs for t in a.tensors())


def execution_trace(source: str, document: Mapping[str, object]) -> ExecutionTrace:
    """The trace that a document holds."""
    items = document[NODES]
    given = items if isinstance(items, list) else []
    nodes: list[Node] = []
    unreadable = 0
    for item in given:
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
    said = {"rank": ranks.most_common(1)[0][0]} if ranks else {}
    rank, world_size, notes = rank_of(source, said, name_first=True)
    if unreadable:
        notes = (*notes, f"{unreadable:,} of {len(given):,} nodes could not be read")
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
    """`record_param_comms` has the rank before the name of the collective."""
    at = next((i for i, a in enumerate(node.inputs) if a.type == "String"), 0)
    rank = node.inputs[at - 1].value if node.name == COMMS and at > 0 else None
    return rank if isinstance(rank, int) else None


def _groups(nodes: Iterable[Node]) -> dict[str, tuple[int, ...]]:
    """Ranks of the job's process groups, as the node that lists them says."""
    config = next((node.inputs for node in nodes if node.name == GROUPS), ())
    try:
        return groups_of(json.loads(str(config[0].value)) if config else None)
    except (ValueError, RecursionError):
        return {}


def _flat(node: object) -> dict[str, Any]:
    """A node of either layout with the names of the older one."""
    if not isinstance(node, dict):
        raise TypeError
    inputs, outputs = node["inputs"], node["outputs"]
    if not isinstance(inputs, dict):
        return node
    flat = {a["name"]: a["value"] for a in node.get("attrs", ())}
    for side, given in (("input", inputs), ("output", outputs)):
        flat[f"{side}s"] = given["values"]
        flat[f"{side}_shapes"] = given["shapes"]
        flat[f"{side}_types"] = given["types"]
        flat[f"{side}_strides"] = given.get("strides", ())
    return {**flat, "id": node["id"], "name": node["name"], "parent": node["ctrl_deps"]}


def _node(given: Mapping[str, Any]) -> Node:
    name = given["name"]
    if not isinstance(name, str):
        raise TypeError
    inputs, outputs = _arguments(given, "input"), _arguments(given, "output")
    return Node(
        id=_whole(given["id"]),
        parent=_whole(given["parent"]),
        name=sys.intern(name),
        inputs=inputs,
        outputs=outputs,
        record=_whole(given["rf_id"]) if "rf_id" in given else None,
        thread=_whole(given.get("tid", 0)),
        sequence=_whole(given.get("seq_id", -1)),
        scope=_whole(given.get("scope", 0)),
        schema=sys.intern(str(given.get("op_schema", ""))),
        comm=_comm(given, inputs, outputs) if name == COMMS else None,
    )


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value


def _arguments(given: Mapping[str, Any], side: str) -> tuple[Argument, ...]:
    values, shapes, types = given[f"{side}s"], given[f"{side}_shapes"], given[f"{side}_types"]
    strides = given.get(f"{side}_strides") or [[]] * len(values)
    return tuple(
        Argument(_value(v, str(t)), _shape(s), sys.intern(str(t)), _shape(w))
        for v, s, t, w in zip(values, shapes, types, strides, strict=True)
    )


def _value(given: object, kind: str) -> Value:
    if kind == "None" or given == "<None>":
        return None
    if isinstance(given, list):
        # types nest without saying which item is which
        listed = "Tensor(" in kind and len(given) == 6 and isinstance(given[5], str)
        if listed or TENSOR.match(kind):
            return _tensor(given)
        return tuple(_value(item, kind) for item in given)
    if given is None or isinstance(given, (bool, int, float, str)):
        return given
    raise TypeError


def _tensor(given: Sequence[Any]) -> Tensor:
    number, storage, offset, numel, item_bytes = (_whole(n) for n in given[:5])
    device = sys.intern(str(given[5])) if len(given) > 5 else ""
    return Tensor(number, storage, offset, numel, item_bytes, device)


def _shape(given: object) -> Shape:
    if not isinstance(given, list):
        raise TypeError
    return tuple(_shape(s) if isinstance(s, list) else _whole(s) for s in given)


def _tensors(value: Value) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)


def _comm(
    given: Mapping[str, Any], inputs: Sequence[Argument], outputs: Sequence[Argument]
) -> CollectiveCall | None:
    """From the attributes, or from the inputs ``tensor, sequence number, group, rank, name,
    input splits, output splits`` (PyTorch `torch/csrc/distributed/c10d/ParamCommsUtils.hpp`)."""
    described = info_of_args({ATTRS[k]: v for k, v in given.items() if k in ATTRS})
    name = next((a.value for a in inputs if a.type == "String"), None)
    if not isinstance(name, str) or name in WAITS:
        return described if described and name not in WAITS else None
    sent, received = _bytes(inputs[:1]), _bytes(outputs[:1])
    at = [a.type for a in inputs].index("String")
    item = next((t.item_bytes for t in inputs[0].tensors()), None)
    seen = CollectiveCall(
        collective_kind(name),
        sent,
        output_bytes=received,
        send_bytes=_splits(inputs[at + 1 : at + 2], item),
        receive_bytes=_splits(inputs[at + 2 : at + 3], item),
    )
    return described.or_else(seen) if described else seen


def _bytes(arguments: Iterable[Argument]) -> int | None:
    sizes = [t.size_bytes for a in arguments for t in a.tensors()]
    return sum(sizes) if sizes else None


def _splits(arguments: Sequence[Argument], item: int | None) -> tuple[int, ...] | None:
    value = arguments[0].value if arguments else None
    if item is None or not isinstance(value, tuple) or not value:
        return None
    return tuple(size * item for size in value if isinstance(size, int)) or None
