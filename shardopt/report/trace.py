"""The report of ``shardopt trace``: steps, where their time goes, predicted against measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from pydantic import Field

from predictor.trace.breakdown import (
    PARTS,
    KernelTotal,
    StepBreakdown,
    breakdown,
    mean_parts,
    short_name,
    top_kernels,
)
from predictor.trace.events import RankTrace
from predictor.trace.execution import ExecutionTrace
from predictor.trace.read import TraceSet
from predictor.trace.simulate.step import SimulatedStep, SimulatedTrace
from predictor.units import format_bytes
from shardopt.api.document import PathSegment, path_keys
from shardopt.api.json_object import JsonObject, key
from shardopt.formatting import ms, number, percent, plural, ranks_text, shares
from shardopt.report.blocks import Bar, Block, Heading, Legend, Line, TextTable, View
from shardopt.report.explain import path_grid

MAX_ROWS = 24
MAX_KERNELS = 8
SHORT = 0.002
"""Share of the critical path below which a segment counts to the section before it."""

WHAT_IS_PREDICTED = (
    "The prediction simulates what waits for what: kernels take their measured times, host times "
    "come from other steps or ranks."
)
NO_TIMES = (
    "Execution traces record what ran and on which tensors, but no times, kernels or streams. Give "
    "the Kineto traces of the same run too, to see steps and where their time goes."
)
_WORDS = {
    "compute": "compute",
    "exposed_communication": "exposed communication",
    "memcpy": "copies",
    "host_bound": "waiting for the host",
    "idle": "idle",
}


class TracedStep(JsonObject):
    """One step of one rank."""

    rank: int
    step: str
    measured_ms: float
    predicted_ms: float | None = key("Null where there is no prediction.")
    outside: bool = key("It began before the trace, and counts in no mean error.")
    breakdown: dict[str, float] = key("Parts that sum to ``measured_ms``.", "parts")
    hidden_communication_ms: float = key("Lies in the part ``compute``.")


class TracedRank(JsonObject):
    """One Kineto trace."""

    rank: int
    source: str
    world_size: int | None
    device: str | None = key("Name of the device.", "device_name")
    host_events: int
    device_events: int


class SentBytes(JsonObject):
    """A collective of an execution trace."""

    op: str
    size_bytes: int | None


class TracedExecution(JsonObject):
    """One execution trace."""

    rank: int
    source: str
    schema_version: str = Field(alias="schema", description="Of the trace file.")
    ops: dict[str, int] = key("Op -> how often it ran.")
    input_bytes: int = key("Bytes that all innermost ops read.")
    collectives: list[SentBytes]


class TraceAnswer(JsonObject):
    """``shardopt trace``."""

    device: str | None
    steps: list[TracedStep]
    breakdown: dict[str, float] = key("Mean of the steps' parts; empty where there are no steps.")
    ranks: list[TracedRank]
    kernels: list[KernelTotal] = key("The longest by their sum over all steps and ranks.")
    critical_path: list[PathSegment] = key("As in ``explain --json``.")
    executions: list[TracedExecution]
    notes: list[str] = key("What was missing and what was done instead.")


def trace_view(
    trace_set: TraceSet,
    simulated: SimulatedTrace | None,
    notes: Sequence[str],
) -> View:
    """Return all forms of what traces hold.

    Args:
        simulated: the prediction of its steps; None where there is none.
        notes: further ones for stderr.
    """
    traces = trace_set.traces
    measured = [step for trace in traces for step in breakdown(trace)]
    replayed = {_name(trace_set, s): s for s in (simulated.steps if simulated is not None else ())}
    path = [
        # the simulation counts the ranks that it was given; the job has numbers of its own
        replace(segment, rank=traces[segment.rank].rank)
        for segment in (simulated.critical_path if simulated is not None else ())
    ]
    keys = {
        "device": _device(traces),
        "steps": [_step(step, replayed.get((step.rank, step.step))) for step in measured],
        "breakdown": mean_parts(measured) if measured else {},
        "ranks": [
            {**vars(t), "host_events": len(t.host), "device_events": len(t.device)} for t in traces
        ],
        "kernels": top_kernels(traces, MAX_KERNELS),
        "critical_path": path_keys(path),
        "executions": [_execution(execution) for execution in trace_set.executions],
        "notes": _notes(trace_set, simulated),
    }
    answer = TraceAnswer.model_validate(keys)
    steps = answer.steps
    brief = "no steps: execution traces record no times"
    if steps:
        brief = _headline(steps)
    report: list[Block]
    if traces:
        report = ["", _what_was_read(traces), brief, *_means(answer.breakdown)]
        if replayed:
            report.append(Line(WHAT_IS_PREDICTED, "dim"))
        report += _show_steps(steps)
        if answer.kernels:
            rows = [
                (number(k.total_ms), f"{k.count:,}", number(1e3 * k.total_ms / k.count), k.name)
                for k in answer.kernels
            ]
            report.append(Heading("Longest kernels", "summed over all steps and ranks"))
            report.append(TextTable([">ms", ">runs", ">µs each", "~kernel"], rows))
        report += _path(answer.critical_path)
    else:
        report = ["", NO_TIMES, *_executions(answer.executions)]
    return View(answer, report, [brief], [*answer.notes, *notes])


def _name(trace_set: TraceSet, step: SimulatedStep) -> tuple[int, str]:
    trace = next(trace for trace in trace_set.traces if trace.rank == step.rank)
    return step.rank, trace.steps[step.step].name


def _notes(trace_set: TraceSet, simulated: SimulatedTrace | None) -> list[str]:
    """List the notes for the user, each once, with the ranks it holds for."""
    of_traces = {note for trace in trace_set.traces for note in trace.notes}
    predicted = [n for n in (simulated.notes if simulated else ()) if n not in of_traces]
    sources: list[RankTrace | ExecutionTrace] = [*trace_set.traces, *trace_set.executions]
    ranks: dict[str, list[int]] = defaultdict(list)
    for source in sources:
        for note in source.notes:
            ranks[note].append(source.rank)
    alone = len({source.rank for source in sources}) == 1
    notes = [note if alone else f"rank {ranks_text(at)}: {note}" for note, at in ranks.items()]
    return [*notes, *trace_set.notes, *predicted]


def _device(traces: Iterable[RankTrace]) -> str | None:
    names = {trace.device_name for trace in traces if trace.device_name}
    return ", ".join(sorted(names)) or None


def _step(step: StepBreakdown, replayed: SimulatedStep | None) -> dict[str, Any]:
    return {
        **vars(step),
        "measured_ms": step.measured_ms,
        "predicted_ms": replayed and replayed.predicted_ms,
        "outside": replayed is not None and replayed.outside,
    }


def _execution(execution: ExecutionTrace) -> dict[str, Any]:
    return {
        **vars(execution),
        "ops": dict(execution.op_counts().most_common()),
        "input_bytes": execution.input_bytes(),
        "collectives": [node.comm for node in execution.collectives() if node.comm is not None],
    }


def _what_was_read(traces: Sequence[RankTrace]) -> str:
    sizes = {trace.world_size for trace in traces if trace.world_size is not None}
    of_world = f" of {max(sizes)}" if sizes else ""
    device = _device(traces)
    counts = {len(trace.steps) for trace in traces}
    each = "each" if len(traces) > 1 and len(counts) == 1 else "in all"
    steps = max(counts) if each == "each" else sum(len(trace.steps) for trace in traces)
    return (
        f"Rank{'s' if len(traces) > 1 else ''} {ranks_text(t.rank for t in traces)}{of_world}"
        f"{f' on {device}' if device else ''}: {plural(steps, 'step')}"
        f"{f' {each}' if len(traces) > 1 else ''}, "
        f"{sum(len(t.device) for t in traces):,} device events and "
        f"{sum(len(t.host) for t in traces):,} host events."
    )


def _headline(steps: Sequence[TracedStep]) -> str:
    text = f"Measured {ms(fmean(step.measured_ms for step in steps))} per step"
    pairs = [
        (step.measured_ms, step.predicted_ms)
        for step in steps
        if step.predicted_ms is not None and not step.outside
    ]
    errors = [abs(p / m - 1) for m, p in pairs if m > 0]
    if not errors:
        return f"{text}."
    mean = fmean(p for _, p in pairs)
    return (
        f"{text}, predicted {ms(mean)}; mean absolute error {percent(fmean(errors))} over "
        f"{plural(len(errors), 'step')}."
    )


def _means(parts: Mapping[str, float]) -> list[Block]:
    """The mean step by part."""
    total = sum(parts.values())
    if total <= 0:
        return []
    present = [part for part in PARTS if parts[part] > 1e-6 * total]
    named = zip(present, shares([parts[part] for part in present]), strict=True)
    texts = [f"{_WORDS[part]} {share}" for part, share in named]
    return [f"Where the time goes: {', '.join(texts)}."]


def _show_steps(steps: Sequence[TracedStep]) -> list[Block]:
    """A row for each of the longest steps."""
    predicted = any(step.predicted_ms is not None for step in steps)
    longest = sorted(steps, key=lambda s: -s.measured_ms)[:MAX_ROWS]
    whole = longest[0].measured_ms
    rows = [
        (
            step.step,
            str(step.rank),
            number(step.measured_ms),
            *(_against(step) if predicted else ()),
            Bar([(v, part, _WORDS[part]) for part, v in step.breakdown.items()], whole),
        )
        for step in steps
        if step in longest
    ]
    columns = [
        "<step",
        ">rank",
        ">measured ms",
        *([">predicted ms", ">error"] if predicted else []),
    ]
    blocks: list[Block] = [
        Heading("Steps", "from one step marker to the next"),
        TextTable([*columns, "<where the time goes"], rows),
        Legend(_WORDS),
    ]
    if len(longest) < len(steps):
        blocks.append(Line(f"The {len(longest)} longest of {len(steps)} steps are shown.", "dim"))
    return blocks


def _against(step: TracedStep) -> tuple[str, str]:
    value, measured = step.predicted_ms, step.measured_ms
    if value is None:
        return "-", "-"
    error = 100 * (value / measured - 1) if measured > 0 else 0.0
    mark = " (began before the trace)" if step.outside else ""
    return number(value), f"{error:+.1f} %{mark}"


def _path(path: Sequence[PathSegment]) -> list[Block]:
    """The longest sections of the predicted critical path, in order of time."""
    total = sum(segment.duration_ms for segment in path)
    long = [s for s in path if s.duration_ms >= SHORT * total]
    if not long:
        return []
    title = Heading("Predicted critical path", "its longest sections, in order of time")
    short = [s.model_copy(update={"name": short_name(s.name)}) for s in long]
    return [title, *path_grid(short)]


def _executions(executions: Sequence[TracedExecution]) -> list[Block]:
    rows = [
        (
            str(execution.rank),
            execution.schema_version,
            f"{sum(execution.ops.values()):,}",
            format_bytes(execution.input_bytes),
            str(len(execution.collectives)),
            format_bytes(sum(c.size_bytes or 0 for c in execution.collectives)),
        )
        for execution in executions
    ]
    columns = [">rank", "<schema", ">ops", ">op inputs", ">collectives", ">bytes sent"]
    return [Heading("Execution traces"), TextTable(columns, rows)]
