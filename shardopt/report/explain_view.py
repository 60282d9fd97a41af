"""The report of ``shardopt explain``: the critical path in words, ranks, what would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from predictor.critical_path import HOST, Segment
from predictor.predict import Prediction
from shardopt.report.console import heading, line, show, table
from shardopt.report.prediction_view import (
    misfit_text,
    provenance_text,
    show_breakdown,
    show_ranks,
)
from shardopt.report.range_view import show_ranges
from shardopt.report.whatif import WhatIf
from shardopt.report.words import interval, ms, number, percent, phase_words

MAX_STRETCHES = 24
MAX_CHANGES = 6


@dataclass(frozen=True)
class Stretch:
    """Consecutive segments of the critical path of one phase on one rank."""

    phase: str
    rank: int
    start_ms: float
    end_ms: float
    names: tuple[str, ...]

    @property
    def duration_ms(self) -> float:
        """Length of the stretch."""
        return self.end_ms - self.start_ms

    @property
    def words(self) -> str:
        """What happens: the operations by name, as many as fit a line."""
        names = list(dict.fromkeys(self.names))
        if self.phase == HOST:
            return "the GPU waits for the host to issue work"
        shown = ", ".join(names[:2])
        return shown + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def stretches(path: Sequence[Segment]) -> list[Stretch]:
    """The path with neighbours of one phase and rank joined; times from the path's start."""
    found: list[Stretch] = []
    origin = path[0].start_ms if path else 0.0
    for segment in path:
        start, end = segment.start_ms - origin, segment.end_ms - origin
        last = found[-1] if found else None
        if last is not None and (last.phase, last.rank) == (segment.phase, segment.rank):
            names = (*last.names, segment.name)
            found[-1] = Stretch(last.phase, last.rank, last.start_ms, end, names)
        else:
            found.append(Stretch(segment.phase, segment.rank, start, end, (segment.name,)))
    return found


def show_explanation(
    console: Console, name: str, prediction: Prediction, changes: Sequence[WhatIf]
) -> None:
    """The whole report."""
    console.print()
    console.print(
        Text.assemble(
            "Predicted ",
            (ms(prediction.iteration_ms), "bold green"),
            f" per iteration under {name}, 90 % interval "
            f"{interval(prediction.interval_ms)} ms; {provenance_text(prediction)}.",
        )
    )
    problem = misfit_text(prediction)
    if problem:
        line(console, f"{name} {problem}", style="bold red")
    show_ranges(console, prediction.out_of_range)
    for sentence in in_words(prediction):
        line(console, sentence)
    heading(console, "Where the time goes", "along the critical path")
    show_breakdown(console, prediction)
    show_path(console, prediction)
    show_ranks(console, prediction)
    show_changes(console, prediction, changes)


def in_words(prediction: Prediction) -> list[str]:
    """The two things to know first: the largest part, and who waits for whom."""
    phase, part = max(prediction.breakdown.items(), key=lambda item: item[1])
    share = percent(part / prediction.iteration_ms)
    sentences = [f"The largest part is {phase_words(phase)}: {ms(part)}, {share} of the iteration."]
    loads = prediction.per_rank
    if len(loads) > 1:
        busiest = min(loads, key=lambda load: (load.idle_ms, load.rank))
        others = [load.idle_ms for load in loads if load is not busiest]
        sentences.append(
            f"Rank {busiest.rank} computes longest and is idle for {ms(busiest.idle_ms)}; "
            f"the others are idle for {ms(sum(others) / len(others))} on average."
        )
    return sentences


def show_path(console: Console, prediction: Prediction) -> None:
    """The chain of work that sets the iteration time, in order of time."""
    found = stretches(prediction.critical_path)
    short = _short(found)
    heading(console, "Critical path", "one period of the steady state, in order of time")
    made = table(
        [
            ("from ms", "right"),
            ("ms", "right"),
            ("rank", "right"),
            ("phase", "left"),
            ("what runs", "fold"),
        ]
    )
    for stretch in found:
        if stretch not in short:
            made.add_row(
                number(stretch.start_ms),
                number(stretch.duration_ms),
                str(stretch.rank),
                phase_words(stretch.phase),
                stretch.words,
            )
    show(console, made)
    if short:
        total = sum(s.duration_ms for s in short)
        line(
            console,
            f"  {len(short)} shorter links, together {ms(total)}, are left out; --json has all",
            style="dim",
        )


def _short(found: Sequence[Stretch]) -> set[Stretch]:
    """What to leave out so that at most `MAX_STRETCHES` remain."""
    by_length = sorted(found, key=lambda s: (-s.duration_ms, s.start_ms))
    return set(by_length[MAX_STRETCHES:])


def show_changes(console: Console, prediction: Prediction, changes: Sequence[WhatIf]) -> None:
    """What would help most."""
    heading(console, "What would help most", "each change alone; savings do not add up")
    if not changes:
        line(console, "  no single change shortens the iteration")
        return
    made = table(
        [("change", "fold"), ("saves ms", "right"), ("share", "right"), ("then ms", "right")]
    )
    for change in changes[:MAX_CHANGES]:
        made.add_row(
            change.change,
            number(change.saving_ms),
            percent(change.saving_ms / prediction.iteration_ms),
            number(change.iteration_ms),
        )
    show(console, made)


def explain_object(prediction: Prediction, changes: Sequence[WhatIf]) -> dict[str, Any]:
    """What ``explain --json`` adds to a prediction.

    Keys:
        critical_path: a list of ``name``, ``phase``, ``resource``, ``rank``, ``start_ms`` and
            ``duration_ms``, in order of time from the start of the period.
        what_if: a list of ``change``, ``iteration_ms`` and ``saving_ms``, most helpful first.
    """
    return {
        "critical_path": path_object(prediction.critical_path),
        "what_if": [
            {"change": c.change, "iteration_ms": c.iteration_ms, "saving_ms": c.saving_ms}
            for c in changes
        ],
    }


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
