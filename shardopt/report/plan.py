"""The report of ``shardopt plan``: what to do, ranking, where the time goes, what is proved."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from predictor.model.plan import ComputeKernel, TablePlan
from predictor.units import format_bytes
from search.baselines.starting_plans import TORCHREC
from search.in_use.price import Move
from search.problem import Result, TieSummary
from search.scenarios.scored import REGRET
from shardopt.api.answer import Answer
from shardopt.explain.deciding import DecidingConstant, deciding_text
from shardopt.formatting import (
    at_most,
    gap_of,
    hbm_use,
    interval,
    ms,
    number,
    percent,
    plural,
    ranks_text,
    times,
    type_mix,
)
from shardopt.report.advice import advice_words, show_advice
from shardopt.report.console import heading, line, show, table
from shardopt.report.prediction import (
    misfit_text,
    provenance_text,
    show_breakdown,
    show_doubts,
    show_memory,
    show_setting,
    show_time,
    sync_text,
)


def show_plan(console: Console, answer: Answer, end: Sequence[str]) -> None:
    """The whole report: what to do, the ranking, then what there is to know of the best plan.

    Args:
        end: the last lines, with what to type next last.
    """
    line(console, answer.verdict, style="bold")
    lever = answer.lever
    if lever is not None:
        line(console, f"Advice 1 gains more than the plan: {advice_words(lever)}.", style="bold")
    console.print()
    show_setting(console, answer.setting)
    show_advice(console, answer.advised)
    show_ranking(console, answer)
    show_move(console, answer.result, answer.move)
    heading(console, "Where the time goes", "plan 1, along its critical path")
    show_breakdown(console, answer.best)
    show_memory(console, answer.best.memory)
    show_verdict(console, answer)
    _show_end(console, answer, end)


def show_headline(console: Console, answer: Answer) -> None:
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
    if answer.deciding and answer.deciding[0].unmeasured:
        console.print(Text(deciding_text(answer.deciding[0])), soft_wrap=True)


def show_ranking(console: Console, answer: Answer) -> None:
    """Plans, best first, then TorchRec's, and the times of what other methods choose."""
    result, bound_ms = answer.result, answer.result.lower_bound_ms
    heading(console, "Plans", "predicted iteration time, best first")
    made = table(">#", ">ms", ">vs bound", "<90 % interval", ">HBM GiB", "~sharding", "~found by")

    def add(number_: str, time_ms: float, cells: Sequence[str], style: str = "") -> None:
        gap = gap_of(time_ms, bound_ms)
        above = "?" if gap is None else _above(gap)
        made.add_row(number_, number(time_ms), above, *cells, style=style)

    for place, (ranked, prediction) in enumerate(
        zip(result.plans, answer.predictions, strict=True), start=1
    ):
        found_by = finder_words(ranked.found_by)
        use = interval(prediction.interval_ms), hbm_use(prediction.memory)
        style = "bold" if place == 1 else ""
        add(str(place), prediction.iteration_ms, (*use, type_mix(ranked.plan), found_by), style)
    others = dict(sorted(result.baselines.items(), key=lambda item: (item[1], item[0])))
    theirs = others.pop(TORCHREC, None)
    if theirs is not None and all(one.found_by != TORCHREC for one in result.plans):
        plan = result.baseline_plans.get(TORCHREC)
        mix = "" if plan is None else type_mix(plan)
        add("", theirs, ("", "", mix, finder_words(TORCHREC)))
    show(console, made)
    if others:
        times = ", ".join(f"{finder_words(k)} {number(v)}" for k, v in others.items())
        show(console, Text(f"Other methods (ms): {times}.", style="dim"))


def finder_words(found_by: str) -> str:
    """What the console calls who found a plan."""
    return "TorchRec's planner" if found_by == TORCHREC else found_by.replace("_", " ")


def _above(gap: float) -> str:
    shown = percent(gap)
    return shown if shown.startswith("<") else f"+{shown}"


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


def show_verdict(console: Console, answer: Answer) -> None:
    """The headline number, what decides it, what it is based on and what is proved."""
    result, best = answer.result, answer.best
    show_time(console, best)
    show_deciding(console, answer.deciding)
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


def show_deciding(console: Console, found: Sequence[DecidingConstant]) -> None:
    """The constants most worth measuring."""
    for one in found[:SHOWN_CONSTANTS]:
        line(console, deciding_text(one), style="yellow")


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
    "device time": "its devices have less to do",
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
        better = f"its shards take {mine} on the fullest rank instead of {fastest}"
    else:
        better = BETTER[ties.decided_by]
    return f" Plan 1 is preferred to the first of them: {better}."


def regret_text(result: Result) -> str | None:
    """How much slower than the best the plan is in any scenario, at most; None without any."""
    regret, proved = result.worst_regret, result.proved_regret
    if regret is None or proved is None:
        return None
    shown = f" (proved: {percent(proved)})" if math.isfinite(proved) else ""
    return (
        f"If costs or data differ as in {plural(len(result.scenarios), 'scenario')}, plan 1 is "
        f"{at_most(regret)} slower than the best plan known{shown}."
    )


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
