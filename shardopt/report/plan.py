"""The report of ``shardopt plan``: what to do, ranking, where the time goes, what is proved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from predictor.model.plan import TablePlan
from predictor.units import format_bytes
from search.baselines.starting_plans import TORCHREC
from search.expected_gain import ExpectedGain
from search.in_use.price import Move
from search.problem import REGRET, Result, TieSummary
from shardopt.api.answer import Answer, move_object
from shardopt.explain.deciding import DecidingConstant, deciding_text
from shardopt.explain.host import host_bound, host_words
from shardopt.explain.uneven import uneven_words
from shardopt.formatting import (
    USUAL_KERNELS,
    at_most,
    gap_of,
    hbm_use,
    interval,
    memory_title,
    ms,
    number,
    percent,
    phase_words,
    picked,
    plural,
    points,
    ranks_text,
    times,
    type_mix,
)
from shardopt.race import Confirmation
from shardopt.report.advice import advice, advice_object, advice_words
from shardopt.report.blocks import Block, Grid, Heading, Line, View, warning
from shardopt.report.constraints import constraints, constraints_object, constraints_words
from shardopt.report.prediction import (
    PROVENANCE_SENTENCES,
    based_on,
    breakdown,
    doubts,
    memory_lines,
    prediction_object,
    setting_facts,
    tables_object,
)

OPTIMAL = 1e-9
"""Gap that is rounding alone."""
SHOWN_CONSTANTS = 3
SHOWN_MOVES = 12
"""Tables that are named; the others are counted."""


def plan_view(answer: Answer, end: Sequence[str], in_use: Path | None = None) -> View:
    """Return all forms of an answer.

    Args:
        end: what became of the plan, and what to type next.
        in_use: path of the plan in use, as given.
    """
    data, brief = plan_object(answer, in_use), headline(answer)
    confirmation = answer.confirmation
    if confirmation is not None:
        data, brief = (
            {**data, **confirmation.as_object()},
            [*brief, gained(confirmation, answer.gain)],
        )
    return View(data, report(answer, end), brief)


def advice_view(answer: Answer) -> View:
    """The advice alone, at a plan that was not searched for.

    Keys, in addition to those of ``answer.head`` and `advice_object`:
        iteration_ms, found_by: of the plan that settings are priced at.
    """
    first = answer.result.best
    where = f"{finder_words(first.found_by)}, {ms(first.iteration_ms)}"
    data = {**answer.head, **picked(first, "iteration_ms", "found_by")}
    blocks: list[Block] = [
        setting_facts(answer.setting),
        *advice(answer.advised, answer.setting.hardware.device),
        f"No plan was searched for; settings are priced at that of {where}.",
    ]
    return View({**data, **advice_object(answer.advised)}, blocks, notes=answer.setting.notes)


def report(answer: Answer, end: Sequence[str]) -> list[Block]:
    """Report the verdict, the ranking, then the details of the best plan."""
    lever, best = answer.lever, answer.best
    lead = [answer.verdict, *constraints_words(answer.constraint_costs)]
    if lever is not None:
        lead.append(f"Advice 1 gains more than the plan: {advice_words(lever)}.")
    waits = host_bound(best, answer.setting.hardware)
    if waits is not None:
        lead.append(host_words(waits))
    uneven = uneven_words(best, gap_of(best.iteration_ms, answer.result.lower_bound_ms))
    if uneven is not None:
        lead.append(uneven)
    return [
        *(Line(text, "bold") for text in lead),
        "",
        setting_facts(answer.setting),
        *advice(answer.advised, answer.setting.hardware.device),
        *constraints(answer.constraint_costs),
        *measured(answer.confirmation, answer.gain),
        *_ranking(answer),
        *_in_use(answer.result, answer.move),
        Heading("Where the time goes", "plan 1, along its critical path"),
        *breakdown(best),
        *_network(answer),
        *memory_lines(best.memory),
        "",
        *_proved(answer),
        *(
            warning(f"Note: {note}.")
            for note in (*answer.result.bound_notes, *answer.setting.notes)
        ),
        *end[:-1],
        Line(f"  {end[-1]}", "bold"),
    ]


def _network(answer: Answer) -> list[str]:
    """The stage that the network between hosts decides, and the same plan over other networks."""
    part, total = answer.network, answer.best.iteration_ms
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


def headline(answer: Answer) -> list[Block]:
    """The report under ``--quiet``: one line; before it that sharding does not matter and what the
    constraints cost, after it the regret where that is minimised, and the constant that decides if
    nobody has measured it."""
    best, result = answer.best, answer.result
    gap = gap_of(best.iteration_ms, result.lower_bound_ms)
    proved = "" if gap is None else f", {at_most(gap)} from optimal"
    lines = [
        f"{ms(best.iteration_ms)} per iteration{proved}; {type_mix(result.best.plan)}. "
        f"{PROVENANCE_SENTENCES[best.provenance]}"
    ]
    lines[:0] = constraints_words(answer.constraint_costs)
    if answer.stakes is not None and not answer.stakes.matters:
        lines.insert(0, answer.verdict)
    if result.aim == REGRET:
        lines.append(regret_text(result) or "")
    if answer.deciding and answer.deciding[0].unmeasured:
        lines.append(deciding_text(answer.deciding[0]))
    return [Line(text, wraps=False) for text in lines if text]


def _ranking(answer: Answer) -> list[Block]:
    """Plans, best first, then TorchRec's."""
    result = answer.result
    rows = []
    for place, (ranked, prediction) in enumerate(
        zip(result.plans, answer.predictions, strict=True), start=1
    ):
        rows.append(
            (
                str(place),
                number(prediction.iteration_ms),
                _above(prediction.iteration_ms, result),
                interval(prediction.interval_ms),
                hbm_use(prediction.memory),
                type_mix(ranked.plan),
                finder_words(ranked.found_by),
            )
        )
    theirs = result.baselines.get(TORCHREC)
    if theirs is not None and all(ranked_plan.found_by != TORCHREC for ranked_plan in result.plans):
        plan = result.baseline_plans.get(TORCHREC)
        mix = "" if plan is None else type_mix(plan)
        above = _above(theirs, result)
        rows.append(("", number(theirs), above, "", "", mix, finder_words(TORCHREC)))
    kind = memory_title(answer.best.memory)
    columns = [">#", ">ms", ">vs bound", "<90 % interval", f">{kind}", "~sharding", "~found by"]
    return [
        Heading("Plans", "predicted iteration time; plan 1 is the answer"),
        Grid(columns, rows, strong=0),
    ]


