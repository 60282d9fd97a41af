"""The report of ``shardopt trace``: steps, where their time goes, predicted against measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from predictor.iteration.critical_path import Segment
from predictor.trace.breakdown import (
    PARTS,
    StepBreakdown,
    breakdown,
    mean_parts,
    short_name,
    top_kernels,
)
from predictor.trace.events import RankTrace
from predictor.trace.execution import ExecutionTrace
from predictor.trace.read import TraceSet
from predictor.units import format_bytes
from shardopt.formatting import ms, number, percent, plural, ranks_text
from shardopt.report.console import heading, line, show, stacked, table
from shardopt.report.explain import path_object, show_stretches, stretches

if TYPE_CHECKING:
    from predictor.trace.simulate.step import Replay

MAX_ROWS = 24
MAX_KERNELS = 8
MAX_STRETCHES = 12
SHORT = 0.002
"""Share of the critical path below which a segment counts to the stretch before it."""

WHAT_IS_PREDICTED = (
    "Predicted: what waits for what, with kernels as long as measured and the host's times from "
    "other steps or ranks."
)

WHAT_IS_CHANGED = (
    "Predicted: the traced steps with that changed; kernels, copies and collectives are scaled, "
    "the host's times are as traced."
)

_MARKS = {
    "compute": ("compute", "█", "cyan"),
    "exposed_communication": ("exposed communication", "▓", "magenta"),
    "memcpy": ("copies", "▒", "green"),
    "host_bound": ("waiting for the host", "░", "yellow"),
    "idle": ("idle", "·", "dim"),
}

Predicted = Mapping[tuple[int, str], float]
"""Rank and name of a step -> its predicted time in ms."""


def notes_of(found: TraceSet, replayed: Replay | None = None) -> list[str]:
    """What the user should know, each once, with the ranks it holds for."""
    known = {note for trace in found.traces for note in trace.notes}
    predicted = [n for n in (replayed.notes if replayed else ()) if n not in known]
    sources: list[RankTrace | ExecutionTrace] = [*found.traces, *found.executions]
    ranks: dict[str, list[int]] = defaultdict(list)
    for source in sources:
        for note in source.notes:
            ranks[note].append(source.rank)
    alone = len({source.rank for source in sources}) == 1
    told = [note if alone else f"rank {ranks_text(where)}: {note}" for note, where in ranks.items()]
    return [*told, *found.notes, *predicted]


def trace_object(
    found: TraceSet, replayed: Replay | None, what_if: Mapping[str, Any]
) -> dict[str, Any]:
    """What ``trace --json`` prints.

    Keys:
        steps: a list of ``rank``, ``step``, ``measured_ms``, ``predicted_ms`` (None where there is
            no prediction), ``breakdown`` (parts that sum to ``measured_ms``) and
            ``hidden_communication_ms``, which lies in the part ``compute``.
        breakdown: the mean of the steps' parts; empty where there are no steps.
        ranks: a list of ``rank``, ``source``, ``world_size``, ``device``, ``host_events``,
            ``device_events``.
        kernels: the longest by their sum over all steps and ranks.
        critical_path: as in ``explain --json``.
        executions: of each execution trace ``ops`` (how often each ran), ``input_bytes`` of all
            innermost ops, and ``collectives``.
        notes: what was missing and what was done instead.
        what_if: what ``predicted_ms`` changes of the traced job: ``hardware``, ``batch_scale``,
            ``link_scale``; empty where it changes nothing.
    """
    steps = [step for trace in found.traces for step in breakdown(trace)]
    predicted = _predicted(found, replayed)
    return {
        "device": _device(found.traces),
        "steps": [_step_object(step, predicted) for step in steps],
        "breakdown": mean_parts(steps) if steps else {},
        "ranks": [_rank_object(trace) for trace in found.traces],
        "kernels": [
            {"name": k.name, "count": k.count, "total_ms": k.total_ms, "collective": k.collective}
            for k in top_kernels(found.traces, MAX_KERNELS)
        ],
        "critical_path": path_object(_path(found, replayed)),
        "executions": [_execution_object(execution) for execution in found.executions],
        "notes": notes_of(found, replayed),
        "what_if": dict(what_if),
    }


def _predicted(found: TraceSet, replayed: Replay | None) -> Predicted:
    names = {(t.rank, i): s.name for t in found.traces for i, s in enumerate(t.steps)}
    steps = replayed.steps if replayed is not None else ()
    return {(s.rank, names[s.rank, s.step]): s.predicted_ms for s in steps}


def _path(found: TraceSet, replayed: Replay | None) -> tuple[Segment, ...]:
    """The critical path with the job's ranks; a replay counts those that it was given."""
    path = replayed.critical_path if replayed is not None else ()
    return tuple(replace(segment, rank=found.traces[segment.rank].rank) for segment in path)


