"""The report of ``shardopt plan``: ranking, baselines, where the time goes, what is proved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from predictor.predict import Prediction
from search.baselines.starting_plans import TORCHREC
from search.expected_gain import ExpectedGain
from search.in_use.price import Move
from search.problem import Result
from shardopt.api.setting import Setting
from shardopt.explain.stakes import Alternatives, instead_text
from shardopt.formatting import (
    at_most,
    gap_of,
    hbm_use,
    interval,
    ms,
    number,
    percent,
    plural,
    points,
    times,
    type_mix,
)
from shardopt.report.console import bar, heading, line, show, table
from shardopt.report.move import show_move
from shardopt.report.prediction import (
    misfit_text,
    provenance_text,
    show_breakdown,
    show_doubts,
    show_ranks,
    sync_text,
)
from shardopt.report.scenarios import passed_over_text, regret_text, ties_text
from shardopt.report.setting import show_setting

WORDS = {TORCHREC: "TorchRec's plan"}
"""Baselines -> what the report calls their plans."""
MAX_BAR = 3.0
"""Bars of baselines are cut off at this multiple of the best plan's time."""


@dataclass(frozen=True)
class PlanReport:
    """Everything the report shows.

    Args:
        predictions: of ``result.plans``, in their order.
        written: where the best plan was written, if it was.
        next_command: what to type next.
        move: from the plan in use to the best plan, where there is one.
        gain: of the best plan over TorchRec's, where that has one.
        instead: what matters more, where sharding does not.
        deciding: what is to be told of the constants that decide, the most important first.
        guessed: the first of them is of a group that nobody has measured.
    """

    setting: Setting
    result: Result
    predictions: Sequence[Prediction]
    written: str | None
    next_command: str
    move: Move | None = None
    gain: ExpectedGain | None = None
    instead: Alternatives | None = None
    deciding: Sequence[str] = ()
    guessed: bool = False


def show_plan(console: Console, report: PlanReport) -> None:
    """The whole report."""
    best = report.predictions[0]
    if report.instead is not None:
        line(console, instead_text(report.instead), style="bold")
        console.print()
    show_setting(console, report.setting)
    show_ranking(console, report.result, report.predictions)
    show_baselines(console, report.result.baselines, best.iteration_ms)
    show_gain(console, report.gain)
    show_move(console, report.result, report.move)
    heading(console, "Where the time goes", "plan 1, along its critical path")
    show_breakdown(console, best)
    show_ranks(console, best)
    show_verdict(console, report, best)
    show_end(console, report)


def show_headline(console: Console, report: PlanReport) -> None:
    """The report under ``--quiet``: one line; before it one that sharding does not matter."""
    best, result = report.predictions[0], report.result
    if report.instead is not None:
        console.print(Text(instead_text(report.instead)), soft_wrap=True)
    gap = gap_of(best.iteration_ms, result.lower_bound_ms)
    proved = "" if gap is None else f", {at_most(gap)} from optimal"
    text = (
        f"{ms(best.iteration_ms)} per iteration{proved}; {type_mix(result.best.plan)}. "
        f"{provenance_text(best)}"
    )
    console.print(Text(text), soft_wrap=True)
    if report.guessed:
        console.print(Text(report.deciding[0]), soft_wrap=True)


def show_ranking(console: Console, result: Result, predictions: Sequence[Prediction]) -> None:
    """Plans, best first."""
    heading(console, "Plans", "predicted iteration time, best first")
    made = table(
        [
            ("#", "right"),
            ("ms", "right"),
            ("vs bound", "right"),
            ("90 % interval", "left"),
            ("HBM GiB", "right"),
            ("sharding", "fold"),
            ("found by", "fold"),
        ]
    )
    for place, (ranked, prediction) in enumerate(
        zip(result.plans, predictions, strict=True), start=1
    ):
        gap = gap_of(prediction.iteration_ms, result.lower_bound_ms)
        made.add_row(
            str(place),
            number(prediction.iteration_ms),
            "?" if gap is None else _above(gap),
            interval(prediction.interval_ms),
            hbm_use(prediction.memory),
            type_mix(ranked.plan),
            ranked.found_by.replace("_", " "),
            style="bold" if place == 1 else "",
        )
    show(console, made)


def _above(gap: float) -> str:
    shown = percent(gap)
    return shown if shown.startswith("<") else f"+{shown}"


