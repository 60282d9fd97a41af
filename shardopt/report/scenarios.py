"""What a search found of ties and scenarios, as sentences and as objects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from search.problem import Result, TieSummary
from search.scenarios.scored import REGRET
from shardopt.formatting import at_most, ms, percent, plural

BETTER = {
    "device time": "its devices have less to do",
    "regret": "it loses less in the worst scenario",
    "memory": "its memory is better balanced",
    "shards": "it has fewer shards",
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
        f"{_why(ties)}. {_decided(ties)}"
    )


def _why(ties: TieSummary) -> str:
    if not ties.host_bound:
        return ""
    low, high = ties.device_range_ms
    return f": the host sets their pace, and their devices alone would take {ms(low)} to {ms(high)}"


def _decided(ties: TieSummary) -> str:
    if ties.decided_by is None:
        return "None of them is better by device time, regret, memory and shards than plan 1."
    return f"Plan 1 is preferred to the first of them: {BETTER[ties.decided_by]}."


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


def scenario_keys(result: Result) -> Mapping[str, Any]:
    """Keys of ``shardopt plan --json`` about ties and scenarios.

    Keys:
        objective: ``nominal``, ``mean`` or ``regret``.
        ties: null, or ``plans`` (within ``tolerance`` of the best), ``host_bound``, ``device_ms``
            (of the best plan, if the host took no time), ``device_range_ms`` (least and most of
            the tied plans) and ``decided_by``.
        scenarios: each with ``name``, ``weight``, ``iteration_ms`` (of the best plan),
            ``best_known_ms`` and ``lower_bound_ms`` (null where none was computed).
        worst_regret: the largest ``iteration_ms / best_known_ms - 1``; null without scenarios.
        proved_regret: the same with the bounds; null where one is missing.
        passed_over: the largest regret, or the mean in ms, of a plan that is better by the
            objective, but that errors could not tell from the best plan; null where there is none.
    """
    ties, proved, passed_over = result.ties, result.proved_regret, result.passed_over
    if passed_over is not None and result.aim == REGRET:
        passed_over -= 1
    return {
        "objective": result.aim,
        "ties": None
        if ties is None
        else {
            "plans": ties.plans,
            "tolerance": ties.tolerance,
            "host_bound": ties.host_bound,
            "device_ms": ties.device_ms,
            "device_range_ms": list(ties.device_range_ms),
            "decided_by": ties.decided_by,
        },
        "scenarios": [
            {
                "name": one.name,
                "weight": one.weight,
                "iteration_ms": one.ours_ms,
                "best_known_ms": one.best_ms,
                "lower_bound_ms": one.bound_ms or None,
            }
            for one in result.scenarios
        ],
        "worst_regret": result.worst_regret,
        "proved_regret": proved if proved is not None and math.isfinite(proved) else None,
        "passed_over": passed_over,
    }