def _above(time_ms: float, result: Result) -> str:
    gap = gap_of(time_ms, result.lower_bound_ms)
    shown = "?" if gap is None else percent(gap)
    return shown if shown[0] in "<?" else f"+{shown}"


def finder_words(found_by: str) -> str:
    """Return the console's name for the finder of a plan."""
    return "TorchRec's planner" if found_by == TORCHREC else found_by.replace("_", " ")


def deciding_lines(constants: Sequence[DecidingConstant]) -> list[Block]:
    """The constants most worth measuring."""
    return [warning(deciding_text(constant)) for constant in constants[:SHOWN_CONSTANTS]]


def _proved(answer: Answer) -> list[Block]:
    """Say what the headline number is based on, what decides it and what is proved."""
    result, best = answer.result, answer.best
    texts = (
        _claim(best.iteration_ms, result),
        preferred_text(result),
        ties_text(result),
        regret_text(result),
        passed_over_text(result),
        _CUT.get(result.stopped_by),
    )
    return [
        based_on(best),
        *deciding_lines(answer.deciding),
        *filter(None, texts),
        *doubts(best, "Plan 1"),
    ]


_CUT = {
    "time": "Stopped at the time limit, so another run may find another plan.",
    "interrupted": "Interrupted, so this is the best plan of a part of the search.",
}


def preferred_text(result: Result) -> str | None:
    """Say why the best plan is not the fastest one, where it is not."""
    if result.fastest is None:
        return None
    slower = percent(result.best.iteration_ms / result.fastest.iteration_ms - 1)
    if result.in_use is not None:
        steps = f"{result.in_use.horizon:,} steps"
        return f"A plan predicted to be {slower} faster does not pay for its move in {steps}."
    if result.aim != "nominal":
        return f"The fastest plan found is predicted to be {slower} faster than plan 1."
    return f"Plan 1 is preferred to a plan predicted to be {slower} faster."


def _claim(best_ms: float, result: Result) -> str:
    """Say what the bound proves, and of which plans."""
    gap = gap_of(best_ms, result.lower_bound_ms)
    in_use = result.in_use
    limited = in_use is not None and in_use.max_moves and in_use.max_moves < len(in_use.plan.tables)
    which = "no plan"
    if in_use is not None and limited:
        which = f"no plan that moves {plural(in_use.max_moves or 0, 'table')} or fewer"
    if gap is None:
        return "Nothing is proved about optimality: the lower bound is 0 ms."
    return proved_text("plan 1", best_ms, result.lower_bound_ms, which)


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


def ties_text(result: Result) -> str | None:
    """Say how many plans tie, why, and what decided; None where there is one alone."""
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
    return f" Plan 1 is preferred to the first: {better}."


