"""Predicts traced steps from their structure: the synchronized critical path on real traces.

Host times come from other steps or ranks. A step's own times are used for two things only: the
begin of the first operation on each rank, and pauses in which the host waited for something else
than the device. A step that begins before the trace waits for work that the trace does not show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from predictor.errors import InputError
from predictor.iteration.critical_path import Segment, critical_path
from predictor.iteration.graph import Graph
from predictor.iteration.timeline import Timeline, simulate_once
from predictor.trace.events import RankTrace
from predictor.trace.simulate.graph import RankSchedule, join_ranks, latency_us
from predictor.trace.simulate.host import HostItem, Role, main_thread, walk_host
from predictor.trace.simulate.overheads import TracedOverheads, overheads_of
from predictor.units import us

FIRST_STEP = (
    "the first step began before the trace: the work launched before it is unknown, so the step is "
    "marked and counts in no mean"
)


@dataclass(frozen=True)
class SimulatedStep:
    """One step of one rank.

    Args:
        measured_ms: from its marker to the next.
        predicted_ms: the same in the simulation.
        naive_ms: the median of the other steps of the trace; None if there are none.
        outside: it waited for work that was launched before the trace began.
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
        overheads: the host times, pooled over all steps and ranks.
        notes: caveats for the user.
    """

    steps: tuple[SimulatedStep, ...]
    collectives: tuple[SimulatedCollective, ...]
    critical_path: tuple[Segment, ...]
    graph: Graph
    timeline: Timeline
    overheads: TracedOverheads
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class TracedHosts:
    """The host items of every rank's steps, computed once."""

    traces: tuple[RankTrace, ...]
    items: tuple[tuple[list[HostItem], ...], ...]
    samples: tuple[tuple[TracedOverheads, ...], ...]

    @classmethod
    def of(cls, traces: Sequence[RankTrace]) -> TracedHosts:
        """Walk the hosts of some ranks of one job."""
        if not traces:
            raise InputError("no trace to simulate")
        counts = {len(trace.steps) for trace in traces}
        if len(counts) > 1:
            shown = ", ".join(f"{trace.source}: {len(trace.steps)}" for trace in traces)
            raise InputError(f"ranks of one job must have the same number of steps; here {shown}")
        items, samples = [], []
        for trace in traces:
            main = main_thread(trace)
            walked = tuple(walk_host(trace, step, main) for step in trace.steps)
            items.append(walked)
            each = zip(walked, trace.steps, strict=True)
            samples.append(
                tuple(overheads_of(step_items, trace, step) for step_items, step in each)
            )
        return cls(tuple(traces), tuple(items), tuple(samples))

    def pooled(
        self, *, without_step: int | None = None, without_rank: int | None = None
    ) -> TracedOverheads:
        """Pool the host times of all steps and ranks except those left out."""
        return TracedOverheads(
            samples
            for rank, of_rank in enumerate(self.samples)
            for step, samples in enumerate(of_rank)
            if step != without_step and rank != without_rank
        )


