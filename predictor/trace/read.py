"""Reads the traces of a job, of one rank or more, from files, folders and archives.

An execution trace is tied to the Kineto trace of the same program by the names of what ran, and the
traces of several ranks are put on one clock, by when their collectives end.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

from predictor.errors import InputError
from predictor.trace.comms import NOTHING, infos_around, size_notes, with_order
from predictor.trace.events import CollectiveCall, DeviceEvent, HostEvent, RankTrace, TraceStep
from predictor.trace.execution import NODES, ExecutionTrace, Node, execution_trace
from predictor.trace.files import TraceFile, open_traces, read_json
from predictor.trace.kineto import TRACE_EVENTS, KinetoReader, tensor_shape
from predictor.units import us

TOGETHER = frozenset({"all_to_all", "all_reduce", "reduce_scatter", "all_gather"})
"""Collectives that no rank leaves before all have arrived; the root of a broadcast does leave."""
SAME_CLOCK_US = 500.0
"""Largest difference of ends on one clock, in us: ranks of one host end a collective within a few
tens, ranks of hosts whose clocks a time service keeps within some hundreds."""

Key = tuple[object, int]
Timed = TypeVar("Timed", HostEvent, DeviceEvent, TraceStep)


def clock_offsets(traces: Sequence[RankTrace]) -> dict[int, float]:
    """Return the microseconds by which each rank's clock is ahead of the lowest rank's.

    The offset is the median difference of the ends of the collectives that both ranks joined. Ranks
    that share no collective with the lowest are left out.
    """
    if not traces:
        return {}
    reference, *rest = sorted(traces, key=lambda t: t.rank)
    ends = _ends(reference)
    offsets = {reference.rank: 0.0}
    for trace in rest:
        shared = [
            event.end_us - ends[key].end_us
            for key, event in _ends(trace).items()
            if key in ends and _op(event) == _op(ends[key])
        ]
        if shared:
            offsets[trace.rank] = median(shared)
    return offsets


def on_one_clock(traces: Sequence[RankTrace]) -> tuple[tuple[RankTrace, ...], tuple[str, ...]]:
    """Shift traces onto the clock of the lowest rank where theirs differs.

    Returns:
        The traces, and notes for the user.

    Ranks that are off by less than `SAME_CLOCK_US` are not shifted: collectives do not end at
    exactly the same time even on one clock.
    """
    offsets = clock_offsets(traces)
    far = {rank: ahead for rank, ahead in offsets.items() if abs(ahead) > SAME_CLOCK_US}
    if not far:
        return tuple(traces), ()
    listed = ", ".join(f"rank {rank} by {us(ahead):+,.3f} ms" for rank, ahead in far.items())
    note = (
        f"the ranks' clocks differ: {listed} against rank {min(offsets)}; their times are shifted "
        "so that collectives end together"
    )
    return tuple(set_back(trace, far.get(trace.rank, 0.0)) for trace in traces), (note,)


def set_back(trace: RankTrace, ahead_us: float) -> RankTrace:
    """Return the trace with all times earlier by ``ahead_us``."""

    def earlier(events: Sequence[Timed]) -> tuple[Timed, ...]:
        return tuple(
            replace(e, start_us=e.start_us - ahead_us, end_us=e.end_us - ahead_us) for e in events
        )

    return replace(
        trace, host=earlier(trace.host), device=earlier(trace.device), steps=earlier(trace.steps)
    )


def program_notes(traces: Iterable[RankTrace]) -> tuple[str, ...]:
    """Return a note on the first position where the ranks run different collectives, if any."""
    ops_at: dict[Key, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        for event in trace.device:
            call = event.collective
            if call is not None and call.order >= 0:
                ops_at[(call.group_name or call.group, call.order)][call.op].append(trace.rank)
    broken = [key for key, ops in ops_at.items() if len(ops) > 1]
    if not broken:
        return ()
    key = min(broken, key=lambda k: k[1])
    choices = ", ".join(f"{op} on rank {ranks[0]}" for op, ranks in ops_at[key].items())
    return (
        f"the ranks do not run the same collectives: the one at position {key[1]} is {choices}; "
        "were the traces recorded in the same steps of one job?",
    )


def _ends(trace: RankTrace) -> dict[Key, DeviceEvent]:
    """Return the collectives launched in the trace, by group and position."""
    return {
        (event.collective.group_name or event.collective.group, event.collective.order): event
        for event in trace.device
        if event.collective is not None
        and event.collective.order >= 0
        and event.collective.op in TOGETHER
    }


def _op(event: DeviceEvent) -> str:
    return "" if event.collective is None else event.collective.op


GRAM = 8
"""Names in a row that must agree before two positions count as the same."""
COMMON = 512
"""Most positions of a gram; more common ones do not help."""
LOOK_AHEAD = 64
"""Most extra names that one side may have at one position."""
RESUME = 3
"""Names in a row that must agree after such a position."""


def align(short: Sequence[str], long: Sequence[str]) -> list[tuple[int, int]]:
    """Align ``short`` with each of its occurrences in ``long``.

    Args:
        short: such as the ops of one iteration.
        long: such as the ops of several iterations.

    Returns:
        Pairs of positions with equal names, in the order of ``long``; each position of ``long`` at
        most once, each of ``short`` at most once in one occurrence.
    """
    size = min(GRAM, len(short), len(long))
    if size == 0:
        return []
    votes = _votes(short, long, size)
    if not votes:
        return []
    shifts: list[int] = []
    pairs: list[tuple[int, int]] = []
    most = max(votes.values())
    for shift, count in sorted(votes.items(), key=lambda v: (-v[1], v[0])):
        if 2 * count < most:
            break
        if all(abs(shift - other) >= len(short) for other in shifts):
            shifts.append(shift)
            pairs += _walk_pairs(short, long, shift)
    once: dict[int, int] = {}
    for i, j in pairs:
        once.setdefault(j, i)
    return sorted(((i, j) for j, i in once.items()), key=lambda pair: pair[1])


def _votes(short: Sequence[str], long: Sequence[str], size: int) -> Counter[int]:
    """Count the grams that agree under each shift of ``short`` against ``long``."""
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for j in range(len(long) - size + 1):
        places[tuple(long[j : j + size])].append(j)
    votes: Counter[int] = Counter()
    for i in range(len(short) - size + 1):
        positions = places.get(tuple(short[i : i + size]), [])
        if len(positions) <= COMMON:
            votes.update(j - i for j in positions)
    return votes


def _walk_pairs(short: Sequence[str], long: Sequence[str], shift: int) -> list[tuple[int, int]]:
    """Return the pairs from a shift on, skipping names that only one side has."""
    i, j = max(0, -shift), max(0, shift)
    pairs = []
    while i < len(short) and j < len(long):
        if short[i] == long[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
            continue
        step = _resume(short[i : i + LOOK_AHEAD], long[j : j + LOOK_AHEAD])
        if step is None:
            i, j = i + 1, j + 1
        else:
            i, j = i + step[0], j + step[1]
    return pairs


def _resume(short: Sequence[str], long: Sequence[str]) -> tuple[int, int] | None:
    """Return the fewest names to skip on both sides until they agree again."""
    places: dict[tuple[str, ...], int] = {}
    for b in range(len(long)):
        places.setdefault(tuple(long[b : b + RESUME]), b)
    grams = [tuple(short[a : a + RESUME]) for a in range(len(short))]
    steps = [(a, places[gram]) for a, gram in enumerate(grams) if gram in places]
    return min(steps, key=sum, default=None)


ENOUGH = 0.8
"""Share of the nodes that must find their op for two traces to count as one program's."""
TENSOR_TYPE = re.compile(r"Tensor\((.*)\)$")


