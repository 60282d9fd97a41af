"""The report of ``shardopt plan``: what to do, ranking, where the time goes, what is proved."""

from __future__ import annotations

import math
from collections.abc import Sequence

from predictor.model.plan import TablePlan
from predictor.units import format_bytes
from search.baselines.starting_plans import TORCHREC
from search.expected_gain import ExpectedGain
from search.problem import NOMINAL, REGRET, TieSummary
from shardopt.api.document import AdviceAnswer, MoveAnswer, PlanAnswer
from shardopt.explain.deciding import DecidingConstant, deciding_text
from shardopt.explain.host import host_words
from shardopt.explain.uneven import uneven_words
from shardopt.formatting import (
    USUAL_KERNELS,
    at_most,
    gap_of,
    interval,
    ms,
    number,
    percent,
    phase_words,
    plural,
    points,
    ranks_text,
    times,
    type_mix,
)
from shardopt.race import Confirmation
from shardopt.report.advice import advice, advice_words
from shardopt.report.blocks import Block, Heading, Line, TextTable, View, warning
from shardopt.report.constraints import constraints, constraints_words
from shardopt.report.prediction import (
    PROVENANCE_SENTENCES,
    based_on,
    breakdown,
    doubts,
    memory_lines,
    memory_title,
    memory_use,
    setting_facts,
)

OPTIMAL = 1e-9
"""Gap that is rounding alone."""
SHOWN_CONSTANTS = 3
SHOWN_MOVES = 12
"""Tables that are named; the others are counted."""


def plan_view(answer: PlanAnswer, end: Sequence[str], applied: Sequence[int] = ()) -> View:
    """Return all forms of an answer.

    Args:
        end: what became of the plan, and what to type next.
        applied: numbers of the advice, from 1, that a model file was written with.
    """
    brief, confirmation = headline(answer), answer.confirmation
    if confirmation is not None:
        brief.append(gained(confirmation, answer.expected_gain))
    return View(answer, report(answer, end, applied), brief)


def advice_view(answer: AdviceAnswer, applied: Sequence[int] = ()) -> View:
    """The advice alone, at a plan that was not searched for; ``applied`` as of `plan_view`."""
    theirs = answer.found_by == TORCHREC
    finder = finder_words(answer.found_by) if theirs else f"the rule '{answer.found_by}'"
    blocks: list[Block] = [
        setting_facts(answer.setting),
        *advice(answer, answer.device, applied),
        f"No search was run; the advice is for the plan of {finder}, which takes "
        f"{ms(answer.iteration_ms)}.",
    ]
    return View(answer, blocks, notes=answer.setting.notes)


def report(answer: PlanAnswer, end: Sequence[str], applied: Sequence[int] = ()) -> list[Block]:
    """Report the verdict, the ranking, then the details of the best plan."""
    lever, best = answer.lever, answer.best
    lead = [answer.verdict, *constraints_words(answer)]
    if lever is not None:
        beside = "" if answer.expected_gain is None else " gains more than the plan"
        lead.append(f"Advice 1{beside}: {advice_words(lever)}.")
    if answer.host_bound is not None:
        lead.append(host_words(answer.host_bound))
    uneven = uneven_words(best.prediction, answer.gap)
    if uneven is not None:
        lead.append(uneven)
    return [
        *(Line(text, "bold") for text in lead),
        "",
        setting_facts(answer.setting),
        *advice(answer, answer.device, applied),
        *constraints(answer),
        *measured(answer.confirmation, answer.expected_gain),
        *_ranking(answer),
        *_in_use(answer),
        Heading("Where the time goes", "plan 1, along its critical path"),
        *breakdown(best),
        *_network(answer),
        *memory_lines(best.memory),
        "",
        *_proved(answer),
        *(warning(f"Note: {note}.") for note in (*answer.bound_notes, *answer.notes)),
        *end[:-1],
        Line(f"  {end[-1]}", "bold"),
    ]


