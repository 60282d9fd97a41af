"""Cost of the model's constraints, in words, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from predictor.model.plan_json import plan_to_dict
from search.constraint_costs import ConstraintCosts
from shardopt.formatting import ms, number, percent
from shardopt.report.blocks import Block, Grid, Heading


def constraints_words(costs: ConstraintCosts | None) -> list[str]:
    """Say in a sentence what all constraints cost; nothing where they cost nothing."""
    if costs is None:
        return []
    return [
        f"Constraints cost {percent(costs.gain)} of the iteration: a plan without them takes "
        f"{ms(costs.iteration_ms)}."
    ]


def constraints(costs: ConstraintCosts | None) -> list[Block]:
    """List the constraints that bind, with what dropping each saves."""
    if costs is None:
        return []
    rows = [
        (
            item.table or "",
            item.constraint,
            number(item.iteration_ms_without),
            f"-{percent(item.gain)}",
        )
        for item in costs.costs
    ]
    grid = Grid(["~table", "~constraint", ">ms without", ">iteration"], rows)
    return [Heading("Constraints", "what dropping each saves, one after the other"), grid]


def constraints_object(costs: ConstraintCosts | None) -> dict[str, Any]:
    """Return the cost of constraints as ``plan --json`` holds it.

    Keys:
        constraint_costs: constraints that bind, in the order in which dropping them saves most:
            ``table`` (null for all that are left together), ``constraint``,
            ``iteration_ms_without`` (dropped as well as those before it) and ``gain``; empty where
            constraints cost nothing, or nothing was priced.
        unconstrained: null, or ``iteration_ms`` and ``plan`` (as in plan.json) without any.
    """
    if costs is None:
        return {"constraint_costs": [], "unconstrained": None}
    free = {"iteration_ms": costs.iteration_ms, "plan": plan_to_dict(costs.plan)}
    return {"constraint_costs": [asdict(cost) for cost in costs.costs], "unconstrained": free}
