"""Predicts traced steps from their structure: the synchronized critical path on real traces.

Of a step only this is used: which thread issued what in which order, on which stream, what waited
for what, and how long kernels and copies ran. Host times come from other steps or ranks. Start and
end times are not used, except for when each rank began the first operation, and for pauses in
which the host waited for something else than the device, which are the step's own.

Of a step that begins before the trace does, part of what it waited for is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from predictor.errors import InputError
from predictor.iteration.critical_path import Segment, critical_path
from predictor.iteration.graph import Graph
from predictor.iteration.timeline import Timeline, simulate_once
from predictor.trace.events import RankTrace
from predictor.trace.simulate.graph import (
    Factor,
    HostTimes,
    JobGraph,
    RankBuilder,
    RankGraph,
    join_ranks,
    latency_us,
)
from predictor.trace.simulate.host import HostItem, Launches, Role, walk_host
from predictor.trace.simulate.overheads import OverheadSamples, OverheadTable, collect_samples
from predictor.units import us

FIRST_STEP = (
    "the first step began before the trace: what was launched before it is unknown, so the step is "
    "marked and counts in no mean"
)


@dataclass(frozen=True)
class SimulatedStep:
    """One step of one rank.

    Args:
        measured_ms: from its marker to the next.
        predicted_ms: the same in the simulation.
        naive_ms: the median of the other steps of the trace; None if there are none.
        outside: it began before the trace did, so what it waited for is not all known.
    """

    rank: int
    step: int
    measured_ms: float
    predicted_ms: float
    naive_ms: float | None
    outside: bool = False


@dataclass(frozen=True)
class SimulatedCollective:
    """When a collective's kernel ended on a rank, in ms after the first rank's step began."""

    name: str
    rank: int
    step: int
    measured_end_ms: float
    predicted_end_ms: float


@dataclass(frozen=True, eq=False)
class SimulatedTrace:
    """Traced steps and their prediction; path, graph and timeline are those of the last step.

    Args:
        overheads: the host times, pooled over everything that was read.
        notes: caveats for the user.
    """

    steps: tuple[SimulatedStep, ...]
    collectives: tuple[SimulatedCollective, ...]
    critical_path: tuple[Segment, ...]
    graph: Graph
    timeline: Timeline
    overheads: OverheadTable
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class TracedHosts:
    """The host items of every rank's steps, computed once."""

    traces: tuple[RankTrace, ...]
    items: tuple[tuple[list[HostItem], ...], ...]
    samples: tuple[tuple[OverheadSamples, ...], ...]
    launches: tuple[Launches, ...]

    @classmethod
    def of(cls, traces: Sequence[RankTrace]) -> TracedHosts:
        """Walk the hosts of some ranks of one job.

        Raises:
            InputError: no trace, or ranks with different numbers of steps.
        """
        if not traces:
            raise InputError("no trace to simulate")
        counts = {len(trace.steps) for trace in traces}
        if len(counts) > 1:
            shown = ", ".join(f"{trace.source}: {len(trace.steps)}" for trace in traces)
            raise InputError(f"ranks of one job must have the same number of steps; here {shown}")
        items, samples = [], []
        by_rank = tuple(Launches(trace) for trace in traces)
        for trace, launches in zip(traces, by_rank, strict=True):
            walked = tuple(walk_host(trace, step, launches) for step in trace.steps)
            items.append(walked)
            samples.append(
                tuple(
                    collect_samples(found, trace, step, launches)
                    for found, step in zip(walked, trace.steps, strict=True)
                )
            )
        return cls(tuple(traces), tuple(items), tuple(samples), by_rank)

    def pooled(
        self, *, without_step: int | None = None, without_rank: int | None = None
    ) -> OverheadSamples:
        """Host times of all steps and ranks except those left out."""
        return OverheadSamples.merged(
            samples
            for rank, of_rank in enumerate(self.samples)
            for step, samples in enumerate(of_rank)
            if step != without_step and rank != without_rank
        )


def simulate_trace(
    traces: Sequence[RankTrace],
    *,
    overheads: OverheadTable | None = None,
    own_host: bool = False,
    factor: Factor | None = None,
) -> SimulatedTrace:
    """Predict each step of each rank.

    Args:
        traces: one rank, or several of one job on one clock, whose collectives then meet.
        overheads: host times; None: of the trace's other steps, or where there is but one step, of
            the other ranks.
        own_host: take the host's time between calls from the step itself; then only waiting is
            predicted.
        factor: predicted over traced duration of each kernel and copy; None: as traced.

    Raises:
        InputError: no trace, ranks that do not belong together, or a single step of a single rank
            without overheads.
    """
    hosts = TracedHosts.of(traces)
    one_step = len(traces[0].steps) == 1
    if one_step and len(traces) == 1 and overheads is None and not own_host:
        raise InputError(
            f"{traces[0].source}: a single step of a single rank has no other step to take host "
            "times from; trace several steps"
        )
    steps: list[SimulatedStep] = []
    collectives: list[SimulatedCollective] = []
    for step in range(len(traces[0].steps)):
        tables = _tables(hosts, step, overheads, own_host=own_host, one_step=one_step)
        job, programs = build_graph(hosts, step, tables, own_host=own_host, factor=factor)
        timeline = simulate_once(job.graph)
        steps += _steps(hosts, step, job, programs, timeline)
        collectives += _collectives(traces, step, job, programs, timeline)
    notes = dict.fromkeys(note for trace in traces for note in trace.notes)
    outside = [FIRST_STEP] if any(step.outside for step in steps) else []
    return SimulatedTrace(
        tuple(steps),
        tuple(collectives),
        tuple(critical_path(job.graph, timeline)),
        job.graph,
        timeline,
        overheads or hosts.pooled().table(),
        (*notes, *outside),
    )