def _network(answer: PlanAnswer) -> list[str]:
    """The stage that the network between hosts decides, and the same plan over other networks."""
    part, total = answer.between_hosts, answer.iteration_ms
    if part is None:
        return []
    lines = ["No stage of this plan is bound by the network between hosts."]
    if part.stage is not None:
        share = percent(part.stage_ms / total)
        lines = [
            f"The network between hosts bounds the {phase_words(part.stage)}: "
            f"{ms(part.stage_ms)}, {share} of the iteration."
        ]
    if part.others:
        times = ", ".join(f"{kind} {number(time)}" for kind, time in part.others.items())
        lines.append(f"This plan with another --network, in ms: {times}.")
    return lines


def headline(answer: PlanAnswer) -> list[Block]:
    """The report under ``--quiet``: one line; before it that sharding does not matter and what the
    constraints cost, after it the regret where that is minimised, and the constant that decides if
    nobody has measured it."""
    proved = "" if answer.gap is None else f", {at_most(answer.gap)} from optimal"
    lines = [
        f"{ms(answer.iteration_ms)} per iteration{proved}; {type_mix(answer.best.sharding_plan)}. "
        f"{PROVENANCE_SENTENCES[answer.provenance]}"
    ]
    lines[:0] = constraints_words(answer)
    if not answer.sharding_matters:
        lines.insert(0, answer.verdict)
    if answer.objective == REGRET:
        lines.append(regret_text(answer) or "")
    if answer.deciding and answer.deciding[0].unmeasured:
        lines.append(deciding_text(answer.deciding[0]))
    return [Line(text, wraps=False) for text in lines if text]


def _ranking(answer: PlanAnswer) -> list[Block]:
    """Plans, best first, then TorchRec's where it is none of them, whoever else found it."""
    torchrecs = answer.torchrecs
    finders = [
        TORCHREC
        if torchrecs is not None and plan.sharding_plan.tables == torchrecs.tables
        else plan.found_by
        for plan in answer.plans
    ]
    rows = [
        (
            str(place),
            number(plan.iteration_ms),
            _above(plan.iteration_ms, answer),
            interval(plan.interval_ms),
            memory_use(plan.memory),
            type_mix(plan.sharding_plan),
            finder_words(finder),
        )
        for place, (plan, finder) in enumerate(zip(answer.plans, finders, strict=True), start=1)
    ]
    theirs = answer.baselines.get(TORCHREC)
    if theirs is not None and TORCHREC not in finders:
        mix = "" if torchrecs is None else type_mix(torchrecs)
        above = _above(theirs, answer)
        rows.append(("", number(theirs), above, "", "", mix, finder_words(TORCHREC)))
    kind = memory_title(answer.best.memory)
    columns = [">#", ">ms", ">vs bound", "<90 % interval", f">{kind}", "~sharding", "~found by"]
    return [
        Heading("Plans", "predicted iteration time; plan 1 is the answer"),
        TextTable(columns, rows, strong=0),
    ]


def _above(time_ms: float, answer: PlanAnswer) -> str:
    gap = gap_of(time_ms, answer.lower_bound_ms)
    shown = "?" if gap is None else percent(gap)
    return shown if shown[0] in "<?" else f"+{shown}"


def finder_words(found_by: str) -> str:
    """Return the console's name for the finder of a plan."""
    return found_by.replace(TORCHREC, "TorchRec's planner").replace("_", " ")


def deciding_lines(constants: Sequence[DecidingConstant]) -> list[Block]:
    """The constants most worth measuring."""
    return [warning(deciding_text(constant)) for constant in constants[:SHOWN_CONSTANTS]]


def _proved(answer: PlanAnswer) -> list[Block]:
    """Say what the headline number is based on, what decides it and what is proved."""
    texts = (
        _claim(answer),
        preferred_text(answer),
        ties_text(answer),
        regret_text(answer),
        passed_over_text(answer),
        _CUT.get(answer.stopped_by),
    )
    return [
        based_on(answer.best),
        *deciding_lines(answer.deciding),
        *filter(None, texts),
        *doubts(answer.best, "Plan 1"),
    ]


_CUT = {
    "time": "Stopped at the time limit, so another run may find another plan.",
    "interrupted": "Interrupted, so this is the best plan of a part of the search.",
}