def attach(trace: RankTrace, execution: ExecutionTrace) -> RankTrace:
    """Give ops their nodes, and the shapes, types and collective sizes of these nodes.

    Since PyTorch 2.4 (pytorch/pytorch pull 122948) Kineto writes "Record function id". It equals
    the node's ``rf_id`` where both recorded the same iteration. Before, it wrote only "External
    id", which counts up along a thread as ``rf_id`` does, but by blocks and from another start. In
    such traces, and where the iterations differ, the ops of a thread are matched with the nodes of
    a thread by the order of their names. An execution trace of one iteration then serves every
    iteration that runs the same ops.

    Returns:
        The trace, with ``HostEvent.node`` set and missing fields filled in; if too few of the nodes
        match its ops, only a note is added.
    """
    matched = _by_record(trace.host, execution.nodes)
    if _share(matched, execution) < ENOUGH:
        matched = _by_order(trace.host, execution.nodes)
    share = _share(matched, execution)
    if share < ENOUGH:
        note = (
            f"the execution trace {execution.source} is of another program: only {share:.0%} of "
            "its ops are in this trace; it is left out"
        )
        return replace(trace, notes=(*trace.notes, note))
    host = tuple(
        event if (node := matched.get(i)) is None else _with_node(event, node)
        for i, event in enumerate(trace.host)
    )
    comms = [(host[i], node.comm) for i, node in matched.items() if node.comm is not None]
    tied = replace(trace, host=host, device=_add_sizes(trace, host, comms))
    before, after = size_notes(trace.device), size_notes(tied.device)
    return replace(tied, notes=(*(n for n in trace.notes if n not in before), *after))


