"""The report of ``shardopt plan``: ranking, baselines, where the time goes, what is proved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from predictor.model.plan import ComputeKernel, TablePlan
from predictor.predict import Prediction
from predictor.units import format_bytes
from search.baselines.starting_plans import TORCHREC
from search.expected_gain import ExpectedGain
from search.in_use.price import Move
from search.problem import Result, TieSummary
from search.scenarios.scored import REGRET
from shardopt.api.answer import Answer
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
    ranks_text,
    times,
    type_mix,
)
from shardopt.report.advice import show_advice
from shardopt.report.console import bar, heading, line, show, table
from shardopt.report.prediction import (
    misfit_text,
    provenance_text,
    show_breakdown,
    show_doubts,
    show_ranks,
    show_setting,
    sync_text,
)

WORDS = {TORCHREC: "TorchRec's plan"}
"""Baselines -> what the report calls their plans."""
MAX_BAR = 3.0
"""Bars of baselines are cut off at this multiple of the best plan's time."""


def show_plan(
    console: Console, answer: Answer, deciding: Sequence[str], end: Sequence[str]
) -> None:
    """The whole report.

    Args:
        deciding: a sentence for each constant of ``answer.deciding``.
        end: the last lines, with what to type next last.
    """
    line(console, answer.verdict, style="bold")
    console.print()
    show_setting(console, answer.setting)
    show_advice(console, answer.advised, answer.best.iteration_ms)
    show_ranking(console, answer.result, answer.predictions)
    show_baselines(console, answer.result.baselines, answer.best.iteration_ms)
    show_gain(console, answer.gain)
    show_move(console, answer.result, answer.move)
    heading(console, "Where the time goes", "plan 1, along its critical path")
    show_breakdown(console, answer.best)
    show_ranks(console, answer.best)
    show_verdict(console, answer, deciding)
    _show_end(console, answer, end)


def show_headline(console: Console, answer: Answer, deciding: Sequence[str]) -> None:
    """The report under ``--quiet``: one line; before it one that sharding does not matter, after it
    the regret where that is minimised, and the constant that decides if nobody has measured it."""
    best, result = answer.best, answer.result
    if answer.stakes is not None and not answer.stakes.matters:
        console.print(Text(answer.verdict), soft_wrap=True)
    gap = gap_of(best.iteration_ms, result.lower_bound_ms)
    proved = "" if gap is None else f", {at_most(gap)} from optimal"
    text = (
        f"{ms(best.iteration_ms)} per iteration{proved}; {type_mix(result.best.plan)}. "
        f"{provenance_text(best)}"
    )
    console.print(Text(text), soft_wrap=True)
    regret = regret_text(result) if result.aim == REGRET else None
    if regret:
        console.print(Text(regret), soft_wrap=True)
    if deciding and answer.deciding[0].unmeasured:
        console.print(Text(deciding[0]), soft_wrap=True)


def show_ranking(console: Console, result: Result, predictions: Sequence[Prediction]) -> None:
    """Plans, best first."""
    heading(console, "Plans", "predicted iteration time, best first")
    made = table(">#", ">ms", ">vs bound", "<90 % interval", ">HBM GiB", "~sharding", "~found by")
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
    made = table("<method", ">ms", "<vs plan 1", "<")
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


def show_verdict(console: Console, answer: Answer, deciding: Sequence[str]) -> None:
    """The headline number, what decides it, what it is based on and what is proved."""
    result, best = answer.result, answer.best
    console.print()
    console.print(
        Text.assemble(
            ("Predicted ", ""),
            (ms(best.iteration_ms), "bold green"),
            f" per iteration (90 % interval {interval(best.interval_ms)} ms). "
            f"{provenance_text(best)}",
        )
    )
    show_deciding(console, deciding)
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


def _show_end(console: Console, answer: Answer, end: Sequence[str]) -> None:
    """Why the search ended, notes, the file and the next command."""
    result = answer.result
    reason = _STOPPED.get(result.stopped_by, result.stopped_by)
    line(
        console,
        f"Searched for {result.search_seconds:.1f} s and scored {result.evaluations:,} plans; "
        f"{reason}.",
    )
    for note in filter(None, ("; ".join(result.bound_notes), *answer.setting.notes)):
        line(console, f"Note: {note}.", style="yellow")
    *said, following = end
    for text in said:
        line(console, text)
    line(console, f"  {following}", style="bold")


BETTER = {
    "sharding types": "it has fewer sharding types",
    "shards": "it has fewer shards",
    "balance": "its memory is better balanced",
}
"""Rule of `search.prefer` -> what the chosen plan is better by."""


def ties_text(result: Result) -> str | None:
    """How many plans tie, why, and what decided; None where there is one alone."""
    ties = result.ties
    if ties is None or ties.plans < 2:
        return None
    best = "best by the objective" if result.aim != "nominal" else "fastest"
    return (
        f"{ties.plans:,} of the plans found are within {percent(ties.tolerance)} of the {best}"
        f"{_why(ties)}.{_decided(ties)}"
    )


