"""What stands for each event of a Kineto trace: an op, a collective, or why there is none.

Outermost ops are rebuilt from what the trace says of their inputs and from PyTorch's own schemas.
An op that PyTorch makes of others (`CompositeImplicitAutograd`) is opened, as those are what ran;
one whose arguments the trace lacks is opened where what it called can stand for it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from predictor.trace.events import RankTrace
from predictor.trace.execution import Argument
from shardopt.replay.kineto.arguments import Arguments, tensor_of
from shardopt.replay.kineto.comms import Collective, collective_of
from shardopt.replay.kineto.derived import Autograd
from shardopt.replay.kineto.inputs import UnreadableError, fitting, read_inputs, schemas, text_of
from shardopt.replay.kineto.spans import Span
from shardopt.replay.program.literals import UnwritableError
from shardopt.replay.program.native import KIND
from shardopt.replay.program.program import ITEMS
from shardopt.replay.program.schema import Schema, has_kernel
from shardopt.replay.program.select import FUSED, NATIVE_BACKWARD
from shardopt.replay.program.tensors import contiguous
from shardopt.replay.program.values import is_lookup

NO_SHAPES = "no shapes: record with record_shapes=True"
UNKNOWN = "is no op of this PyTorch"
UNLIKE = "its inputs fit no schema of this PyTorch"
NATIVE = "a backward function in C++ whose forward op is not replayed"
VIEW = re.compile(r"Tensor\(\w+( -> \*)?\) self\b")
ALLOCATING = frozenset(
    f"aten::{name}"
    for name in (
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "result_type",
        "record_stream", "is_pinned", "_unsafe_view",
    )
)  # fmt: skip
RESHAPING = frozenset(
    f"aten::{name}"
    for name in (
        "resize_", "resize_as_", "set_", "as_strided_", "squeeze_", "unsqueeze_", "transpose_",
        "t_", "swapaxes_", "swapdims_", "detach_",
    )
)  # fmt: skip
"""Ops that change how a tensor sees its memory, which other calls must not find changed."""
KERNELS = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
LOOKUP = re.compile(r"lookup_(\w+)_function")
BACKWARD = re.compile(r"(?:.*: )?(\w+?)Backward\d*$")


@dataclass(frozen=True)
class Item:
    """What stands for an event.

    Args:
        guessed: numbers among the arguments whose value the trace does not hold.
        lists: lists of tensors among them, whose type it does not tell.
        gives: what a lookup gives whose backward function has no op of its own.
        native: it is such a backward function.
        reason: why nothing does; empty: it moves no data.
    """

    span: Span
    schema: Schema | None = None
    arguments: tuple[Argument, ...] = ()
    guessed: int = 0
    lists: int = 0
    collective: Collective | None = None
    gives: tuple[Argument, ...] = ()
    native: bool = False
    reason: str | None = None


class Reader:
    """Decides what stands for the events of an iteration.

    `shapes`: the trace says what any op took.
    """

    def __init__(self, trace: RankTrace, found: Sequence[Span]) -> None:
        calls = (e.collective for e in trace.device if e.collective is not None)
        self.groups = {c.group_name: c.group for c in calls if c.group_name and c.group}
        self.world_size = trace.world_size
        self.shapes, self.on_gpu = False, bool(trace.device)
        self.autograd: dict[tuple[int, str], Autograd] = defaultdict(Autograd)
        self.gradients: dict[int, Argument] = {}
        self.lookups: dict[str, list[Span]] = defaultdict(list)
        self.forward_of: dict[int, Span] = {}
        types: dict[tuple[int, ...], Counter[str]] = defaultdict(Counter)
        for span in (s for outer in found for s in (outer, *outer.below())):
            pairs = zip(span.event.shapes or (), span.event.dtypes or (), strict=False)
            tensors = [(shape, dtype) for shape, dtype in pairs if dtype in ITEMS]
            self.shapes = self.shapes or (span.is_op and bool(tensors))
            for shape, dtype in tensors:
                types[shape][dtype] += 1
            self._learn(span, [shape for shape, _ in tensors])
        self.arguments = Arguments(self.on_gpu, types)

    def _learn(self, span: Span, shapes: Sequence[tuple[int, ...]]) -> None:
        sequence, backward = span.event.sequence, BACKWARD.match(span.event.name)
        if is_lookup(span.event.name) and "lookup" in span.event.name:
            self.lookups[_kind(span.event.name)].append(span)
        elif _is_native(span) and shapes:
            self._pair(span, shapes[0])
        if sequence is None or not shapes:
            return
        if span.is_op:
            self.autograd[sequence, _plain(span.event.name)].inputs.update(shapes)
        elif backward is not None:
            self.autograd[sequence, _plain(backward[1])].gradient = shapes[0]

    def _pair(self, span: Span, shape: tuple[int, ...]) -> None:
        """Backward functions come in the reverse order of their ops."""
        match = KIND.search(span.event.name)
        open_lookups = self.lookups[match[1].lower()] if match else []
        if open_lookups:
            forward = open_lookups.pop()
            dtype = next((of for of in span.event.dtypes or () if of in ITEMS), "float")
            tensor = tensor_of(shape, dtype, not self.on_gpu)
            gradient = Argument(tensor, shape, f"Tensor({dtype})", contiguous(shape))
            self.forward_of[id(span)] = forward
            self.gradients[id(forward)] = gradient

    def items(self, span: Span, within: Autograd | None = None) -> list[Item]:
        """What stands for an event and all that lies in it, in order.

        Args:
            within: the function of autograd that it lies in.
        """
        if span.is_collective:
            return self._collective(span)
        if span.is_op:
            return self._op(span, within)
        if _is_native(span):
            forward = self.forward_of.get(id(span))
            if forward is None or self._own(forward, None).reason is not None:
                return [Item(span, reason=NATIVE)]
            return [Item(span, arguments=(self.gradients[id(forward)],), native=True)]
        backward = BACKWARD.match(span.event.name)
        if backward is not None and span.event.sequence is not None:
            within = self.autograd.get((span.event.sequence, _plain(backward[1])))
        return [item for child in span.children for item in self.items(child, within)]

    def _collective(self, span: Span) -> list[Item]:
        try:
            made = collective_of(span, self.groups, self.world_size)
        except UnwritableError as error:
            return [Item(span, reason=str(error))]
        if made is None:
            return []
        return [Item(span, made.schema, made.arguments, collective=made)]

    def _op(self, span: Span, within: Autograd | None) -> list[Item]:
        if any(below.is_collective for below in span.below()):
            return [item for child in span.children for item in self.items(child, within)]
        own = self._own(span, within)
        made_of_others = _is_composite(
            own.schema or _first(span.event.name), own.reason is not None
        )
        if made_of_others and span.children:
            inner = [item for child in span.children for item in self.items(child, within)]
            if own.reason is None:
                return inner if inner and not any(item.reason for item in inner) else [own]
            if inner:
                return inner
        if own.reason and _is_idle(own.schema, span):
            return [replace(own, reason="")]
        return [own]

    def _own(self, span: Span, within: Autograd | None) -> Item:
        """The op itself, without what it called."""
        name, args = span.event.name, span.event.args or {}
        if not schemas(name):
            return Item(span, reason=UNKNOWN)
        try:
            inputs = read_inputs(args)
        except UnreadableError as error:
            return Item(span, reason=str(error))
        if inputs is None:
            return Item(
                span, reason="its shapes are not in the trace" if self.shapes else NO_SHAPES
            )
        schema = fitting(name, inputs)
        if schema is None or name in RESHAPING:
            return Item(span, schema, reason=UNLIKE)
        if span.event.sequence is not None and within is None:
            within = self.autograd.get((span.event.sequence, _plain(name)))
        try:
            has_values, copied = "Concrete Inputs" in args, _copy_direction(span)
            made = self.arguments.of(schema, inputs, within or Autograd(), has_values, copied)
        except UnwritableError as error:
            return Item(span, schema, reason=str(error))
        gradient = self.gradients.get(id(span))
        gives = () if gradient is None else (gradient,)
        return Item(span, schema, made.arguments, made.guessed, made.lists, gives=gives)


def _copy_direction(span: Span) -> str:
    """The direction in which the GPU copied for an op, as it names it."""
    ways = (way for e in span.work() for way in ("HtoD", "DtoH") if way in e.name)
    return next(ways, "")


def _kind(name: str) -> str:
    """Of a lookup: the optimizer that its backward function runs."""
    match = LOOKUP.search(name)
    return match[1] if match else "dense"


def _is_native(span: Span) -> bool:
    if NATIVE_BACKWARD.match(span.event.name) is None:
        return False
    return not any(s.is_op and s.event.name.startswith(FUSED) for s in span.below())


def _plain(name: str) -> str:
    """Of an op and of its backward function the same."""
    return re.sub(r"[^a-z0-9]", "", name.rpartition("::")[2].lower())


def _first(name: str) -> Schema | None:
    return next(iter(schemas(name)), None)


def _is_idle(schema: Schema | None, span: Span) -> bool:
    """An op that moves no data, whatever its arguments are."""
    name = span.event.name
    if name in ALLOCATING or name in RESHAPING:
        return True
    of = schemas(name) if schema is None else (schema,)
    if of and all(_is_view(s.name, s.overload) for s in of):
        return True
    # an op that is made of others and called none had nothing to do
    return bool(of) and not span.children and all(_is_composite(s, False) for s in of)


@lru_cache(maxsize=4096)
def _is_view(name: str, overload: str) -> bool:
    """What it returns is memory of what it took."""
    return VIEW.search(text_of(name, overload)) is not None


def _is_composite(schema: Schema | None, explicit_too: bool) -> bool:
    """PyTorch makes the op of others.

    Args:
        explicit_too: count ops that do so with backward functions of their own.
    """
    if schema is None:
        return False
    name = schema.name if schema.overload == "default" else f"{schema.name}.{schema.overload}"
    return any(has_kernel(name, key) for key in KERNELS[: 1 + explicit_too])
