"""What stands for each event of a Kineto trace: an op, a collective, or why there is none.

Outermost ops are rebuilt from what the trace says of their inputs and from PyTorch's own schemas.
An op that PyTorch makes of others (`CompositeImplicitAutograd`) is opened, as those are what ran;
one whose arguments the trace lacks is opened where what it called can stand for it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from predictor.trace.comms import MAX_RANKS, collective_kind, info_of_args, int_list
from predictor.trace.events import DeviceEvent, HostEvent, RankTrace, TraceStep
from predictor.trace.execution import WAITS, Argument
from shardopt.replay.kineto.arguments import Arguments, one_tensor, tensor_list
from shardopt.replay.kineto.inputs import (
    MAX_ELEMENTS,
    Autograd,
    Input,
    UnreadableError,
    fitting,
    read_inputs,
    schemas,
)
from shardopt.replay.program.build import KIND, KNOWN
from shardopt.replay.program.program import COLLECTIVES, ITEMS
from shardopt.replay.program.schema import Parameter, Schema, UnwritableError, has_kernel, ops_of
from shardopt.replay.program.select import FUSED, NATIVE_BACKWARD
from shardopt.replay.program.tensors import contiguous
from shardopt.replay.program.values import is_lookup, lookup_kind

NO_SHAPES = "no shapes: record with record_shapes=True"
UNKNOWN = "is no op of this PyTorch"
UNLIKE = "its inputs fit no schema of this PyTorch"
NATIVE = "a backward function in C++ whose forward op is not replayed"
VIEW = re.compile(r"Tensor\(\w+( -> \*)?\) self\b")
"""In the schema of an op that gives memory of what it took."""
ALLOCATING = ops_of(
    "aten empty empty_like empty_strided new_empty new_empty_strided result_type record_stream "
    "is_pinned _unsafe_view"
)
RESHAPING = ops_of(
    "aten resize_ resize_as_ set_ as_strided_ squeeze_ unsqueeze_ transpose_ t_ swapaxes_ "
    "swapdims_ detach_"
)
"""Ops that change how a tensor sees its memory, which other calls must not find changed."""
KERNELS = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
BACKWARD = re.compile(r"(?:.*: )?(\w+?)Backward\d*$")


@dataclass(frozen=True)
class Item:
    """What stands for an event.

    Args:
        guesses: values and types among the arguments that the trace does not hold; see `Arguments`.
        group: ranks of a collective, none for all; None where it is none.
        gives: what a lookup gives whose backward function has no op of its own.
        native: it is such a backward function.
        reason: why nothing does; empty: it moves no data.
    """

    span: Span
    schema: Schema | None = None
    arguments: tuple[Argument, ...] = ()
    guesses: Counter[str] = field(default_factory=Counter)
    group: tuple[int, ...] | None = None
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
            self.lookups[lookup_kind(span.event.name)].append(span)
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
        lookups = self.lookups[match[1].lower()] if match else []
        if lookups:
            forward = self.forward_of[id(span)] = lookups.pop()
            dtype = next((of for of in span.event.dtypes or () if of in ITEMS), "float")
            gradient = one_tensor(shape, contiguous(shape), dtype, not self.on_gpu)
            self.gradients[id(forward)] = gradient

    def items(self, span: Span, within: Autograd | None = None) -> list[Item]:
        """What stands for an event and all that lies in it, in order.

        Args:
            within: the function of autograd that it lies in.
        """
        if span.is_collective:
            try:
                made = collective_of(span, self.groups, self.world_size)
            except UnwritableError as error:
                return [Item(span, reason=str(error))]
            return [] if made is None else [made]
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
        return self._inner(span, within)

    def _inner(self, span: Span, within: Autograd | None) -> list[Item]:
        return [item for child in span.children for item in self.items(child, within)]

    def _op(self, span: Span, within: Autograd | None) -> list[Item]:
        if any(below.is_collective for below in span.below()):
            return self._inner(span, within)
        own = self._own(span, within)
        made_of_others = _is_composite(
            own.schema or next(iter(schemas(span.event.name)), None), own.reason is not None
        )
        if made_of_others and span.children:
            inner = self._inner(span, within)
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
        schema = None
        try:
            inputs = read_inputs(args)
            if inputs is None:
                raise UnreadableError(
                    "its shapes are not in the trace" if self.shapes else NO_SHAPES
                )
            schema = fitting(name, inputs)
            if schema is None or name in RESHAPING:
                raise UnreadableError(UNLIKE)
            if span.event.sequence is not None and within is None:
                within = self.autograd.get((span.event.sequence, _plain(name)))
            ways = (way for e in span.work() for way in ("HtoD", "DtoH") if way in e.name)
            has_values, copied = "Concrete Inputs" in args, next(ways, "")
            made = self.arguments.of(schema, inputs, within or Autograd(), has_values, copied)
        except (UnreadableError, UnwritableError) as error:
            return Item(span, schema, reason=str(error))
        gradient = self.gradients.get(id(span))
        return Item(span, schema, *made, gives=() if gradient is None else (gradient,))


def _is_native(span: Span) -> bool:
    if NATIVE_BACKWARD.match(span.event.name) is None:
        return False
    return not any(s.is_op and s.event.name.startswith(FUSED) for s in span.below())


def _plain(name: str) -> str:
    """Of an op and of its backward function the same."""
    return re.sub(r"[^a-z0-9]", "", name.rpartition("::")[2].lower())


def _is_idle(schema: Schema | None, span: Span) -> bool:
    """An op that moves no data, whatever its arguments are."""
    name = span.event.name
    if name in ALLOCATING or name in RESHAPING:
        return True
    of = schemas(name) if schema is None else (schema,)
    if of and all(VIEW.search(s.text) for s in of):
        return True
    # an op that is made of others and called none had nothing to do
    return bool(of) and not span.children and all(_is_composite(s, False) for s in of)


def _is_composite(schema: Schema | None, explicit_too: bool) -> bool:
    """PyTorch makes the op of others.

    Args:
        explicit_too: count ops that do so with backward functions of their own.
    """
    if schema is None:
        return False
    name = schema.name if schema.overload == "default" else f"{schema.name}.{schema.overload}"
    return any(has_kernel(name, key) for key in KERNELS[: 1 + explicit_too])


GLOO = "gloo:"
OP = re.compile(r"\w+::\w+$")
"""A name that the dispatcher knows; functions of autograd and Python have others."""
COLLECTIVE = re.compile(r"(c10d::\w+|record_param_comms|nccl:.*)$")
WHOLE = 0.9
"""Share of the most ops of an iteration below which one counts as cut off."""
ROUNDING_US = (1.0, 0.002)
"""How much later than its caller an event may end: clocks of whole microseconds, and finer ones."""
MAX_DEPTH = 100


@dataclass
class Span:
    """An event and what lies in it.

    Args:
        section: annotations around it, the outermost first.
        launched: device work that it launched, without that of its children.
    """

    event: HostEvent
    section: tuple[str, ...] = ()
    children: list[Span] = field(default_factory=list)
    launched: list[DeviceEvent] = field(default_factory=list)

    @property
    def is_op(self) -> bool:
        """It passed through PyTorch's dispatcher."""
        return self.event.kind == "op" and OP.match(self.event.name) is not None

    @property
    def is_collective(self) -> bool:
        """It exchanges data between ranks, or says what does."""
        return COLLECTIVE.match(self.event.name) is not None

    @property
    def us(self) -> float:
        """Its recorded time on the host."""
        return self.event.end_us - self.event.start_us

    def below(self) -> Iterator[Span]:
        """All that lies in it, in order."""
        stack = [*reversed(self.children)]
        while stack:
            child = stack.pop()
            yield child
            stack.extend(reversed(child.children))

    def work(self) -> list[DeviceEvent]:
        """All device work that was launched in it."""
        return [event for span in (self, *self.below()) for event in span.launched]


