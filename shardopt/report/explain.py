"""The report of ``shardopt explain``: the critical path in words, ranks, what would help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

from predictor.iteration.critical_path import HOST, Segment
from predictor.predict import Prediction
from shardopt.api.setting import Setting
from shardopt.explain.explanation import Explanation, PredictedPlan
from shardopt.explain.uneven import waiting_words
from shardopt.explain.waits import Wait, host_work
from shardopt.formatting import ms, number, percent, phase_words, picked, plural
from shardopt.report.advice import advice, advice_object
from shardopt.report.blocks import Block, Grid, Heading, View
from shardopt.report.plan import deciding_lines, deciding_object, proved_text
from shardopt.report.prediction import (
    breakdown,
    doubts,
    headlines,
    predicted_objects,
    prediction_object,
    ranks,
    setting_facts,
    side_by_side,
    tables_object,
    time_line,
)

MAX_SECTIONS = 12
MAX_WAITS = 3
MAX_HOST_PARTS = 4
SAME_MS = 5e-4
"""Times that differ by less look the same on the console."""
NO_WAITS = "On the critical path no rank waits for another for more than 0.1 % of the iteration."


def explain_view(setting: Setting, explanation: Explanation, notes: Sequence[str] = ()) -> View:
    """Return all forms of an explanation.

    Args:
        notes: further notes, such as files that were written.
    """
    return View(
        explain_object(explanation, setting.facts()),
        [setting_facts(setting), *report(explanation, setting.hardware.device)],
        headlines(explanation.plans),
        [*setting.notes, *notes],
    )


def report(explanation: Explanation, device: str) -> list[Block]:
    """The whole report: the plan in words, then in tables, then what would change its time.

    Args:
        device: ``cuda`` or ``cpu``, of the profile.
    """
    predicted, prediction = explanation.subject, explanation.subject.prediction
    several = bool(explanation.others)
    return [
        "",
        time_line(predicted),
        *_proved(predicted),
        *deciding_lines(explanation.deciding),
        *doubts(prediction, predicted.name),
        *in_words(explanation),
        *advice(explanation.advised, device),
        *(side_by_side(explanation.plans) if several else ()),
        Heading("Where the time goes", f"{predicted.name}, along its critical path"),
        *breakdown(prediction),
        *critical_path(prediction),
        *ranks(prediction),
        *single_changes(explanation),
        *what_if(explanation),
    ]


def _proved(predicted: PredictedPlan) -> list[str]:
    """Say what is proved of the plan, where its file holds a bound."""
    if predicted.bound_ms is None:
        return []
    return [proved_text("this plan", predicted.prediction.iteration_ms, predicted.bound_ms)]


def in_words(explanation: Explanation) -> list[str]:
    """Say what to know first: the largest part, the busiest rank, which rank waits for what."""
    prediction = explanation.subject.prediction
    phase, part = max(prediction.breakdown.items(), key=lambda item: item[1])
    share = percent(part / prediction.iteration_ms)
    sentences = [f"The largest part is {phase_words(phase)}: {ms(part)}, {share} of the iteration."]
    if HOST in prediction.breakdown:
        sentences += _host_words(prediction)
    loads = prediction.per_rank
    if len(loads) > 1:
        busiest = min(loads, key=lambda load: (load.idle_ms, load.rank))
        idle_ms = [load.idle_ms for load in loads if load is not busiest]
        alike = max(idle_ms) - busiest.idle_ms < SAME_MS
        sentences.append(
            f"All ranks are equally busy; each is idle for {ms(busiest.idle_ms)}."
            if alike
            else f"Rank {busiest.rank} is the busiest (idle for {ms(busiest.idle_ms)}); "
            f"the other ranks are idle for {ms(sum(idle_ms) / len(idle_ms))} on average."
        )
        sentences += [wait.words for wait in explanation.waits[:MAX_WAITS]]
        uneven = waiting_words(prediction)
        if uneven is not None:
            sentences.append(f"{uneven}.")
        elif not explanation.waits:
            sentences.append(NO_WAITS)
    return [*sentences, *(f"{note}." for note in explanation.memory_notes)]


def _host_words(prediction: Prediction) -> list[str]:
    """Say what the host does in an iteration, where GPUs wait for it."""
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


def _what_runs(section: Sequence[Segment]) -> str:
    """The operations by name, as many as fit a line."""
    if section[0].phase == HOST:
        return "the device waits for the host to issue work"
    names = list(dict.fromkeys(segment.name for segment in section))
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def critical_path(prediction: Prediction) -> list[Block]:
    """The sections of the critical path."""
    aside = "one iteration of the steady state, in order of time"
    return [Heading("Critical path", aside), *path_grid(prediction.critical_path)]


def path_grid(path: Sequence[Segment]) -> list[Block]:
    """A row for each of the longest sections of a critical path, in order of time: neighbours of
    one phase and rank are one section."""
    rows, lengths = [], []
    for (phase, rank), run in groupby(path, key=lambda s: (s.phase, s.rank)):
        section = list(run)
        lengths.append(section[-1].end_ms - section[0].start_ms)
        start = number(section[0].start_ms - path[0].start_ms)
        words = phase_words(phase), _what_runs(section)
        rows.append((start, number(lengths[-1]), str(rank), *words))
    by_length = sorted(range(len(rows)), key=lambda at: -lengths[at])
    shown, short = sorted(by_length[:MAX_SECTIONS]), by_length[MAX_SECTIONS:]
    columns = [">from ms", ">ms", ">rank", "<phase", "~what runs"]
    grid: list[Block] = [Grid(columns, [rows[at] for at in shown])]
    if short:
        total = ms(sum(lengths[at] for at in short))
        grid.append(f"{len(short)} shorter steps ({total} in total) are not shown.")
    return grid


def single_changes(explanation: Explanation) -> list[Block]:
    """The changes of the plan itself that help most, each alone."""
    changes, before = explanation.changes, explanation.subject.prediction.iteration_ms
    aside = "each alone; settings beside the plan stand under Advice"
    if explanation.advised is None:
        aside = "each alone"
    heading = Heading("Single changes of the plan", aside)
    if not changes.helpful:
        return [heading, f"{changes.none_words}."]
    rows = [
        (c.words, number(c.saving_ms), percent(c.saving_ms / before), number(c.iteration_ms))
        for c in changes.helpful
    ]
    return [
        heading,
        Grid(["~change", ">saves ms", ">share", ">then ms"], rows),
        f"The best of {plural(changes.tried, 'change')} tried.",
    ]


def what_if(explanation: Explanation) -> list[Block]:
    """The same plan with one thing changed that is not the plan."""
    before = explanation.subject.prediction.iteration_ms
    rows = [
        (
            item.change,
            number(item.iteration_ms),
            signed(item.change_ms),
            signed_percent(item.change_ms / before),
        )
        for item in explanation.what_if
    ]
    return [
        Heading("Sensitivity", "the same plan, predicted with one thing changed"),
        Grid(["~change", ">ms", ">change ms", ">"], rows),
    ]


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
        lower_bound_ms: no plan is predicted to be faster, as the search proved that wrote the plan;
            null where it was for another model or machine.
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
        memory_notes: why tables are in host memory, and what their caches waste, a sentence each.
        sensitivity: a list of ``kind``, ``change``, ``iteration_ms`` and ``change_ms``.
        deciding: `deciding_object`.
        others: the further plans: ``plan`` and the keys of `prediction_object`.
    """
    return {
        **facts,
        "plan": explanation.subject.name,
        **prediction_object(explanation.subject.prediction),
        "lower_bound_ms": explanation.subject.bound_ms,
        "critical_path": path_object(explanation.subject.prediction.critical_path),
        "host_work": host_work(explanation.subject.prediction.graph),
        "waits": [_wait_object(wait) for wait in explanation.waits],
        "changes": {
            "tried": explanation.changes.tried,
            "found": [
                {
                    "change": change.words,
                    "tables": tables_object(
                        replace(explanation.subject.plan, tables=change.tables)
                    ),
                    **picked(change, "iteration_ms", "saving_ms"),
                }
                for change in explanation.changes.helpful
            ],
        },
        **advice_object(explanation.advised),
        "memory_notes": list(explanation.memory_notes),
        "sensitivity": [asdict(item) for item in explanation.what_if],
        "deciding": deciding_object(explanation.deciding),
        "others": predicted_objects(explanation.others),
    }


def _wait_object(wait: Wait) -> dict[str, Any]:
    causes = [{**asdict(cause), "tables": dict(cause.tables)} for cause in wait.causes]
    return {**asdict(wait), "words": wait.words, "causes": causes}


def path_object(path: Sequence[Segment]) -> list[dict[str, Any]]:
    """Segments of a critical path for JSON; times count from its start."""
    origin = path[0].start_ms if path else 0.0
    return [
        {
            **picked(segment, "name", "phase", "resource", "rank", "duration_ms"),
            "start_ms": segment.start_ms - origin,
        }
        for segment in path
    ]
