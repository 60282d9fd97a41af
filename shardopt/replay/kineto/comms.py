"""Collectives of a Kineto trace: by the inputs of c10d's op, or by what else says their sizes.

Newer traces say it in the arguments of `record_param_comms`, older ones in the shapes of
``nccl:all_to_all`` and the like, which lie in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from predictor.trace.comms import MAX_RANKS, collective_kind, info_of_args, int_list
from predictor.trace.execution import WAITS, Argument
from shardopt.replay.kineto.arguments import list_type, tensor_of
from shardopt.replay.kineto.inputs import MAX_ELEMENTS, Input, UnreadableError, read_inputs, schemas
from shardopt.replay.kineto.spans import Span
from shardopt.replay.program.collectives import KNOWN
from shardopt.replay.program.literals import UnwritableError
from shardopt.replay.program.program import ITEMS
from shardopt.replay.program.schema import Parameter, Schema
from shardopt.replay.program.tensors import contiguous

C10D = "c10d::"
NAMES = {
    "all_to_all": "alltoall_base_",
    "all_reduce": "allreduce_",
    "all_gather": "_allgather_base_",
    "reduce_scatter": "_reduce_scatter_base_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
}
"""Kind of a collective -> the op of c10d that stands for it where the trace names none."""
SPELLED = {
    "Float": "float", "Double": "double", "Half": "c10::Half", "BFloat16": "c10::BFloat16",
    "Long": "long int", "Int": "int", "Short": "short", "Char": "signed char",
    "Byte": "unsigned char", "Bool": "bool",
}  # fmt: skip
"""Type as records of collectives spell it -> as ops do."""
RECEIVED = frozenset({"output", "output_tensor", "output_tensors", "outputs", "output_lists"})
SPLITS = {"output_split_sizes": "Out split size", "input_split_sizes": "In split size"}


@dataclass(frozen=True)
class Collective:
    """A collective as a program calls it.

    Args:
        group: its ranks; none: all.
    """

    schema: Schema
    arguments: tuple[Argument, ...]
    group: tuple[int, ...]


def collective_of(
    span: Span, groups: Mapping[str, tuple[int, ...]], world_size: int | None
) -> Collective | None:
    """What a program calls for a collective; None for what exchanges nothing, such as a wait.

    Args:
        groups: name of a process group -> its ranks.

    Raises:
        UnwritableError: its size is not in the trace, or no call is known for it.
    """
    events = [span, *span.below()]
    record = next((s.event.args for s in events if "Collective name" in (s.event.args or {})), None)
    info = info_of_args(record or {})
    op, named = _find_call(events)
    kind = collective_kind(
        op or (str((record or {})["Collective name"]) if record else _find_note(events))
    )
    if (op is None and kind == "other") or str((record or {}).get("Collective name")) in WAITS:
        return None
    op = op or NAMES.get(kind, kind)
    if op not in KNOWN or not schemas(C10D + op):
        raise UnwritableError("no call of torch.distributed is known for this collective")
    group = (info.group or groups.get(info.group_name or "") or ()) if info else ()
    ranks = len(group) or world_size or 1
    if ranks > MAX_RANKS or any(not 0 <= rank < MAX_RANKS for rank in group):
        raise UnwritableError("more ranks than a job has")
    sizes = _Sizes(kind, record or {}, events, ranks)
    schema = schemas(C10D + op)[0]
    arguments = (
        _argument(p, named.get(p.name), sizes, record or {})
        if p.name in KNOWN[op]
        else Argument(None, (), "None")
        for p in schema.parameters
    )
    return Collective(schema, tuple(arguments), group)


def _find_call(events: Sequence[Span]) -> tuple[str | None, dict[str, Input]]:
    """c10d's op, and its inputs by name where they can be read."""
    for span in events:
        if span.event.name.startswith(C10D):
            op = span.event.name.removeprefix(C10D)
            try:
                inputs = read_inputs(span.event.args or {}) or ()
            except UnreadableError:
                inputs = ()
            parameters = schemas(span.event.name)[0].parameters if schemas(span.event.name) else ()
            return op, {p.name: i for p, i in zip(parameters, inputs, strict=False)}
    return None, {}


def _find_note(events: Sequence[Span]) -> str:
    return next((s.event.name for s in events if s.event.name.startswith("nccl:")), "")


class _Sizes:
    """Elements that this rank sends and receives, as far as anything says."""

    def __init__(
        self, kind: str, record: Mapping[str, Any], events: Sequence[Span], ranks: int
    ) -> None:
        self.ranks = ranks
        shapes = [
            (s.event.shapes[0], (s.event.dtypes or ("",))[0])
            for s in events
            if s.event.name.startswith("nccl:") and s.event.shapes
        ]
        shape, dtype = shapes[0] if shapes else (None, "float")
        self.dtype = SPELLED.get(str(record.get("dtype")), dtype or "float")
        self.sent = _count(record.get("In msg nelems"))
        if self.sent is None and shape is not None:
            self.sent = prod(shape)
        self.received = _count(record.get("Out msg nelems"))
        if self.received is None and self.sent is not None:
            times = {"all_gather": ranks, "reduce_scatter": 1 / ranks}.get(kind, 1)
            self.received = int(self.sent * times)


def _count(value: Any) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if whole else None


def _argument(
    parameter: Parameter, given: Input | None, sizes: _Sizes, record: Mapping[str, Any]
) -> Argument:
    name = parameter.name
    if "Tensor" not in parameter.type:
        value = given.value if given is not None else None
        if value is None:
            value = (int_list(record.get(SPLITS[name])) or ()) if name in SPLITS else 0
        return Argument(value, (), type(value).__name__)
    if given is not None and given.shapes:
        listed = parameter.type != "Tensor"
        return _tensors(given.shapes, given.strides, given.dtype or sizes.dtype, listed)
    count = sizes.received if name in RECEIVED else sizes.sent
    if count is None or count > MAX_ELEMENTS:
        raise UnwritableError("the trace does not hold a size of it that can be")
    times = sizes.ranks if parameter.type == "Tensor[][]" else 1
    shapes = ((count // times,),) * times
    return _tensors(shapes, tuple(map(contiguous, shapes)), sizes.dtype, parameter.type != "Tensor")


def _tensors(
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    dtype: str,
    listed: bool,
) -> Argument:
    if dtype not in ITEMS:
        raise UnwritableError("a tensor of a type that is not known")
    values = tuple(tensor_of(shape, dtype, False) for shape in shapes)
    if not listed:
        return Argument(values[0], shapes[0], f"Tensor({dtype})", strides[0])
    return Argument(values, shapes, list_type([dtype] * len(values)), strides)