def last_step(trace: RankTrace) -> TraceStep:
    """The last iteration that is whole: has about as many ops as the others."""
    ops = sorted(event.start_us for event in trace.host if event.kind == "op")
    counts: Counter[int] = Counter()
    at = 0
    for number, step in enumerate(trace.steps):
        while at < len(ops) and ops[at] < step.end_us:
            counts[number] += ops[at] >= step.start_us
            at += 1
    enough = WHOLE * max(counts.values(), default=0)
    return next(
        (s for n, s in reversed([*enumerate(trace.steps)]) if counts[n] >= enough), trace.steps[-1]
    )


def spans(trace: RankTrace, step: TraceStep) -> list[Span]:
    """The outermost events of an iteration in the order of their starts, without gloo's own."""
    threads: dict[int, list[HostEvent]] = defaultdict(list)
    for event in trace.host:
        if step.start_us <= event.start_us < step.end_us:
            threads[event.thread].append(event)
    slack = ROUNDING_US[any(e.start_us % 1 for e in trace.host)]
    work = {e.correlation: e for e in trace.device if e.correlation is not None}
    found: list[Span] = []
    for events in threads.values():
        if not any(event.name.startswith(GLOO) for event in events):
            found += _nest(events, slack, work)
    return sorted(found, key=lambda span: span.event.start_us)


def gloo_ends(trace: RankTrace, step: TraceStep) -> list[float]:
    """When gloo was done with each of an iteration's collectives, in the order it took them up."""
    events = [
        e
        for e in trace.host
        if e.name.startswith(GLOO) and step.start_us <= e.start_us < step.end_us
    ]
    return [e.end_us for e in sorted(events, key=lambda e: e.start_us)]


def _nest(
    events: Iterable[HostEvent], slack: float, work: dict[int, DeviceEvent]
) -> Sequence[Span]:
    # clocks of whole microseconds give many events one start; the profiler's own number does not
    ordered = sorted(events, key=lambda e: (e.start_us, -e.end_us, e.external or 0))
    roots: list[Span] = []
    stack: list[Span] = []
    for event in ordered:
        while stack and not _inside(event, stack[-1].event, slack):
            stack.pop()
        if event.kind == "runtime":
            launched = work.get(event.correlation or -1)
            if stack and launched is not None:
                stack[-1].launched.append(launched)
            continue
        above = stack[-1] if stack else None
        section = above.section if above else ()
        if above and above.event.kind == "annotation":
            section = (*section, above.event.name)
        span = Span(event, section)
        (above.children if above else roots).append(span)
        if len(stack) < MAX_DEPTH:
            stack.append(span)
    return roots


