"""The ops of one iteration of a Kineto trace without an execution trace, as a program takes them.

Such a trace names no tensors and shows no outputs. So nothing is chained: what ops take is made up
front, and what they give is freed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from predictor.errors import InputError
from predictor.trace.events import CollectiveCall, RankTrace
from predictor.trace.execution import COMMS, Argument, ExecutionTrace, Node
from shardopt.replay.kineto.arguments import MemoryPool
from shardopt.replay.kineto.items import NO_SHAPES, Item, Reader, Span, gloo_ends, last_step, spans
from shardopt.replay.program.program import LeftOut
from shardopt.replay.program.select import ChosenOp

SHOWN = 4


@dataclass(frozen=True)
class Imitation:
    """What stands for an execution trace.

    Args:
        us: id of a node -> its recorded microseconds.
        left_out: what of the iteration is not replayed.
        notes: what was done in place of what the trace lacks.
    """

    trace: ExecutionTrace
    chosen: tuple[ChosenOp, ...]
    us: Mapping[int, float]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]


def imitate(trace: RankTrace) -> Imitation:
    """Rebuild the last whole iteration of a rank, read with ``keep_args``.

    Raises:
        InputError: nothing in it can be rebuilt.
    """
    step = last_step(trace)
    found = spans(trace, step)
    reader = Reader(trace, found)
    items = [item for span in found for item in reader.items(span)]
    made = _Nodes()
    waits = _waits(items, gloo_ends(trace, step))
    for at, item in enumerate(items):
        for number in waits.get(at, ()):
            made.wait(number)
        if item.reason is None:
            made.add(item)
    if not made.chosen:
        why = NO_SHAPES if items and not reader.shapes else f"{len(items):,} ops in it"
        raise InputError(
            f"{trace.source}: no op of {step.name} can be rebuilt from this Kineto trace: {why}; "
            "or record an execution trace too, with torch.profiler.ExecutionTraceObserver"
        )
    left = [LeftOut(i.span.event.name, i.reason, i.span.us) for i in items if i.reason]
    told = f"rank {trace.rank}: {step.name}, of {len(trace.steps)} steps in its Kineto trace"
    return Imitation(
        ExecutionTrace(trace.source, "kineto", trace.rank, trace.world_size, tuple(made.nodes)),
        tuple(made.chosen),
        made.us,
        tuple(left),
        (told, *_notes(items)),
    )


def _notes(items: Sequence[Item]) -> Iterator[str]:
    idle = Counter(item.span.event.name for item in items if item.reason == "")
    if idle:
        shown = ", ".join(name for name, _ in idle.most_common(SHOWN))
        more = "" if len(idle) <= SHOWN else " and the like"
        yield (
            f"{idle.total():,} ops that move no data ({shown}{more}) are left out: the trace lacks "
            "what they take, or they change tensors that others share here"
        )
    # of a GPU's trace: host times do not say how much of its compute time the replay lacks
    times = [
        (item, sum(e.end_us - e.start_us for e in item.span.work()))
        for item in items
        if item.group is None
    ]
    left, total = sum(us for item, us in times if item.reason), sum(us for _, us in times)
    if left:
        yield f"ops left out took {left / total:.0%} of the GPU's compute time"
    guesses = sum((item.guesses for item in items if item.reason is None), Counter[str]())
    if guesses["number"]:
        yield f"{guesses['number']:,} numbers without a recorded value are their defaults, or 1"
    if guesses["tensors"]:
        yield (
            f"{guesses['tensors']:,} lists of tensors have the type of their op's other tensors, "
            "or of most tensors of their shapes: the trace does not tell it"
        )


def _waits(items: Sequence[Item], gloo: Sequence[float]) -> dict[int, list[int]]:
    """Position of an item -> the collectives (counted from 0) that are waited for before it.

    A trace shows no waits. What started after a collective had ended comes after it here too, so
    that exactly the ops that ran during a collective do so again.
    """
    on_gpu = any(item.span.work() for item in items)
    begins = [_begin(item.span, on_gpu) for item in items]
    found: dict[int, list[int]] = defaultdict(list)
    collectives = [at for at, item in enumerate(items) if item.group is not None]
    matched = gloo if len(gloo) == len(collectives) else ()
    for number, at in enumerate(collectives):
        ends = [e.end_us for e in items[at].span.work() if e.collective is not None]
        end = max(ends, default=matched[number] if matched else begins[at])
        after = (
            later
            for later in range(at + 1, len(items))
            if end is None or (begins[later] or 0.0) >= end
        )
        found[next(after, len(items))].append(number)
    return found


def _begin(span: Span, on_gpu: bool) -> float | None:
    """When an op's own work began; None: it launched none."""
    if not on_gpu:
        return span.event.start_us
    return min((e.start_us for e in span.work() if e.collective is None), default=None)


class _Nodes:
    """Writes nodes as an execution trace has them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.chosen: list[ChosenOp] = []
        self.us: dict[int, float] = {}
        self.memory = MemoryPool()
        self.collectives = 0

    def add(self, item: Item) -> None:
        """An op, a collective or a backward function."""
        name = item.span.event.name if item.schema is None else item.schema.name
        node = Node(len(self.nodes) + 1, 0, name, item.arguments, ())
        if item.schema is None or item.group is not None:
            node = self.memory.alone(node)
        else:
            node = self.memory.place(node, item.schema)
        if item.schema is not None:
            gives = self.memory.alone(replace(node, inputs=item.gives)).inputs
            node = replace(node, outputs=gives, schema=item.schema.text)
        self.nodes.append(node)
        self.chosen.append(ChosenOp(node, item.span.section, item.native))
        self.us[node.id] = item.span.us
        if item.group is not None:
            self._record((None, self.collectives), node.id, item.group)
            self.collectives += 1

    def wait(self, number: int) -> None:
        """For the collective of that number."""
        if number < self.collectives:
            self._record((number, "wait"), 0, ())

    def _record(
        self, values: tuple[int | str | None, ...], parent: int, group: tuple[int, ...]
    ) -> None:
        inputs = tuple(Argument(value, (), type(value).__name__) for value in values)
        comm = CollectiveCall(group=group) if group else None
        self.nodes.append(Node(len(self.nodes) + 1, parent, COMMS, inputs, (), comm=comm))
