"""The report of ``shardopt trace``: steps, where their time goes, predicted against measured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from predictor.iteration.critical_path import Segment
from predictor.trace.breakdown import PARTS, KernelTotal, StepBreakdown, short_name
from predictor.trace.events import RankTrace
from predictor.trace.execution import ExecutionTrace
from predictor.units import format_bytes
from shardopt.explain.critical_path import path_sections
from shardopt.explain.trace import TraceSummary
from shardopt.formatting import ms, number, percent, plural, ranks_text
from shardopt.report.console import heading, line, show, stacked, table
from shardopt.report.explain import path_object, show_sections

MAX_ROWS = 24
MAX_SECTIONS = 12
SHORT = 0.002
"""Share of the critical path below which a segment counts to the section before it."""

WHAT_IS_PREDICTED = (
    "The prediction simulates what waits for what: kernels take their measured times, host times "
    "come from other steps or ranks."
)

WHAT_IS_CHANGED = (
    "The prediction simulates the traced steps with this change: kernels, copies and collectives "
    "are scaled, host times stay as traced."
)

_MARKS = {
    "compute": ("compute", "█", "cyan"),
    "exposed_communication": ("exposed communication", "▓", "magenta"),
    "memcpy": ("copies", "▒", "green"),
    "host_bound": ("waiting for the host", "░", "yellow"),
    "idle": ("idle", "·", "dim"),
}


def trace_object(summary: TraceSummary) -> dict[str, Any]:
    """What ``trace --json`` prints.

    Keys:
        steps: a list of ``rank``, ``step``, ``measured_ms``, ``predicted_ms`` (None where there is
            no prediction), ``outside`` (it began before the trace, and counts in no mean error),
            ``breakdown`` (parts that sum to ``measured_ms``) and ``hidden_communication_ms``,
            which lies in the part ``compute``.
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
    found = summary.found
    return {
        "device": _device(found.traces),
        "steps": [_step_object(step, summary) for step in summary.steps],
        "breakdown": dict(summary.parts),
        "ranks": [_rank_object(trace) for trace in found.traces],
        "kernels": [
            {"name": k.name, "count": k.count, "total_ms": k.total_ms, "collective": k.collective}
            for k in summary.kernels
        ],
        "critical_path": path_object(summary.critical_path),
        "executions": [_execution_object(execution) for execution in found.executions],
        "notes": list(summary.notes),
        "what_if": dict(summary.what_if),
    }


def _device(traces: Iterable[RankTrace]) -> str | None:
    names = {trace.device_name for trace in traces if trace.device_name}
    return ", ".join(sorted(names)) or None


def _step_object(step: StepBreakdown, summary: TraceSummary) -> dict[str, Any]:
    return {
        "rank": step.rank,
        "step": step.step,
        "measured_ms": step.measured_ms,
        "predicted_ms": summary.predicted.get((step.rank, step.step)),
        "outside": (step.rank, step.step) in summary.outside,
        "breakdown": step.parts,
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


def show_headline(console: Console, summary: TraceSummary) -> None:
    """One line for ``--quiet``: a step measured, and predicted."""
    if not summary.steps:
        line(console, "no steps: execution traces record no times")
        return
    console.print(_headline(summary))


def show_traces(console: Console, summary: TraceSummary) -> None:
    """The whole report."""
    console.print()
    if summary.found.traces:
        line(console, _what_was_read(summary.found.traces))
        _show_means(console, summary)
        _show_steps(console, summary)
        _show_kernels(console, summary.kernels)
        _show_path(console, summary.critical_path)
    else:
        _show_executions(console, summary.found.executions)


def _what_was_read(traces: Sequence[RankTrace]) -> str:
    sizes = {trace.world_size for trace in traces if trace.world_size is not None}
    of = f" of {max(sizes)}" if sizes else ""
    device = _device(traces)
    counts = {len(trace.steps) for trace in traces}
    each = "each" if len(traces) > 1 and len(counts) == 1 else "in all"
    steps = max(counts) if each == "each" else sum(len(trace.steps) for trace in traces)
    return (
        f"Rank{'s' if len(traces) > 1 else ''} {ranks_text(t.rank for t in traces)}{of}"
        f"{f' on {device}' if device else ''}: {plural(steps, 'step')}"
        f"{f' {each}' if len(traces) > 1 else ''}, "
        f"{sum(len(t.device) for t in traces):,} device events and "
        f"{sum(len(t.host) for t in traces):,} host events."
    )


def _headline(summary: TraceSummary) -> Text:
    steps, predicted = summary.steps, summary.predicted
    mean_ms = fmean(step.measured_ms for step in steps)
    text = Text.assemble("Measured ", (ms(mean_ms), "bold"), " per step")
    pairs = [
        (s.measured_ms, predicted[s.rank, s.step])
        for s in steps
        if (s.rank, s.step) in predicted and (s.rank, s.step) not in summary.outside
    ]
    errors = [abs(p / m - 1) for m, p in pairs if m > 0]
    if not errors:
        return text.append(".")
    mean = fmean(p for _, p in pairs)
    if summary.what_if:
        asked = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in summary.what_if.items())
        change = 100 * (mean / fmean(m for m, _ in pairs) - 1)
        text.append(f"; with {asked}: ")
        return text.append(ms(mean), "bold green").append(f", {change:+.1f} %.")
    text.append(", predicted ").append(ms(mean), "bold green")
    over = plural(len(errors), "step")
    return text.append(f"; mean absolute error {percent(fmean(errors))} over {over}.")