def _share(matched: Mapping[int, Node], execution: ExecutionTrace) -> float:
    return len({node.id for node in matched.values()}) / len(execution.nodes)


def _by_record(host: Sequence[HostEvent], nodes: Iterable[Node]) -> dict[int, Node]:
    """Match ops with nodes by PyTorch's own number of the call.

    Returns:
        Position of an op -> node.
    """
    numbered = {node.record: node for node in nodes if node.record is not None}
    matched = {}
    for i, event in enumerate(host):
        node = numbered.get(event.record) if event.record is not None else None
        if node is not None and node.name == event.name:
            matched[i] = node
    return matched


def _by_order(host: Sequence[HostEvent], nodes: Sequence[Node]) -> dict[int, Node]:
    """Match ops with nodes by the order of names on a thread.

    Returns:
        Position of an op -> node.
    """
    ops: dict[int, list[int]] = defaultdict(list)
    for i, event in enumerate(host):
        if event.kind != "runtime":
            ops[event.thread].append(i)
    ran: dict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        ran[node.thread].append(node)
    matched: dict[int, Node] = {}
    # a thread with few ops matches in many positions, so the long ones choose first
    for thread in sorted(ran.values(), key=len, reverse=True):
        best: dict[int, Node] = {}
        for positions in ops.values():
            # clocks of whole microseconds give many ops one start; the profiler's number does not
            free = [i for i in positions if i not in matched]
            free.sort(key=lambda i: (host[i].external or 0, i))
            pairs = align([node.name for node in thread], [host[i].name for i in free])
            best = max(best, {free[j]: thread[i] for i, j in pairs}, key=len)
        matched |= best
    return matched


def _with_node(event: HostEvent, node: Node) -> HostEvent:
    shapes, dtypes = event.shapes, event.dtypes
    if shapes is None and node.inputs:
        shapes = tuple(tensor_shape(a.shape) for a in node.inputs)
        dtypes = tuple(_dtype(a.type) for a in node.inputs)
    return replace(event, node=node.id, shapes=shapes, dtypes=dtypes)


def _dtype(kind: str) -> str:
    """Return Kineto's name of a type of an execution trace."""
    if match := TENSOR_TYPE.match(kind):
        return match[1]
    return "TensorList" if "Tensor(" in kind else "Scalar"