def _device(traces: Iterable[RankTrace]) -> str | None:
    names = {trace.device_name for trace in traces if trace.device_name}
    return ", ".join(sorted(names)) or None


def _step_object(step: StepBreakdown, predicted: Predicted) -> dict[str, Any]:
    return {
        "rank": step.rank,
        "step": step.step,
        "measured_ms": step.measured_ms,
        "predicted_ms": predicted.get((step.rank, step.step)),
        "breakdown": step.parts(),
        "hidden_communication_ms": step.hidden_communication_ms,
    }


def _rank_object(trace: RankTrace) -> dict[str, Any]:
    return {
        "rank": trace.rank,
        "source": trace.source,
        "world_size": trace.world_size,
        "device": trace.device_name,
        "host_events": len(trace.host),
        "device_events": len(trace.device),
    }


def _execution_object(execution: ExecutionTrace) -> dict[str, Any]:
    comms = [node.comm for node in execution.collectives() if node.comm is not None]
    return {
        "rank": execution.rank,
        "source": execution.source,
        "schema": execution.schema,
        "ops": dict(execution.op_counts().most_common()),
        "input_bytes": execution.input_bytes(),
        "collectives": [{"op": c.op, "size_bytes": c.size_bytes} for c in comms],
    }


def show_headline(
    console: Console, found: TraceSet, replayed: Replay | None, what_if: Mapping[str, Any]
) -> None:
    """One line for ``--quiet``: a step measured, and predicted."""
    steps = [step for trace in found.traces for step in breakdown(trace)]
    if not steps:
        line(console, "no steps: execution traces hold no times")
        return
    console.print(_headline(steps, _predicted(found, replayed), what_if))


def show_traces(
    console: Console, found: TraceSet, replayed: Replay | None, what_if: Mapping[str, Any]
) -> None:
    """The whole report."""
    console.print()
    if found.traces:
        line(console, _what_was_read(found.traces))
        _show_steps(console, found.traces, _predicted(found, replayed), what_if)
        _show_kernels(console, found.traces)
        _show_path(console, _path(found, replayed))
    else:
        _show_executions(console, found.executions)


def _what_was_read(traces: Sequence[RankTrace]) -> str:
    sizes = {trace.world_size for trace in traces if trace.world_size is not None}
    of = f" of {max(sizes)}" if sizes else ""
    device = _device(traces)
    counts = {len(trace.steps) for trace in traces}
    each = "each" if len(traces) > 1 and len(counts) == 1 else "in all"
    steps = max(counts) if each == "each" else sum(len(trace.steps) for trace in traces)
    return (
        f"Rank {ranks_text(t.rank for t in traces)}{of}"
        f"{f' on {device}' if device else ''}: {plural(steps, 'step')}"
        f"{f' {each}' if len(traces) > 1 else ''}, "
        f"{sum(len(t.device) for t in traces):,} events of the device, "
        f"{sum(len(t.host) for t in traces):,} of the host."
    )


def _headline(
    steps: Sequence[StepBreakdown], predicted: Predicted, what_if: Mapping[str, Any]
) -> Text:
    text = Text.assemble("Measured ", (ms(fmean(s.measured_ms for s in steps)), "bold"), " a step")
    pairs = [
        (s.measured_ms, predicted[s.rank, s.step]) for s in steps if (s.rank, s.step) in predicted
    ]
    errors = [abs(p / m - 1) for m, p in pairs if m > 0]
    if not errors:
        return text.append(".")
    mean = fmean(p for _, p in pairs)
    if what_if:
        asked = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in what_if.items())
        change = 100 * (mean / fmean(m for m, _ in pairs) - 1)
        text.append(f"; with {asked}: ")
        return text.append(ms(mean), "bold green").append(f", {change:+.1f} %.")
    text.append(", predicted ").append(ms(mean), "bold green")
    over = plural(len(errors), "step")
    return text.append(f"; mean absolute error {percent(fmean(errors))} over {over}.")


