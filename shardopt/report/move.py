"""What a move from the plan in use costs, and when it pays."""

from __future__ import annotations

from rich.console import Console

from predictor.model.plan import ComputeKernel, TablePlan
from predictor.units import format_bytes
from search.in_use.price import Move
from search.problem import Result
from shardopt.formatting import (
    ms,
    percent,
    plural,
    ranks_text,
    times,
)
from shardopt.report.console import heading, line, show, table

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
    made = table([("table", "fold"), ("now", "fold"), ("after", "fold")])
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