def _add_sizes(
    trace: RankTrace,
    host: Sequence[HostEvent],
    described: Iterable[tuple[HostEvent, CollectiveCall]],
) -> tuple[DeviceEvent, ...]:
    """Complete the collectives of device events from the nodes around their launches."""
    launched = {e.correlation: e for e in host if e.correlation is not None}
    around = infos_around(host, described)
    comms = [
        (event, event.collective.or_else(around.get(event.correlation, NOTHING)))
        for event in trace.device
        if event.collective is not None
    ]
    rest = [event for event in trace.device if event.collective is None]
    return tuple(
        sorted([*rest, *with_order(comms, launched)], key=lambda e: (e.start_us, e.end_us))
    )


LISTED = 16

Document = TypeVar("Document", RankTrace, ExecutionTrace)


@dataclass(frozen=True)
class TraceSet:
    """Traces and execution traces of a job.

    Args:
        traces: by rank, each rank once, on one clock; tied to its execution trace where there is
            one.
        executions: by rank, each rank once.
        notes: on the set as a whole: missing ranks, files left out.
    """

    traces: tuple[RankTrace, ...]
    executions: tuple[ExecutionTrace, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())


def load_traces(paths: Sequence[str | Path]) -> TraceSet:
    """Read everything under these paths and match the traces of each rank.

    Args:
        paths: .json, .json.gz, .tar, .tar.gz, .tgz, folders of these; Kineto and execution traces
            in any order. One file a rank and kind.
    """
    traces: dict[int, RankTrace] = {}
    executions: dict[int, ExecutionTrace] = {}
    notes: list[str] = []
    for file in open_traces(paths):
        document = _read(file)
        if document is None:
            notes.append(f"{file.source}: not a trace; left out")
        elif isinstance(document, RankTrace):
            _add(traces, document, notes)
        else:
            _add(executions, document, notes)
    if not traces and not executions:
        raise InputError(f"{', '.join(map(str, paths))}: no traces found")
    for rank in sorted(executions.keys() & traces.keys()):
        traces[rank] = attach(traces[rank], executions[rank])
    aligned, clocks = on_one_clock([traces[rank] for rank in sorted(traces)])
    notes += [*_missing(aligned, executions), *clocks, *program_notes(aligned)]
    return TraceSet(aligned, tuple(executions[r] for r in sorted(executions)), tuple(notes))


def _read(file: TraceFile) -> RankTrace | ExecutionTrace | None:
    """Read one document; None for a JSON file that is not a trace."""
    kineto = KinetoReader(file.source)
    document = read_json(file, kineto.take)
    if isinstance(document, list):
        document = {TRACE_EVENTS: document}
    if TRACE_EVENTS in document:
        return kineto.finish(document)
    if NODES in document:
        return execution_trace(file.source, document)
    if file.named:
        raise InputError(
            f"{file.source}: JSON without `{TRACE_EVENTS}` (Kineto) or `{NODES}` (execution "
            "trace): not a trace of PyTorch's"
        )
    return None


def _add(by_rank: dict[int, Document], document: Document, notes: list[str]) -> None:
    other = by_rank.setdefault(document.rank, document)
    if other is not document:
        notes.append(
            f"{document.source}: left out, as {other.source} is of rank {document.rank} too"
        )


def _missing(traces: Sequence[RankTrace], executions: Iterable[int]) -> Iterator[str]:
    """Yield notes on ranks of the job without traces."""
    have = {trace.rank for trace in traces}
    alone = sorted(set(executions) - have)
    if alone:
        yield f"no times for {_ranks(alone)}: execution traces without their Kineto traces"
    sizes = {trace.world_size for trace in traces if trace.world_size is not None}
    if len(sizes) > 1:
        yield f"the traces name different world sizes: {', '.join(map(str, sorted(sizes)))}"
    groups = {
        event.collective.group or ()
        for trace in traces
        for event in trace.device
        if event.collective is not None
    }
    members: set[int] = set().union(*groups)
    expected = members | set(range(min(max(sizes, default=0), 1 << 16)))
    absent = sorted(expected - have)
    if traces and absent:
        yield (
            f"{_ranks(absent)} of {len(expected)} not given: the time of a collective includes "
            "waiting for them"
        )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > LISTED:
        return f"{len(ranks):,} ranks"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
