"""The part of ``shardopt plan`` about a plan in use: what it takes now, what would move."""

from __future__ import annotations

from rich.console import Console

from predictor.model.plan import ComputeKernel, TablePlan
from predictor.units import format_bytes
from search.in_use.moves import moved_bytes, moved_tables
from search.problem import Problem, Result
from shardopt.report.console import heading, line, show, table
from shardopt.report.words import ms, plural, ranks_text, times

USUAL_KERNELS = (ComputeKernel.FUSED, ComputeKernel.DENSE)
SHOWN_MOVES = 12
"""Tables that are named; the others are counted."""


def show_moves(console: Console, problem: Problem, result: Result) -> None:
    """The plan in use beside plan 1: times, what moves, what keeps it from staying."""
    given, best = result.given, result.best
    if given is None:
        return
    heading(console, "The plan in use", "and what plan 1 changes in it")
    moved = moved_tables(given.plan, best.plan)
    gain = best.iteration_ms / given.iteration_ms
    line(console, f"Now {ms(given.iteration_ms)}, after {ms(best.iteration_ms)} ({times(gain)}).")
    for reason in given.misfits:
        line(console, f"It cannot stay as it is: {reason}.", style="yellow")
    if not moved:
        line(console, "No table moves.")
        return
    size = format_bytes(moved_bytes(problem, given.plan, best.plan))
    line(
        console,
        f"{plural(len(moved), 'table')} of {len(best.plan.tables)} differ; {size} of weights and "
        "optimizer state reach a rank that did not hold them:",
    )
    made = table([("table", "fold"), ("now", "fold"), ("after", "fold")])
    for key in moved[:SHOWN_MOVES]:
        made.add_row(key, *(_placed_words(p.tables[key]) for p in (given.plan, best.plan)))
    show(console, made)
    if len(moved) > SHOWN_MOVES:
        line(console, f"and {len(moved) - SHOWN_MOVES} more; shardopt diff lists all.")


def _placed_words(plan: TablePlan) -> str:
    kernel = "" if plan.compute_kernel in USUAL_KERNELS else f" {plan.compute_kernel}"
    return f"{plan.sharding_type.short}{kernel} on {ranks_text(plan.ranks)}"