def _show_means(console: Console, summary: TraceSummary) -> None:
    """The mean step: measured, predicted, and by part."""
    console.print(_headline(summary))
    parts = summary.parts
    total = sum(parts.values())
    if total > 0:
        shares = (
            f"{_MARKS[part][0]} {percent(parts[part] / total)}"
            for part in PARTS
            if parts[part] > 1e-6 * total
        )
        line(console, f"Where the time goes: {', '.join(shares)}.")
    if summary.predicted:
        explanation = WHAT_IS_CHANGED if summary.what_if else WHAT_IS_PREDICTED
        line(console, explanation, style="dim")


def _show_steps(console: Console, summary: TraceSummary) -> None:
    steps, predicted = summary.steps, summary.predicted
    shown = sorted(steps, key=lambda s: -s.measured_ms)[:MAX_ROWS]
    heading(console, "Steps", "from one step marker to the next")
    columns = ["<step", ">rank", ">measured ms"]
    if predicted:
        error = "change" if summary.what_if else "error"
        columns += [">predicted ms", f">{error}"]
    made = table(*columns, "<where the time goes")
    longest = max(step.measured_ms for step in steps)
    width = max(10, min(48, console.width - (62 if predicted else 42)))
    for step in (s for s in steps if s in shown):
        made.add_row(
            step.step,
            str(step.rank),
            number(step.measured_ms),
            *(_against(step, summary) if predicted else ()),
            _bar(step, longest, width),
        )
    show(console, made)
    _show_legend(console)
    if len(shown) < len(steps):
        line(
            console,
            f"  The {len(shown)} longest of {len(steps)} steps are shown; the JSON output has all.",
            style="dim",
        )


def _against(step: StepBreakdown, summary: TraceSummary) -> tuple[str, str]:
    key = (step.rank, step.step)
    value = summary.predicted.get(key)
    if value is None:
        return "-", "-"
    error = 100 * (value / step.measured_ms - 1) if step.measured_ms > 0 else 0.0
    mark = " (began before the trace)" if key in summary.outside else ""
    return number(value), f"{error:+.1f} %{mark}"


def _bar(step: StepBreakdown, longest: float, width: int) -> Text:
    parts = [(value, *_MARKS[part][1:]) for part, value in step.parts.items()]
    return stacked(parts, longest, width)


def _show_legend(console: Console) -> None:
    legend = Text("  ")
    for name, mark, style in _MARKS.values():
        legend.append(mark * 2, style=style)
        legend.append(f" {name}   ", style="dim")
    console.print(legend)


def _show_kernels(console: Console, kernels: Sequence[KernelTotal]) -> None:
    if not kernels:
        return
    heading(console, "Longest kernels", "summed over all steps and ranks")
    made = table(">ms", ">runs", ">µs each", "~kernel")
    names = in_one_line([kernel.name for kernel in kernels], max(24, console.width - 30))
    for kernel, name in zip(kernels, names, strict=True):
        each = 1e3 * kernel.total_ms / kernel.count
        made.add_row(number(kernel.total_ms), f"{kernel.count:,}", number(each), name)
    show(console, made)


def in_one_line(names: Sequence[str], width: int) -> list[str]:
    """Names in so many columns: a longer one keeps the words that not all of these have, and of the
    others as many from its beginning as there is room for."""
    long = [name.split("_") for name in names if len(name) > width]
    shared = set.intersection(*map(set, long)) if len(long) > 1 else set()
    return [name if len(name) <= width else _cut(name.split("_"), shared, width) for name in names]


def _cut(words: Sequence[str], shared: set[str], width: int) -> str:
    room = width - sum(len(word) + 2 for word in words if word not in shared)
    kept = []
    for word in words:
        if word in shared:
            room -= len(word) + 1
        kept.append(word if word not in shared or room > 0 else "")
    text = re.sub("_?(?:__)+_?|_$", "…", "_".join(kept)) or "_".join(words)
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _show_path(console: Console, path: Sequence[Segment]) -> None:
    """The longest sections of the predicted critical path, in order of time."""
    total = sum(segment.duration_ms for segment in path)
    found = path_sections(
        [
            replace(segment, name=short_name(segment.name))
            for segment in path
            if segment.duration_ms >= SHORT * total
        ]
    )
    if not found:
        return
    longest = sorted(found, key=lambda s: (-s.duration_ms, s.start_ms))[:MAX_SECTIONS]
    shown = sum(section.duration_ms for section in longest)
    aside = f"its longest sections, {percent(shown / total)} of it, in order of time"
    heading(console, "Predicted critical path", aside)
    show_sections(console, (section for section in found if section in longest))


def _show_executions(console: Console, executions: Sequence[ExecutionTrace]) -> None:
    """What execution traces say by themselves."""
    line(
        console,
        "Execution traces record what ran and on which tensors, but no times, kernels or streams. "
        "Give the Kineto traces of the same run too, to see steps and where their time goes.",
    )
    heading(console, "Execution traces")
    made = table(">rank", "<schema", ">ops", ">op inputs", ">collectives", ">bytes sent")
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