def _tables(
    hosts: TracedHosts,
    step: int,
    overheads: OverheadTable | None,
    *,
    own_host: bool,
    one_step: bool,
) -> list[OverheadTable]:
    """The table of each rank."""
    ranks = range(len(hosts.traces))
    if overheads is not None:
        return [overheads for _ in ranks]
    if not one_step:
        return [hosts.pooled(without_step=step).table()] * len(ranks)
    if own_host:
        return [hosts.pooled().table()] * len(ranks)
    return [hosts.pooled(without_rank=rank).table() for rank in ranks]


def build_graph(
    hosts: TracedHosts,
    step: int,
    tables: Sequence[OverheadTable],
    *,
    own_host: bool = False,
    factor: Factor | None = None,
) -> tuple[JobGraph, list[RankGraph]]:
    """The graph of a step, with the work that earlier steps left on the device."""
    begin = min(trace.steps[step].start_us for trace in hosts.traces)
    programs = []
    for rank, trace in enumerate(hosts.traces):
        offset = trace.steps[step].start_us - begin
        items = hosts.items[rank][step]
        builder = RankBuilder(trace, HostTimes(tables[rank], own_host), offset)
        builder.add_backlog(trace.steps[step], hosts.launches[rank], items[0].thread)
        builder.add_step(items)
        if factor is not None:
            builder.scale(factor)
        programs.append(builder.program)
    return join_ranks(programs, latency_us(tables[0])), programs


def _steps(
    hosts: TracedHosts,
    step: int,
    job: JobGraph,
    programs: Sequence[RankGraph],
    timeline: Timeline,
) -> list[SimulatedStep]:
    found = []
    for rank, (trace, of_rank) in enumerate(zip(hosts.traces, programs, strict=True)):
        first, last = (job.place[rank][node] for node in (of_rank.begin, of_rank.end))
        ends = timeline.steps[0].end[:, 0, rank]
        others = [
            us(s.end_us - s.start_us) for number, s in enumerate(trace.steps) if number != step
        ]
        found.append(
            SimulatedStep(
                trace.rank,
                step,
                us(trace.steps[step].end_us - trace.steps[step].start_us),
                float(ends[last] - ends[first]),
                median(others) if others else None,
                begins_outside(trace, step, hosts.items[rank][step], hosts.launches[rank]),
            )
        )
    return found


def _collectives(
    traces: Sequence[RankTrace],
    step: int,
    job: JobGraph,
    programs: Sequence[RankGraph],
    timeline: Timeline,
) -> list[SimulatedCollective]:
    """Ends of the step's collectives; times count from the earliest begin of the step."""
    measured_begin = min(trace.steps[step].start_us for trace in traces)
    found = []
    for rank, (trace, of_rank) in enumerate(zip(traces, programs, strict=True)):
        for index, node in enumerate(of_rank.nodes):
            if index < of_rank.begin or node.collective is None or node.event is None:
                continue
            end = timeline.steps[0].end[job.place[rank][index], 0, rank]
            found.append(
                SimulatedCollective(
                    f"{node.collective.op} #{node.collective.order}",
                    trace.rank,
                    step,
                    us(node.event.end_us - measured_begin),
                    float(end),
                )
            )
    return found


OUTSIDE_SHARE = 0.02
"""Share of its time from which on a step is said to begin outside."""


def begins_outside(
    trace: RankTrace, step: int, items: Sequence[HostItem], launches: Launches
) -> bool:
    """Whether a step waited for work that was launched before the trace began.

    Only the first step of a trace can. It shows in device work whose launch the trace lacks, and in
    synchronisations before any work that it has.
    """
    if step > 0:
        return False
    first = trace.steps[0]
    orphans_us = sum(
        min(event.end_us, first.end_us) - max(event.start_us, first.start_us)
        for event in trace.device
        if event.start_us < first.end_us
        and event.end_us > first.start_us
        and event.correlation not in launches.call_of
    )
    begun = min((event.start_us for event in trace.device), default=float("inf"))
    waited_us = sum(
        min(item.end_us, begun) - item.start_us
        for item in items
        if item.role is Role.SYNC and item.start_us < begun
    )
    return orphans_us + waited_us > OUTSIDE_SHARE * (first.end_us - first.start_us)