def _why(ties: TieSummary) -> str:
    if not ties.host_bound:
        return ""
    low, high = ties.device_range_ms
    return f": the host sets their pace, and their devices alone would take {ms(low)} to {ms(high)}"


def _decided(ties: TieSummary) -> str:
    if ties.decided_by is None:
        return ""
    if ties.decided_by == "memory":
        mine, fastest = map(format_bytes, ties.fullest_bytes)
        better = f"its shards take {mine} on the fullest GPU instead of {fastest}"
    else:
        better = BETTER[ties.decided_by]
    return f" Plan 1 is preferred to the first of them: {better}."


def regret_text(result: Result) -> str | None:
    """How much slower than the best the plan is in any scenario, at most; None without any."""
    regret, proved = result.worst_regret, result.proved_regret
    if regret is None or proved is None:
        return None
    count = plural(len(result.scenarios), "scenario")
    shown = f" (proved: {percent(proved)})" if math.isfinite(proved) else ""
    text = f"{at_most(regret)} slower than the best plan known in any of {count}{shown}."
    return text[0].upper() + text[1:]


def passed_over_text(result: Result) -> str | None:
    """That a plan which looks better by the objective was not taken, and why; None where none."""
    if result.passed_over is None:
        return None
    found = (
        f"a largest regret of {percent(result.passed_over - 1)}"
        if result.aim == REGRET
        else f"a mean of {ms(result.passed_over)}"
    )
    return (
        f"A plan with {found} was found, but the stated errors cannot tell it from plan 1, which "
        "is the one of the nominal objective."
    )


USUAL_KERNELS = (ComputeKernel.FUSED, ComputeKernel.DENSE)
SHOWN_MOVES = 12
"""Tables that are named; the others are counted."""


def show_move(console: Console, result: Result, move: Move | None) -> None:
    """The plan in use compared with plan 1: times, what moves, what that takes, why it cannot
    stay."""
    given, best = result.in_use, result.best
    if given is None or move is None:
        return
    heading(console, "The plan in use", "and what plan 1 would change")
    gain = best.iteration_ms / given.iteration_ms
    line(console, f"Now {ms(given.iteration_ms)}, after {ms(best.iteration_ms)} ({times(gain)}).")
    for reason in given.misfits:
        line(console, f"It cannot stay as it is: {reason}.", style="yellow")
    if not move.tables:
        line(console, f"No table moves. {_most_to_gain(result)}")
        return
    line(
        console,
        f"{len(move.tables)} of {plural(len(best.plan.tables), 'table')} change; "
        f"{format_bytes(move.bytes)} of weights and optimizer state move to other ranks"
        f"{_over_links(move)}.",
    )
    line(console, _move_words(move, given.iteration_ms, best.iteration_ms))
    made = table("~table", "~now", "~after")
    for key in move.tables[:SHOWN_MOVES]:
        made.add_row(key, *(_placed_words(p.tables[key]) for p in (given.plan, best.plan)))
    show(console, made)
    if len(move.tables) > SHOWN_MOVES:
        line(
            console,
            f"and {len(move.tables) - SHOWN_MOVES} more; `shardopt diff` lists all of them.",
        )


def _most_to_gain(result: Result) -> str:
    """What staying gives up at most."""
    given = result.in_use
    assert given is not None
    if result.lower_bound_ms <= 0:
        return ""
    most = max(0.0, 1 - result.lower_bound_ms / given.iteration_ms)
    return f"Staying is best: proved, no plan within the limits gains more than {percent(most)}."


def _over_links(move: Move) -> str:
    parts = [f"{format_bytes(size)} {link}" for link, size in move.link_bytes.items() if size]
    return f" ({', '.join(parts)})" if len(parts) > 1 else ""


def _move_words(move: Move, before_ms: float, after_ms: float) -> str:
    """How long the move takes, and when it has paid for itself."""
    how = (
        "TorchRec can move them while the job runs"
        if move.in_place
        else "TorchRec moves them through a checkpoint (not counted): it reshards only table-wise "
        "and column-wise tables in place, with memory for both copies"
    )
    steps = move.pays_back_after(before_ms, after_ms)
    pays = "" if steps is None else f" and pays for itself after {max(1, round(steps)):,} steps"
    return (
        f"The move takes {move.seconds:.2g} s{pays}; {how}. Old and new, a "
        f"rank would hold up to {format_bytes(move.both_copies_bytes)} of tables."
    )


def _placed_words(plan: TablePlan) -> str:
    kernel = "" if plan.compute_kernel in USUAL_KERNELS else f" {plan.compute_kernel}"
    return f"{plan.sharding_type.short}{kernel} on {ranks_text(plan.ranks)}"