def regret_text(result: Result) -> str | None:
    """Say how much slower than the best known the plan is in any scenario; None without any."""
    regret, proved = result.worst_regret, result.proved_regret
    if regret is None or proved is None:
        return None
    shown = f" (proved: {percent(proved)})" if math.isfinite(proved) else ""
    return (
        f"If costs or data differ as in {plural(len(result.scenarios), 'scenario')}, plan 1 is "
        f"{at_most(regret)} slower than the best plan known{shown}."
    )


def passed_over_text(result: Result) -> str | None:
    """Say why a plan that looks better by the objective was passed over; None where none was."""
    if result.passed_over is None:
        return None
    better = (
        f"a largest regret of {percent(result.passed_over - 1)}"
        if result.aim == REGRET
        else f"a mean of {ms(result.passed_over)}"
    )
    return (
        f"A plan with {better} was found, but the stated errors cannot tell it from plan 1, the "
        "plan of the nominal objective."
    )


def _in_use(result: Result, move: Move | None) -> list[Block]:
    """The plan in use compared with plan 1: times, what moves, what that takes, why it cannot
    stay."""
    in_use, best = result.in_use, result.best
    if in_use is None or move is None:
        return []
    gain = times(best.iteration_ms / in_use.iteration_ms)
    lines: list[Block] = [
        Heading("The plan in use", "and what plan 1 would change"),
        f"Now {ms(in_use.iteration_ms)}, after {ms(best.iteration_ms)} ({gain}).",
        *(warning(f"It cannot stay as it is: {reason}.") for reason in in_use.misfits),
    ]
    if not move.tables:
        most = max(0.0, 1 - result.lower_bound_ms / in_use.iteration_ms)
        proved = (
            f"Staying is best: proved, no plan within the limits gains more than {percent(most)}."
        )
        return [*lines, f"No table moves. {proved if result.lower_bound_ms > 0 else ''}"]
    shown = move.tables[:SHOWN_MOVES]
    rows = [
        (key, *(_placed_words(p.tables[key]) for p in (in_use.plan, best.plan))) for key in shown
    ]
    lines += [
        f"{len(move.tables)} of {plural(len(best.plan.tables), 'table')} change; "
        f"{format_bytes(move.bytes)} of weights and optimizer state move to other ranks"
        f"{_over_links(move)}.",
        _move_words(move, in_use.iteration_ms, best.iteration_ms),
        Grid(["~table", "~now", "~after"], rows),
    ]
    more = len(move.tables) - len(shown)
    return [*lines, *([f"and {more} more; `shardopt diff` lists all of them."] if more else [])]


def _over_links(move: Move) -> str:
    parts = [f"{format_bytes(size)} {link}" for link, size in move.link_bytes.items() if size]
    return f" ({', '.join(parts)})" if len(parts) > 1 else ""


def _move_words(move: Move, before_ms: float, after_ms: float) -> str:
    how = (
        "TorchRec can move them while the job runs"
        if move.in_place
        else "TorchRec moves them through a checkpoint (not counted): it reshards only table-wise "
        "and column-wise tables in place, with memory for both copies"
    )
    steps = move.pays_back_after(before_ms, after_ms)
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
        Grid(["<plan", ">ms", ">95 % interval", ">predicted", "~found by", "<"], rows),
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
            "predicted, outside the 90 % interval: the profile is not that of this machine; run "
            "`shardopt calibrate` here, or plan with what was learned."
        )
    ]


def gained(confirmation: Confirmation, expected: ExpectedGain | None) -> str:
    """The fastest plan, and the measured gain beside the expected one."""
    if confirmation.gain is None:
        return f"{confirmation.best.name} is the fastest measured plan; TorchRec's was not timed."
    value, low, high = confirmation.gain
    between = ""
    if low is not None and high is not None:
        between = f" (95 % interval {points(low)} to {points(high)})"
    before = "" if expected is None else f"; {points(expected.mean)} % was expected"
    return (
        f"{confirmation.best.name} is the fastest measured plan: it gains {points(value)} % over "
        f"TorchRec's{between}{before}."
    )


