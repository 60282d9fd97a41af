"""The report of ``shardopt explain``: the critical path in words, ranks, what would help."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from predictor.iteration.critical_path import HOST, Segment
from predictor.predict import Prediction
from shardopt.explain.changes import Changes
from shardopt.explain.critical_path import PathSection, host_work, path_sections
from shardopt.explain.explanation import Explanation
from shardopt.explain.waits import Wait
from shardopt.explain.whatif import WhatIf
from shardopt.formatting import ms, number, percent, phase_words, plural
from shardopt.report.advice import advice_object, show_advice
from shardopt.report.console import heading, line, show, table
from shardopt.report.objects import deciding_object, prediction_object, tables_object
from shardopt.report.plan import show_deciding
from shardopt.report.prediction import (
    misfit_text,
    show_breakdown,
    show_breakdowns,
    show_comparison,
    show_doubts,
    show_ranks,
    show_time,
)

MAX_SECTIONS = 24
MAX_WAITS = 3
MAX_HOST_PARTS = 4
SAME_MS = 5e-4
"""Times that differ by less look the same on the console."""
NO_WAITS = "On the critical path no rank waits for another for more than 0.1 % of the iteration."


def show_explanation(console: Console, explanation: Explanation) -> None:
    """The whole report."""
    name, prediction = explanation.given.name, explanation.given.prediction
    show_time(console, prediction, name)
    show_deciding(console, explanation.deciding)
    problem = misfit_text(prediction)
    if problem:
        line(console, f"{name} {problem}", style="bold red")
    show_doubts(console, prediction)
    for sentence in in_words(explanation):
        line(console, sentence)
    show_advice(console, explanation.advised)
    aside = "along the critical path"
    if explanation.others:
        aside = f"{name}, along its critical path"
        ranked = sorted(explanation.plans, key=lambda p: p.prediction.iteration_ms)
        show_comparison(console, ranked)
        show_breakdowns(console, ranked)
    heading(console, "Where the time goes", aside)
    show_breakdown(console, prediction)
    show_path(console, prediction)
    show_ranks(console, prediction)
    show_changes(console, explanation.changes, prediction.iteration_ms)
    show_what_if(console, explanation.what_if, prediction.iteration_ms)


def in_words(explanation: Explanation) -> list[str]:
    """What to know first: the largest part, the busiest rank, which rank waits for which tables."""
    prediction = explanation.given.prediction
    phase, part = max(prediction.breakdown.items(), key=lambda item: item[1])
    share = percent(part / prediction.iteration_ms)
    sentences = [f"The largest part is {phase_words(phase)}: {ms(part)}, {share} of the iteration."]
    if HOST in prediction.breakdown:
        sentences += _host_words(prediction)
    loads = prediction.per_rank
    if len(loads) > 1:
        busiest = min(loads, key=lambda load: (load.idle_ms, load.rank))
        others = [load.idle_ms for load in loads if load is not busiest]
        alike = max(others) - busiest.idle_ms < SAME_MS
        sentences.append(
            f"All ranks are equally busy; each is idle for {ms(busiest.idle_ms)}."
            if alike
            else f"Rank {busiest.rank} is the busiest (idle for {ms(busiest.idle_ms)}); "
            f"the other ranks are idle for {ms(sum(others) / len(others))} on average."
        )
        sentences += [wait.words for wait in explanation.waits[:MAX_WAITS]]
        if not explanation.waits:
            sentences.append(NO_WAITS)
    return sentences


def _host_words(prediction: Prediction) -> list[str]:
    """What the host does in an iteration, where GPUs wait for it."""
    work = host_work(prediction.graph)
    if sum(work.values()) < SAME_MS:
        return []
    names = {phase: phase_words(phase) for phase in work}
    if "optimizer" in names:  # the time of an iteration that belongs to no op is its last one's
        names["optimizer"] += " and the fixed time of an iteration"
    parts = [f"{names[phase]} {ms(spent)}" for phase, spent in work.items()]
    shown = ", ".join(parts[:MAX_HOST_PARTS])
    more = f" and {len(parts) - MAX_HOST_PARTS} more" if len(parts) > MAX_HOST_PARTS else ""
    return [f"The host issues work for {ms(sum(work.values()))} an iteration: {shown}{more}."]


def _what_runs(section: PathSection) -> str:
    """The operations by name, as many as fit a line."""
    if section.phase == HOST:
        return "the GPU waits for the host to issue work"
    names = list(dict.fromkeys(section.names))
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def show_sections(console: Console, found: Iterable[PathSection]) -> None:
    """One row per section of a critical path, in order of time."""
    made = table(">from ms", ">ms", ">rank", "<phase", "~what runs")
    for section in found:
        made.add_row(
            number(section.start_ms),
            number(section.duration_ms),
            str(section.rank),
            phase_words(section.phase),
            _what_runs(section),
        )
    show(console, made)


def show_path(console: Console, prediction: Prediction) -> None:
    """The chain of work that sets the iteration time, in order of time."""
    found = path_sections(prediction.critical_path)
    short = _short(found)
    heading(console, "Critical path", "one iteration of the steady state, in order of time")
    show_sections(console, (section for section in found if section not in short))
    if short:
        total = sum(s.duration_ms for s in short)
        line(
            console,
            f"  {len(short)} shorter steps ({ms(total)} in total) are not shown; the JSON output "
            "has all.",
            style="dim",
        )


def _short(found: Sequence[PathSection]) -> set[PathSection]:
    """What to leave out so that at most `MAX_SECTIONS` remain."""
    by_length = sorted(found, key=lambda s: (-s.duration_ms, s.start_ms))
    return set(by_length[MAX_SECTIONS:])


def show_changes(console: Console, changes: Changes, before_ms: float) -> None:
    """The changes of the plan that would help most."""
    aside = f"best of {plural(changes.tried, 'change')} tried, each predicted on its own"
    heading(console, "What would help most", aside if changes.found else "")
    if not changes.found:
        line(console, f"  {changes.none_words.capitalize()}.")
        return
    made = table("~change", ">saves ms", ">share", ">then ms")
    for change in changes.found:
        share = percent(change.saving_ms / before_ms)
        made.add_row(change.words, number(change.saving_ms), share, number(change.iteration_ms))
    show(console, made)


def show_what_if(console: Console, what_if: Sequence[WhatIf], before_ms: float) -> None:
    """How the iteration answers to hardware, batch and skew."""
    heading(console, "Sensitivity", "the same plan, predicted with one thing changed")
    made = table("~change", ">ms", ">change ms", ">")
    for item in what_if:
        made.add_row(
            item.change,
            number(item.iteration_ms),
            signed(item.change_ms),
            signed_percent(item.change_ms / before_ms),
        )
    show(console, made)


def signed(change_ms: float) -> str:
    """``+0.120`` or ``-0.120``; ``0`` for what a prediction cannot tell from nothing."""
    if abs(change_ms) < 5e-4:
        return "0"
    return ("+" if change_ms > 0 else "-") + number(abs(change_ms))


def signed_percent(fraction: float) -> str:
    """``+1.2 %``; empty below half a thousandth."""
    if abs(fraction) < 5e-4:
        return ""
    return ("+" if fraction > 0 else "-") + percent(abs(fraction))


def explain_object(explanation: Explanation, facts: Mapping[str, Any]) -> dict[str, Any]:
    """``shardopt explain --json``.

    Args:
        facts: of the setting.

    Keys beside the facts, ``plan`` and those of `prediction_object`:
        critical_path: a list of ``name``, ``phase``, ``resource``, ``rank``, ``start_ms`` and
            ``duration_ms``, in order of time from the start of the period.
        host_work: phase -> ms that the busiest host takes to issue its work; the fixed time of an
            iteration counts with the optimizer.
        waits: on the critical path, the longest first: ``collective``, ``phase``, ``rank``,
            ``late_rank``, ``wait_ms``, ``median_ms``, ``words``, ``causes`` (``name``, ``phase``,
            ``late_ms``, ``excess_ms``, ``tables``: key -> share, ``more`` that are not named).
        changes: ``tried``, and ``found``: at most three that share no table, most helpful first:
            ``change``, ``tables`` (as in plan.json), ``iteration_ms``, ``saving_ms``.
        advice, together, other_machines: `advice_object`.
        sensitivity: a list of ``kind``, ``change``, ``iteration_ms`` and ``change_ms``.
        deciding: `deciding_object`.
        others: the further plans: ``plan`` and the keys of `prediction_object`.
    """
    return {
        **facts,
        "plan": explanation.given.name,
        **prediction_object(explanation.given.prediction),
        "critical_path": path_object(explanation.given.prediction.critical_path),
        "host_work": host_work(explanation.given.prediction.graph),
        "waits": [_wait_object(wait) for wait in explanation.waits],
        "changes": {
            "tried": explanation.changes.tried,
            "found": [
                {
                    "change": change.words,
                    "tables": tables_object(replace(explanation.given.plan, tables=change.tables)),
                    "iteration_ms": change.iteration_ms,
                    "saving_ms": change.saving_ms,
                }
                for change in explanation.changes.found
            ],
        },
        **advice_object(explanation.advised),
        "sensitivity": [asdict(item) for item in explanation.what_if],
        "deciding": deciding_object(explanation.deciding),
        "others": [
            {"plan": other.name, **prediction_object(other.prediction)}
            for other in explanation.others
        ],
    }


def _wait_object(wait: Wait) -> dict[str, Any]:
    causes = [{**asdict(cause), "tables": dict(cause.tables)} for cause in wait.causes]
    return {**asdict(wait), "words": wait.words, "causes": causes}


def path_object(path: Sequence[Segment]) -> list[dict[str, Any]]:
    """Segments of a critical path for JSON; times count from its start."""
    origin = path[0].start_ms if path else 0.0
    return [
        {
            "name": s.name,
            "phase": s.phase,
            "resource": s.resource,
            "rank": s.rank,
            "start_ms": s.start_ms - origin,
            "duration_ms": s.duration_ms,
        }
        for s in path
    ]