def show_baselines(console: Console, baselines: Mapping[str, float], best_ms: float) -> None:
    """Plans of other methods under the same predictor, fastest first."""
    if not baselines:
        return
    heading(console, "Baselines", "plans of other methods, predicted the same way")
    made = table([("method", "left"), ("ms", "right"), ("vs plan 1", "left"), ("", "left")])
    # one method that is far off must not flatten the bars of all others
    longest = min(max(baselines.values()), MAX_BAR * best_ms)
    width = max(10, min(30, console.width - 60))
    for name, value in sorted(baselines.items(), key=lambda item: (item[1], item[0])):
        made.add_row(
            name.replace("_", " "),
            number(value),
            times(value / best_ms),
            bar(value / longest, width, "yellow"),
        )
    show(console, made)


def show_gain(console: Console, gain: ExpectedGain | None) -> None:
    """What the best plan is expected to gain over TorchRec's, priced by the costs' known errors."""
    if gain is not None:
        line(console, gain_text(gain))


def gain_text(gain: ExpectedGain) -> str:
    """One sentence; says so where the errors could hide the gain."""
    low, high = gain.interval
    hidden = "; the known errors of the costs could hide it" if low < 0 < gain.mean else ""
    return (
        f"Expected gain over {WORDS.get(gain.baseline, gain.baseline)} {points(gain.mean)} %, "
        f"90 % interval {points(low)} to {points(high)}{hidden}."
    )


def preferred_text(result: Result) -> str | None:
    """Why the best plan is not the fastest one, where it is not."""
    if result.fastest is None:
        return None
    slower = result.best.iteration_ms / result.fastest.iteration_ms - 1
    if result.in_use is not None:
        return (
            f"A plan predicted to be {percent(slower)} faster does not pay for its move in "
            f"{result.in_use.horizon:,} steps."
        )
    if result.aim != "nominal":
        return f"The fastest plan found is predicted to be {percent(slower)} faster than plan 1."
    return f"Plan 1 is preferred to one predicted to be {percent(slower)} faster."


def show_verdict(console: Console, report: PlanReport, best: Prediction) -> None:
    """The headline number, what decides it, what it is based on and what is proved."""
    result = report.result
    console.print()
    console.print(
        Text.assemble(
            ("Predicted ", ""),
            (ms(best.iteration_ms), "bold green"),
            f" per iteration (90 % interval {interval(best.interval_ms)} ms). "
            f"{provenance_text(best)}",
        )
    )
    show_deciding(console, report.deciding)
    line(console, _claim(best.iteration_ms, result))
    for text in (
        preferred_text(result),
        ties_text(result),
        regret_text(result),
        passed_over_text(result),
        sync_text(best),
    ):
        if text:
            line(console, text)
    show_doubts(console, best)
    problem = misfit_text(best)
    if problem:
        line(console, problem, style="bold red")


SHOWN_CONSTANTS = 3


def show_deciding(console: Console, texts: Sequence[str]) -> None:
    """The constants most worth measuring."""
    for text in texts[:SHOWN_CONSTANTS]:
        line(console, text, style="yellow")


def _claim(best_ms: float, result: Result) -> str:
    """What the bound proves, and of which plans."""
    gap = gap_of(best_ms, result.lower_bound_ms)
    given = result.in_use
    limited = given is not None and given.max_moves and given.max_moves < len(given.plan.tables)
    which = "no plan"
    if given is not None and limited:
        which = f"no plan that moves {plural(given.max_moves or 0, 'table')} or fewer"
    if gap is None:
        return "Nothing is proved about optimality: the lower bound is 0 ms."
    if gap <= 1e-9:
        return f"Proved: {which} is predicted to be faster; plan 1 is optimal."
    return (
        f"Proved: {which} is predicted to be faster than {ms(result.lower_bound_ms)}; "
        f"plan 1 is {at_most(gap)} from optimal."
    )


_STOPPED = {
    "work": "stopped at its work budget (a larger effort searches further)",
    "gap": "stopped because the gap to the lower bound is closed",
    "time": "stopped at the time limit, so another run may find another plan",
    "interrupted": "interrupted, so this is the best plan of a part of the search",
}


def show_end(console: Console, report: PlanReport) -> None:
    """Why the search ended, notes, the file and the next command."""
    result = report.result
    reason = _STOPPED.get(result.stopped_by, result.stopped_by)
    line(
        console,
        f"Searched for {result.search_seconds:.1f} s and scored {result.evaluations:,} plans; "
        f"{reason}.",
    )
    for note in filter(None, ("; ".join(result.bound_notes), *report.setting.notes)):
        line(console, f"Note: {note}.", style="yellow")
    if report.written:
        line(console, f"Plan 1 is written to {report.written}. Next:")
    else:
        line(console, "No plan was written. Next:")
    line(console, f"  {report.next_command}", style="bold")