def plan_object(answer: Answer, in_use: Path | None = None) -> dict[str, Any]:
    """``shardopt plan --json``.

    Args:
        in_use: path of the plan in use, as given.

    Keys, in addition to those of ``answer.head``, which come first:
        iteration_ms, interval_ms, interval_calibrated, provenance, out_of_range: of the best plan.
        lower_bound_ms: no plan of the search space is predicted to be faster.
        gap: ``iteration_ms / lower_bound_ms - 1``, a fraction; null where the bound is 0.
        bound_notes: what the bound leaves out or did not get to, a sentence each; empty where it
            is closed.
        surrogate_gap: null; older readers ask for it.
        stopped_by: ``work``, ``gap``, ``time`` or ``interrupted``.
        search_seconds: wall time of the search.
        evaluations: plans scored on the full timeline.
        plans: best first, each with the keys of `prediction_object`, ``found_by`` and ``tables``
            as in plan.json.
        baselines: name -> iteration_ms under the same predictor.
        expected_gain: of the best plan over TorchRec's, a share of the iteration: ``baseline``
            (whose plan, as in ``baselines``), ``mean``, ``interval`` (90 %), ``nominal`` (if every
            cost were as predicted) and ``draws``; null where TorchRec's planner has no plan.
        sharding_matters: false where sane plans are alike.
        verdict: what to do, the first line of the console.
        host_bound: null, or ``share`` (of the iteration in which the GPU waits for its host),
            ``why`` and ``remedy``.
        advice, together, advice_considered, other_machines: `advice_object`.
        constraint_costs, unconstrained: `constraints_object`.
        preferred_to: the fastest plan found, as ``iteration_ms`` and ``found_by``, where another
            is preferred to it; else null.
        objective: ``nominal``, ``mean`` or ``regret``.
        ties: null, or ``plans`` (within ``tolerance`` of the best), ``host_bound``, ``device_ms``
            (of the best plan, if the host took no time), ``device_range_ms`` (least and most of
            these plans), ``decided_by`` and ``fullest_bytes`` (of shards on the fullest rank, of
            the best plan and of the fastest).
        scenarios: each with ``name``, ``weight``, ``iteration_ms`` (of the best plan),
            ``best_known_ms`` and ``lower_bound_ms`` (null where none was computed).
        worst_regret: the largest ``iteration_ms / best_known_ms - 1``; null without scenarios.
        proved_regret: the same with the bounds; null where one is missing.
        passed_over: the largest regret, or the mean in ms, of a plan that is better by the
            objective, but that errors could not tell from the best plan; null where there is none.
        notes: what the console says once.
        from, move: `move_object`, with a plan in use.
        deciding: `deciding_object`.
        between_hosts: null where NICs join no ranks, or ``stage`` (the longest that a slower
            network prolongs, null: none), ``stage_ms`` and ``others`` (kind -> iteration_ms of this
            plan over it, empty where the network was named).
    """
    result, best, fastest = answer.result, answer.best, answer.result.fastest
    waits = host_bound(best, answer.setting.hardware)
    passed_over = result.passed_over
    if passed_over is not None and result.aim == REGRET:
        passed_over -= 1
    return {
        **answer.head,
        **picked(best, "iteration_ms", "interval_ms", "interval_calibrated", "provenance"),
        "out_of_range": [asdict(item) for item in best.out_of_range],
        "lower_bound_ms": result.lower_bound_ms,
        "gap": gap_of(best.iteration_ms, result.lower_bound_ms),
        "bound_notes": list(result.bound_notes),
        "surrogate_gap": None,
        **picked(result, "stopped_by", "search_seconds", "evaluations"),
        "plans": [
            {
                **prediction_object(prediction),
                "found_by": ranked.found_by,
                "tables": tables_object(ranked.plan),
            }
            for ranked, prediction in zip(result.plans, answer.predictions, strict=True)
        ],
        "baselines": dict(result.baselines),
        "expected_gain": None if answer.gain is None else asdict(answer.gain),
        "sharding_matters": answer.stakes is None or answer.stakes.matters,
        "verdict": answer.verdict,
        "host_bound": waits and asdict(waits),
        **advice_object(answer.advised),
        **constraints_object(answer.constraint_costs),
        "preferred_to": fastest and picked(fastest, "iteration_ms", "found_by"),
        "objective": result.aim,
        "ties": None if result.ties is None else asdict(result.ties),
        "scenarios": [
            {
                "name": scenario.name,
                "weight": scenario.weight,
                "iteration_ms": scenario.ours_ms,
                "best_known_ms": scenario.best_ms,
                "lower_bound_ms": scenario.bound_ms or None,
            }
            for scenario in result.scenarios
        ],
        **picked(result, "worst_regret", "proved_regret"),
        "passed_over": passed_over,
        "notes": list(answer.setting.notes),
        **move_object(result, answer.move, in_use),
        "deciding": deciding_object(answer.deciding),
        "between_hosts": None if answer.network is None else asdict(answer.network),
    }


def deciding_object(constants: Sequence[DecidingConstant]) -> list[dict[str, Any]]:
    """``deciding`` of ``plan`` and ``explain --json``, the most important first: the fields of
    `DecidingConstant`, ``constant`` as ``group.key``."""
    return [
        {**asdict(constant), "constant": f"{constant.group}.{constant.constant}"}
        for constant in constants
    ]
