"""The report of ``shardopt explain``: the critical path in words, ranks, what would help."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from predictor.iteration.critical_path import HOST
from shardopt.api.document import ExplainAnswer, PathSegment
from shardopt.explain.uneven import waiting_words
from shardopt.formatting import ms, number, percent, phase_words, plural
from shardopt.report.advice import advice
from shardopt.report.blocks import Block, Heading, TextTable, View
from shardopt.report.plan import deciding_lines, proved_text
from shardopt.report.prediction import (
    breakdown,
    doubts,
    headlines,
    ranks,
    setting_facts,
    side_by_side,
    time_line,
)

MAX_SECTIONS = 12
MAX_WAITS = 3
MAX_HOST_PARTS = 4
SAME_MS = 5e-4
"""Times that differ by less look the same on the console."""
NO_WAITS = "On the critical path no rank waits for another for more than 0.1 % of the iteration."


def explain_view(answer: ExplainAnswer, notes: Sequence[str] = ()) -> View:
    """Return all forms of an explanation.

    Args:
        notes: further notes, such as files that were written.
    """
    return View(
        answer,
        [setting_facts(answer.setting), *report(answer)],
        headlines(answer.plans),
        [*answer.setting.notes, *notes],
    )


def report(answer: ExplainAnswer) -> list[Block]:
    """The whole report: the plan in words, then in tables, then what would change its time."""
    bound_ms = answer.lower_bound_ms
    return [
        "",
        time_line(answer),
        *([] if bound_ms is None else [proved_text("this plan", answer.iteration_ms, bound_ms)]),
        *deciding_lines(answer.deciding),
        *doubts(answer, answer.plan),
        *in_words(answer),
        *advice(answer, answer.setting.hardware.device),
        *(side_by_side(answer.plans) if answer.others else ()),
        Heading("Where the time goes", f"{answer.plan}, along its critical path"),
        *breakdown(answer),
        *critical_path(answer),
        *ranks(answer),
        *single_changes(answer),
        *what_if(answer),
    ]


def in_words(answer: ExplainAnswer) -> list[str]:
    """Say what to know first: the largest part, the busiest rank, which rank waits for what."""
    phase, part = max(answer.breakdown.items(), key=lambda item: item[1])
    share = percent(part / answer.iteration_ms)
    sentences = [f"The largest part is {phase_words(phase)}: {ms(part)}, {share} of the iteration."]
    if HOST in answer.breakdown:
        sentences += _host_words(answer)
    loads = answer.per_rank
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
        sentences += [wait.words for wait in answer.waits[:MAX_WAITS]]
        uneven = waiting_words(answer.prediction)
        if uneven is not None:
            sentences.append(f"{uneven}.")
        elif not answer.waits:
            sentences.append(NO_WAITS)
    return [*sentences, *(f"{note}." for note in answer.memory_notes)]


def _host_words(answer: ExplainAnswer) -> list[str]:
    """Say what the host does in an iteration, where GPUs wait for it."""
    work = answer.host_work
    if sum(work.values()) < SAME_MS:
        return []
    names = {phase: phase_words(phase) for phase in work}
    if "optimizer" in names:  # the time of an iteration that belongs to no op is its last one's
        names["optimizer"] += " and the fixed time of an iteration"
    parts = [f"{names[phase]} {ms(spent)}" for phase, spent in work.items()]
    shown = ", ".join(parts[:MAX_HOST_PARTS])
    more = f" and {len(parts) - MAX_HOST_PARTS} more" if len(parts) > MAX_HOST_PARTS else ""
    return [f"The host issues work for {ms(sum(work.values()))} an iteration: {shown}{more}."]


def _what_runs(section: Sequence[PathSegment]) -> str:
    """The operations by name, as many as fit a line."""
    if section[0].phase == HOST:
        return "the host issues work"
    names = list(dict.fromkeys(segment.name for segment in section))
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def critical_path(answer: ExplainAnswer) -> list[Block]:
    """The sections of the critical path."""
    aside = "one iteration of the steady state, in order of time"
    return [Heading("Critical path", aside), *path_grid(answer.critical_path)]


def path_grid(path: Sequence[PathSegment]) -> list[Block]:
    """A row for each of the longest sections of a critical path, in order of time: neighbours of
    one phase and rank are one section."""
    rows, lengths = [], []
    for (phase, rank), run in groupby(path, key=lambda s: (s.phase, s.rank)):
        section = list(run)
        lengths.append(section[-1].end_ms - section[0].start_ms)
        words = phase_words(phase), _what_runs(section)
        rows.append((number(section[0].start_ms), number(lengths[-1]), str(rank), *words))
    by_length = sorted(range(len(rows)), key=lambda at: -lengths[at])
    shown, short = sorted(by_length[:MAX_SECTIONS]), by_length[MAX_SECTIONS:]
    columns = [">from ms", ">ms", ">rank", "<phase", "~what runs"]
    grid: list[Block] = [TextTable(columns, [rows[at] for at in shown])]
    if short:
        total = ms(sum(lengths[at] for at in short))
        grid.append(f"{len(short)} shorter steps ({total} in total) are not shown.")
    return grid


def single_changes(answer: ExplainAnswer) -> list[Block]:
    """The changes of the plan itself that help most, each alone."""
    changes = answer.changes
    aside = "each alone"
    if answer.advice_considered is not None:
        aside += "; Advice has settings outside the plan"
    heading = Heading("Single changes of the plan", aside)
    if not changes.found:
        return [heading, f"{changes.none_words}."]
    rows = [
        (
            change.change,
            number(change.saving_ms),
            percent(change.saving_ms / answer.iteration_ms),
            number(change.iteration_ms),
        )
        for change in changes.found
    ]
    return [
        heading,
        TextTable(["~change", ">saves ms", ">share", ">then ms"], rows),
        f"The best of {plural(changes.tried, 'change')} tried.",
    ]


def what_if(answer: ExplainAnswer) -> list[Block]:
    """The same plan with one thing changed that is not the plan."""
    rows = [
        (
            item.change,
            number(item.iteration_ms),
            signed(item.change_ms),
            signed_percent(item.change_ms / answer.iteration_ms),
        )
        for item in answer.sensitivity
    ]
    return [
        Heading("Sensitivity", "the same plan, predicted with one thing changed"),
        TextTable(["~change", ">ms", ">change ms", ">"], rows),
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