def preferred_text(answer: PlanAnswer) -> str | None:
    """Say why the best plan is not the fastest one, where it is not."""
    if answer.preferred_to is None:
        return None
    slower = percent(answer.iteration_ms / answer.preferred_to.iteration_ms - 1)
    if answer.from_ is not None:
        steps = f"{answer.from_.horizon:,} steps"
        return f"A plan predicted to be {slower} faster does not pay for its move in {steps}."
    if answer.objective != NOMINAL:
        return f"The fastest plan found is predicted to be {slower} faster than plan 1."
    return f"Plan 1 is preferred to a plan predicted to be {slower} faster."


def _claim(answer: PlanAnswer) -> str:
    """Say what the bound proves, and of which plans."""
    if answer.gap is None:
        return "Nothing is proved about optimality: the lower bound is 0 ms."
    moves = None if answer.from_ is None else answer.from_.max_moves
    which = "no plan"
    if moves and moves < len(answer.best.sharding_plan.tables):
        which = f"no plan that moves {plural(moves, 'table')} or fewer"
    return proved_text("plan 1", answer.iteration_ms, answer.lower_bound_ms, which)


def proved_text(plan: str, time_ms: float, bound_ms: float, which: str = "no plan") -> str:
    """Say what a positive lower bound proves of a plan."""
    gap = time_ms / bound_ms - 1
    if gap <= OPTIMAL:
        return f"Proved: {which} is predicted to be faster; {plan} is optimal."
    return (
        f"Proved: {which} is predicted to be faster than {ms(bound_ms)}; "
        f"{plan} is {at_most(gap)} from optimal."
    )


BETTER = {
    "device time": "its devices have less to do",
    "sharding types": "it has fewer sharding types",
    "shards": "it has fewer shards",
    "balance": "its memory is better balanced",
}
"""Rule of `search.prefer` -> what the chosen plan is better by."""


def ties_text(answer: PlanAnswer) -> str | None:
    """Say how many plans tie, why, and what decided; None where there is one alone."""
    ties = answer.ties
    if ties is None or ties.plans < 2:
        return None
    best = "best by the objective" if answer.objective != NOMINAL else "fastest"
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
        best, fastest = map(format_bytes, ties.fullest_bytes)
        better = f"its shards take {best} on the fullest rank instead of {fastest}"
    elif ties.decided_by == "expected time":
        best, fastest = map(ms, ties.expected_ms)
        better = f"on average over the errors of all costs it takes {best} instead of {fastest}"
    else:
        better = BETTER[ties.decided_by]
    return f" Plan 1 is preferred to the first: {better}."


def regret_text(answer: PlanAnswer) -> str | None:
    """Say how much slower than the best known the plan is in any scenario; None without any."""
    regret, proved = answer.worst_regret, answer.proved_regret
    if regret is None or proved is None:
        return None
    shown = f" (proved: {percent(proved)})" if math.isfinite(proved) else ""
    return (
        f"If costs or data differ as in {plural(len(answer.scenarios), 'scenario')}, plan 1 is "
        f"{at_most(regret)} slower than the best plan known{shown}."
    )


def passed_over_text(answer: PlanAnswer) -> str | None:
    """Say why a plan that looks better by the objective was passed over; None where none was."""
    if answer.passed_over is None:
        return None
    better = (
        f"a largest regret of {percent(answer.passed_over)}"
        if answer.objective == REGRET
        else f"a mean of {ms(answer.passed_over)}"
    )
    return (
        f"A plan with {better} was found, but the stated errors cannot tell it from plan 1, the "
        "plan of the nominal objective."
    )


def _in_use(answer: PlanAnswer) -> list[Block]:
    """The plan in use compared with plan 1: times, what moves, what that takes, why it cannot
    stay."""
    in_use, move, after = answer.from_, answer.move, answer.best.sharding_plan
    if in_use is None or move is None:
        return []
    gain = times(answer.iteration_ms / in_use.iteration_ms)
    lines: list[Block] = [
        Heading("The plan in use", "and what plan 1 would change"),
        f"Now {ms(in_use.iteration_ms)}, after {ms(answer.iteration_ms)} ({gain}).",
        *(warning(f"It cannot stay as it is: {reason}.") for reason in in_use.misfits),
    ]
    if not in_use.moved:
        most = at_most(move.lower_bound_gain)
        proved = f"Staying is best: proved, any plan within the limits gains {most}."
        return [*lines, f"No table moves. {proved if answer.lower_bound_ms > 0 else ''}"]
    shown = in_use.moved[:SHOWN_MOVES]
    rows = [
        (key, *(_placed_words(plan.tables[key]) for plan in (in_use.sharding_plan, after)))
        for key in shown
    ]
    lines += [
        f"{len(in_use.moved)} of {plural(len(after.tables), 'table')} change; "
        f"{format_bytes(move.bytes)} of weights and optimizer state move to other ranks"
        f"{_over_links(move)}.",
        _move_words(move),
        TextTable(["~table", "~now", "~after"], rows),
    ]
    more = len(in_use.moved) - len(shown)
    return [*lines, *([f"and {more} more; `shardopt diff` lists all of them."] if more else [])]


