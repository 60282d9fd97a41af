"""Cost of the model's constraints, in words and as a table."""

from __future__ import annotations

from shardopt.api.document import ConstraintPrices
from shardopt.formatting import ms, number, percent
from shardopt.report.blocks import Block, Heading, TextTable


def constraints_words(prices: ConstraintPrices) -> list[str]:
    """Say in a sentence what all constraints cost; nothing where they cost nothing."""
    free = prices.unconstrained
    if free is None:
        return []
    return [
        f"Constraints cost {percent(free.gain)} of the iteration: a plan without them takes "
        f"{ms(free.iteration_ms)}."
    ]


def constraints(prices: ConstraintPrices) -> list[Block]:
    """List the constraints that bind, with what dropping each saves."""
    if prices.unconstrained is None:
        return []
    rows = [
        (
            item.table or "",
            item.constraint,
            number(item.iteration_ms_without),
            f"-{percent(item.gain)}",
        )
        for item in prices.constraint_costs
    ]
    grid = TextTable(["~table", "~constraint", ">ms without", ">iteration"], rows)
    return [Heading("Constraints", "what dropping each saves, one after the other"), grid]