def _inside(event: HostEvent, outer: HostEvent, slack: float) -> bool:
    if event.end_us > outer.end_us + slack:
        return False
    return event.start_us < outer.end_us or event.start_us == outer.start_us


NAMES = {
    "all_to_all": "alltoall_base_",
    "all_reduce": "allreduce_",
    "all_gather": "_allgather_base_",
    "reduce_scatter": "_reduce_scatter_base_",
    "broadcast": "broadcast_",
    "reduce": "reduce_",
}
"""Kind of a collective -> the op of c10d that stands for it where the trace names none."""
SPLITS = {"output_split_sizes": "Out split size", "input_split_sizes": "In split size"}


def collective_of(
    span: Span, groups: Mapping[str, tuple[int, ...]], world_size: int | None
) -> Item | None:
    """What a program calls for a collective; None for what exchanges nothing, such as a wait.

    Args:
        groups: name of a process group -> its ranks.

    Raises:
        UnwritableError: its size is not in the trace, or no call is known for it.
    """
    events = [span, *span.below()]
    record = next((a for s in events if "Collective name" in (a := s.event.args or {})), {})
    told = str(record.get("Collective name", ""))
    info = info_of_args(record)
    op, named = _find_call(events)
    note = next((s.event for s in events if s.event.name.startswith("nccl:")), None)
    kind = collective_kind(op or told or (note.name if note else ""))
    if (op is None and kind == "other") or told in WAITS:
        return None
    op = op or NAMES.get(kind, kind)
    if op not in KNOWN or not schemas(COLLECTIVES + op):
        raise UnwritableError("no call of torch.distributed is known for this collective")
    group = (info.group or groups.get(info.group_name or "") or ()) if info else ()
    ranks = len(group) or world_size or 1
    if ranks > MAX_RANKS or any(not 0 <= rank < MAX_RANKS for rank in group):
        raise UnwritableError("more ranks than a job has")
    shapes = [s.event for s in events if s.event.name.startswith("nccl:") and s.event.shapes]
    shape = shapes[0].shapes[0] if shapes and shapes[0].shapes else None
    dtype = (shapes[0].dtypes or ("",))[0] if shapes else ""
    sent, received = (_count(record.get(f"{way} msg nelems")) for way in ("In", "Out"))
    if sent is None and shape is not None:
        sent = prod(shape)
    if received is None and sent is not None:
        times = {"all_gather": ranks, "reduce_scatter": 1 / ranks}.get(kind, 1)
        received = int(sent * times)
    told_type = str(record.get("dtype")).lower()
    dtype = told_type if told_type in ITEMS else dtype or "float"
    arguments = []
    schema = schemas(COLLECTIVES + op)[0]
    for parameter in schema.parameters:
        name, given = parameter.name, named.get(parameter.name)
        if name not in KNOWN[op]:
            arguments.append(Argument(None, (), "None"))
        elif "Tensor" in parameter.type:
            elements = received if name.startswith("output") else sent
            arguments.append(_tensors(parameter, given, elements, dtype, ranks))
        else:
            value = None if given is None else given.value
            if value is None:
                value = (int_list(record.get(SPLITS[name])) or ()) if name in SPLITS else 0
            arguments.append(Argument(value, (), type(value).__name__))
    return Item(span, schema, tuple(arguments), group=group)


def _find_call(events: Sequence[Span]) -> tuple[str | None, dict[str, Input]]:
    """c10d's op, and its inputs by name where they can be read."""
    for span in events:
        if span.event.name.startswith(COLLECTIVES):
            inputs: tuple[Input, ...] = ()
            with suppress(UnreadableError):
                inputs = read_inputs(span.event.args or {}) or ()
            parameters = schemas(span.event.name)[0].parameters if schemas(span.event.name) else ()
            named = {p.name: i for p, i in zip(parameters, inputs, strict=False)}
            return span.event.name.removeprefix(COLLECTIVES), named
    return None, {}


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _tensors(
    parameter: Parameter, given: Input | None, elements: int | None, dtype: str, ranks: int
) -> Argument:
    """What a collective sends or receives: as its shapes say, or as many elements."""
    if given is not None and given.shapes:
        shapes, strides, dtype = given.shapes, given.strides, given.dtype or dtype
    elif elements is None or elements > MAX_ELEMENTS:
        raise UnwritableError("the trace does not hold a size of it that can be")
    else:
        times = ranks if parameter.type == "Tensor[][]" else 1
        shapes = ((elements // times,),) * times
        strides = tuple(map(contiguous, shapes))
    if dtype not in ITEMS:
        raise UnwritableError("a tensor of a type that is not known")
    if parameter.type == "Tensor":
        return one_tensor(shapes[0], strides[0], dtype, False)
    return tensor_list(shapes, strides, [dtype] * len(shapes), False)