def _show_steps(
    console: Console,
    traces: Sequence[RankTrace],
    predicted: Predicted,
    what_if: Mapping[str, Any],
) -> None:
    steps = [step for trace in traces for step in breakdown(trace)]
    console.print(_headline(steps, predicted, what_if))
    parts = mean_parts(steps)
    total = sum(parts.values())
    if total > 0:
        shares = (
            f"{_MARKS[part][0]} {percent(parts[part] / total)}"
            for part in PARTS
            if parts[part] > 1e-6 * total
        )
        line(console, f"Of a step: {', '.join(shares)}.")
    if predicted:
        line(console, WHAT_IS_CHANGED if what_if else WHAT_IS_PREDICTED, style="dim")
    shown = sorted(steps, key=lambda s: -s.measured_ms)[:MAX_ROWS]
    heading(console, "Steps", "from a step's marker to the next")
    columns = [("step", "left"), ("rank", "right"), ("measured ms", "right")]
    if predicted:
        columns += [("predicted ms", "right"), ("change" if what_if else "error", "right")]
    made = table([*columns, ("where the time goes", "left")])
    longest = max(step.measured_ms for step in steps)
    width = max(10, min(48, console.width - (62 if predicted else 42)))
    for step in (s for s in steps if s in shown):
        made.add_row(
            step.step,
            str(step.rank),
            number(step.measured_ms),
            *(_against(step, predicted) if predicted else ()),
            _bar(step, longest, width),
        )
    show(console, made)
    _show_legend(console)
    if len(shown) < len(steps):
        line(
            console,
            f"  the {len(shown)} longest of {len(steps)} steps are shown; --json has all",
            style="dim",
        )


def _against(step: StepBreakdown, predicted: Predicted) -> tuple[str, str]:
    value = predicted.get((step.rank, step.step))
    if value is None:
        return "-", "-"
    error = 100 * (value / step.measured_ms - 1) if step.measured_ms > 0 else 0.0
    return number(value), f"{error:+.1f} %"


def _bar(step: StepBreakdown, longest: float, width: int) -> Text:
    parts = [(value, *_MARKS[part][1:]) for part, value in step.parts().items()]
    return stacked(parts, longest, width)


def _show_legend(console: Console) -> None:
    legend = Text("  ")
    for name, mark, style in _MARKS.values():
        legend.append(mark * 2, style=style)
        legend.append(f" {name}   ", style="dim")
    console.print(legend)


def _show_kernels(console: Console, traces: Sequence[RankTrace]) -> None:
    found = top_kernels(traces, MAX_KERNELS)
    if not found:
        return
    heading(console, "What runs longest on the device", "all steps and ranks together")
    made = table([("ms", "right"), ("runs", "right"), ("µs each", "right"), ("kernel", "fold")])
    for kernel in found:
        each = 1e3 * kernel.total_ms / kernel.count
        made.add_row(number(kernel.total_ms), f"{kernel.count:,}", number(each), kernel.name)
    show(console, made)


def _show_path(console: Console, path: Sequence[Segment]) -> None:
    """The longest stretches of the predicted critical path, in order of time."""
    total = sum(segment.duration_ms for segment in path)
    found = stretches(
        [
            replace(segment, name=short_name(segment.name))
            for segment in path
            if segment.duration_ms >= SHORT * total
        ]
    )
    if not found:
        return
    longest = sorted(found, key=lambda s: (-s.duration_ms, s.start_ms))[:MAX_STRETCHES]
    shown = sum(stretch.duration_ms for stretch in longest)
    aside = f"its longest stretches, {percent(shown / total)} of it, in order of time"
    heading(console, "Predicted critical path", aside)
    show_stretches(console, (stretch for stretch in found if stretch in longest))


def _show_executions(console: Console, executions: Sequence[ExecutionTrace]) -> None:
    """What execution traces say by themselves."""
    line(
        console,
        "Execution traces alone: they say what ran and on which tensors, but hold no times, no "
        "kernels and no streams. Give the Kineto traces of the same run for steps and a breakdown.",
    )
    heading(console, "Execution traces")
    made = table(
        [
            ("rank", "right"),
            ("schema", "left"),
            ("ops", "right"),
            ("inputs of ops", "right"),
            ("collectives", "right"),
            ("sent by them", "right"),
        ]
    )
    for execution in executions:
        comms = [node.comm for node in execution.collectives() if node.comm is not None]
        made.add_row(
            str(execution.rank),
            execution.schema,
            f"{sum(execution.op_counts().values()):,}",
            format_bytes(execution.input_bytes()),
            str(len(comms)),
            format_bytes(sum(c.size_bytes or 0 for c in comms)),
        )
    show(console, made)
