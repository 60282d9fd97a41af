"""What ``shardopt trace`` finds out about traces, for the console and ``--json``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from predictor.iteration.critical_path import Segment
from predictor.trace.breakdown import (
    KernelTotal,
    StepBreakdown,
    breakdown,
    mean_parts,
    top_kernels,
)
from predictor.trace.events import RankTrace
from predictor.trace.execution import ExecutionTrace
from predictor.trace.read import TraceSet
from predictor.trace.simulate.step import SimulatedStep, SimulatedTrace
from shardopt.formatting import ranks_text

MAX_KERNELS = 8


@dataclass(frozen=True)
class TraceSummary:
    """Steps, where their time goes, and what was predicted of them.

    Args:
        steps: of all ranks.
        parts: mean ms of a step by part; empty where there are no steps.
        kernels: the longest by their sum over all steps and ranks.
        predicted: rank and name of a step -> its predicted time in ms.
        outside: rank and name of steps that began before the trace; they count in no mean.
        critical_path: predicted, with the job's ranks.
        notes: what the user should know, each once, with the ranks it holds for.
        what_if: what the prediction changes in the traced job; empty where it changes nothing.
    """

    found: TraceSet
    steps: Sequence[StepBreakdown]
    parts: Mapping[str, float]
    kernels: Sequence[KernelTotal]
    predicted: Mapping[tuple[int, str], float]
    outside: Collection[tuple[int, str]]
    critical_path: Sequence[Segment]
    notes: Sequence[str]
    what_if: Mapping[str, Any]


def summarise_trace(
    found: TraceSet, simulated: SimulatedTrace | None, what_if: Mapping[str, Any]
) -> TraceSummary:
    """The summary of what was read.

    Args:
        simulated: the prediction of its steps; None where there is none.
    """
    steps = [step for trace in found.traces for step in breakdown(trace)]
    simulated_steps = simulated.steps if simulated is not None else ()
    return TraceSummary(
        found,
        steps,
        mean_parts(steps) if steps else {},
        top_kernels(found.traces, MAX_KERNELS),
        {_name(found, s): s.predicted_ms for s in simulated_steps},
        {_name(found, s) for s in simulated_steps if s.outside},
        _path(found, simulated),
        _notes(found, simulated),
        what_if,
    )


def _name(found: TraceSet, step: SimulatedStep) -> tuple[int, str]:
    """Rank and name of a simulated step."""
    trace = next(trace for trace in found.traces if trace.rank == step.rank)
    return step.rank, trace.steps[step.step].name


def _path(found: TraceSet, simulated: SimulatedTrace | None) -> tuple[Segment, ...]:
    """The simulation counts the ranks that it was given; the job has numbers of its own."""
    path = simulated.critical_path if simulated is not None else ()
    return tuple(replace(segment, rank=found.traces[segment.rank].rank) for segment in path)


def _notes(found: TraceSet, simulated: SimulatedTrace | None) -> list[str]:
    known = {note for trace in found.traces for note in trace.notes}
    predicted = [n for n in (simulated.notes if simulated else ()) if n not in known]
    sources: list[RankTrace | ExecutionTrace] = [*found.traces, *found.executions]
    ranks: dict[str, list[int]] = defaultdict(list)
    for source in sources:
        for note in source.notes:
            ranks[note].append(source.rank)
    alone = len({source.rank for source in sources}) == 1
    notes = [note if alone else f"rank {ranks_text(of)}: {note}" for note, of in ranks.items()]
    return [*notes, *found.notes, *predicted]