def _over_links(move: MoveAnswer) -> str:
    parts = [f"{format_bytes(size)} {link}" for link, size in move.link_bytes.items() if size]
    return f" ({', '.join(parts)})" if len(parts) > 1 else ""


def _move_words(move: MoveAnswer) -> str:
    how = (
        "TorchRec can move them while the job runs"
        if move.in_place
        else "TorchRec moves them through a checkpoint (not counted): it reshards only table-wise "
        "and column-wise tables in place, with memory for both copies"
    )
    steps = move.pays_back_after_steps
    pays = "" if steps is None else f" and pays for itself after {max(1, round(steps)):,} steps"
    return (
        f"The move takes {move.seconds:.2g} s{pays}; {how}. While both "
        f"copies exist, a rank holds up to {format_bytes(move.both_copies_bytes)} of tables."
    )


def _placed_words(plan: TablePlan) -> str:
    kernel = "" if plan.compute_kernel in USUAL_KERNELS else f" {plan.compute_kernel}"
    return f"{plan.sharding_type.short}{kernel} on {ranks_text(plan.ranks)}"


def measured(confirmation: Confirmation | None, expected: ExpectedGain | None) -> list[Block]:
    """The plans as measured, the fastest first, then `gained`; nothing where none was."""
    if confirmation is None:
        return []
    plans = sorted(confirmation.plans, key=lambda p: (p.median_ms is None, p.median_ms or 0.0))
    rows = [
        (
            plan.name,
            "" if plan.median_ms is None else number(plan.median_ms),
            "" if plan.interval_ms is None else interval(plan.interval_ms),
            "" if plan.predicted_ms is None else number(plan.predicted_ms),
            plan.found_by,
            ""
            if plan.dropped_after is None
            else f"out after {plural(plan.dropped_after, 'round')}",
        )
        for plan in plans
    ]
    return [
        Heading("Measured plans"),
        TextTable(["<plan", ">ms", ">95 % interval", ">predicted", "~found by", "<"], rows),
        *(f"{note}." for note in confirmation.notes),
        *_off(confirmation),
        gained(confirmation, expected),
    ]


def _off(confirmation: Confirmation) -> list[Block]:
    """The factor between measured and predicted times, where that is beyond their intervals."""
    factors = sorted(plan.factor for plan in confirmation.plans if plan.factor is not None)
    if not factors:
        return []
    timed = sum(plan.median_ms is not None for plan in confirmation.plans)
    low, high = f"{factors[0]:.2g}", f"{factors[-1]:.2g}"
    words = low if low == high else f"{low} to {high}"
    return [
        warning(
            f"{len(factors)} of {plural(timed, 'measured plan')} took {words} times as long as "
            "predicted, outside the 90 % interval: the profile does not fit this machine; run "
            "`shardopt calibrate` here, or plan with the learned profile."
        )
    ]


def gained(confirmation: Confirmation, expected: ExpectedGain | None) -> str:
    """The fastest plan, and the measured gain beside the expected one."""
    name = confirmation.best.name
    fastest = f"{name[0].upper()}{name[1:]} is the fastest measured plan"
    if confirmation.is_theirs:
        return f"{fastest}; it is TorchRec's."
    if confirmation.gain is None:
        return f"{fastest}; TorchRec's was not timed."
    value, low, high = confirmation.gain
    between = ""
    if low is not None and high is not None:
        between = f" (95 % interval {points(low)} to {points(high)})"
    before = "" if expected is None else f"; {points(expected.mean)} % was expected"
    return f"{fastest}: it gains {points(value)} % over TorchRec's{between}{before}."