def simulate_trace(
    traces: Sequence[RankTrace],
    *,
    overheads: TracedOverheads | None = None,
    own_host: bool = False,
) -> SimulatedTrace:
    """Predict each step of each rank.

    Args:
        traces: one rank, or several of one job on one clock, whose collectives then meet.
        overheads: host times; None: those of the trace's other steps, or of the other ranks where
            there is one step.
        own_host: take the host's time between calls from the step itself; then only waiting is
            predicted.
    """
    hosts = TracedHosts.of(traces)
    if len(traces) == len(traces[0].steps) == 1 and overheads is None and not own_host:
        raise InputError(
            f"{traces[0].source}: a single step of a single rank has no other step to take host "
            "times from; trace several steps"
        )
    steps: list[SimulatedStep] = []
    collectives: list[SimulatedCollective] = []
    for step in range(len(traces[0].steps)):
        pooled = [overheads] * len(traces) if overheads else _of_others(hosts, step, own=own_host)
        begin = min(trace.steps[step].start_us for trace in traces)
        programs = []
        for rank, trace in enumerate(traces):
            items, marked = hosts.items[rank][step], trace.steps[step]
            program = RankSchedule(
                trace,
                pooled[rank],
                own_host=own_host,
                start_us=marked.start_us - begin,
            )
            # the work that earlier steps left on the device
            program.add_backlog(marked, items[0].thread)
            program.add_step(items)
            programs.append(program)
        graph, place = join_ranks(programs, latency_us(pooled[0]))
        timeline = simulate_once(graph)
        for rank, program in enumerate(programs):
            ends = timeline.steps[0].end[place[rank], 0, rank]
            predicted_ms = float(ends[program.end] - ends[program.begin])
            steps.append(_simulated_step(hosts, step, rank, predicted_ms))
            collectives += _collectives(program, step, begin, ends)
    notes = dict.fromkeys(note for trace in traces for note in trace.notes)
    outside = [FIRST_STEP] if any(step.outside for step in steps) else []
    return SimulatedTrace(
        tuple(steps),
        tuple(collectives),
        tuple(critical_path(graph, timeline)),
        graph,
        timeline,
        overheads or hosts.pooled(),
        (*notes, *outside),
    )


def _of_others(hosts: TracedHosts, step: int, *, own: bool) -> list[TracedOverheads]:
    """Return for each rank the host times of the other steps, or of the other ranks.

    The other ranks count where there is one step. ``own`` adds the rank itself.
    """
    ranks = range(len(hosts.traces))
    if len(hosts.traces[0].steps) > 1:
        return [hosts.pooled(without_step=step)] * len(ranks)
    return [hosts.pooled(without_rank=None if own else rank) for rank in ranks]


def _simulated_step(hosts: TracedHosts, step: int, rank: int, predicted_ms: float) -> SimulatedStep:
    trace = hosts.traces[rank]
    measured = [us(s.end_us - s.start_us) for s in trace.steps]
    other_steps = measured[:step] + measured[step + 1 :]
    naive = median(other_steps) if other_steps else None
    outside = begins_outside(trace, step, hosts.items[rank][step])
    return SimulatedStep(trace.rank, step, measured[step], predicted_ms, naive, outside)


def _collectives(
    program: RankSchedule, step: int, begin_us: float, ends_ms: NDArray[np.float64]
) -> Iterator[SimulatedCollective]:
    """Yield the ends of the step's collectives, counted from the earliest begin of the step."""
    for node, end_ms in zip(program.nodes[program.begin :], ends_ms[program.begin :], strict=True):
        event = node.event
        if event is not None and event.collective is not None:
            name = f"{event.collective.op} #{event.collective.order}"
            measured_ms = us(event.end_us - begin_us)
            rank = program.trace.rank
            yield SimulatedCollective(name, rank, step, measured_ms, float(end_ms))


OUTSIDE_SHARE = 0.02
"""Share of a step's time in waits for earlier launches above which it begins outside."""


def begins_outside(trace: RankTrace, step: int, items: Sequence[HostItem]) -> bool:
    """Return True if a step waited for work that was launched before the trace began.

    Only the first step of a trace can. The signs are device work without a launch in the trace, and
    synchronisations before the first device work.
    """
    if step > 0:
        return False
    first = trace.steps[0]
    orphans_us = sum(
        min(event.end_us, first.end_us) - max(event.start_us, first.start_us)
        for event in trace.device
        if event.start_us < first.end_us
        and event.end_us > first.start_us
        and event.correlation not in trace.launches
    )
    begun = min((event.start_us for event in trace.device), default=float("inf"))
    waited_us = sum(
        min(item.end_us, begun) - item.start_us
        for item in items
        if item.role is Role.SYNC and item.start_us < begun
    )
    return orphans_us + waited_us > OUTSIDE_SHARE * (first.end_us - first.start_us)
