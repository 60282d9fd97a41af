"""The report of ``shardopt predict``: plans side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from predictor.model.plan import ShardingPlan
from predictor.predict import PHASES, Prediction
from shardopt.report.console import heading, line, show, table
from shardopt.report.plan.prediction_view import (
    misfit_text,
    provenance_text,
    show_breakdown,
    show_ranks,
)
from shardopt.report.plan.range_view import show_ranges
from shardopt.report.words import hbm_use, interval, ms, number, phase_words, times, type_mix

MAX_COLUMNS = 6
"""Plans whose breakdowns stand side by side."""


@dataclass(frozen=True)
class Predicted:
    """One plan with its prediction; ``name`` is the path as given."""

    name: str
    plan: ShardingPlan
    prediction: Prediction


def show_predictions(console: Console, given: Sequence[Predicted]) -> None:
    """One plan in full, or several ranked, best first."""
    ranked = sorted(given, key=lambda p: p.prediction.iteration_ms)
    show_comparison(console, ranked)
    best = ranked[0].prediction
    if len(ranked) == 1:
        heading(console, "Where the time goes", "along the critical path")
        show_breakdown(console, best)
        show_ranks(console, best)
    else:
        show_breakdowns(console, ranked)
    console.print()
    console.print(
        Text.assemble(
            "Predicted ",
            (ms(best.iteration_ms), "bold green"),
            f" per iteration under {ranked[0].name}, "
            f"90 % interval {interval(best.interval_ms)} ms; {provenance_text(best)}.",
        )
    )
    for item in ranked:
        problem = misfit_text(item.prediction)
        if problem:
            line(console, f"{item.name} {problem}", style="bold red")
        name = item.name if len(ranked) > 1 else ""
        show_ranges(console, item.prediction.out_of_range, name)


def show_headlines(console: Console, given: Sequence[Predicted]) -> None:
    """The report under ``--quiet``: a line a plan, in the order given."""
    for item in given:
        line(console, f"{item.name}: {ms(item.prediction.iteration_ms)}")


def show_comparison(console: Console, ranked: Sequence[Predicted]) -> None:
    """A row a plan."""
    heading(console, "Plans", "predicted iteration time, best first")
    made = table(
        [
            ("#", "right"),
            ("plan", "fold"),
            ("ms", "right"),
            ("vs best", "left"),
            ("90 % interval", "left"),
            ("HBM GiB", "right"),
            ("sharding", "fold"),
        ]
    )
    best = ranked[0].prediction.iteration_ms
    for place, item in enumerate(ranked, start=1):
        value = item.prediction.iteration_ms
        made.add_row(
            str(place),
            item.name,
            number(value),
            "best" if place == 1 else times(value / best),
            interval(item.prediction.interval_ms),
            hbm_use(item.prediction.memory),
            type_mix(item.plan),
            style="bold" if place == 1 else "",
        )
    show(console, made)


def show_breakdowns(console: Console, ranked: Sequence[Predicted]) -> None:
    """A row a phase, a column a plan; empty where a phase is not on the critical path."""
    shown = ranked[:MAX_COLUMNS]
    aside = "ms on the critical path, plans by their place above"
    heading(console, "Where the time goes", aside)
    places = [(f"#{i}", "right") for i in range(1, len(shown) + 1)]
    made = table([("phase", "left"), *places])
    for phase in PHASES:
        parts = [item.prediction.breakdown.get(phase, 0.0) for item in shown]
        if any(parts):
            made.add_row(phase_words(phase), *(number(v) if v else "" for v in parts))
    made.add_row("iteration", *(number(item.prediction.iteration_ms) for item in shown))
    show(console, made)
    if len(shown) < len(ranked):
        line(console, f"  the {MAX_COLUMNS} fastest are shown; --json has all", style="dim")
