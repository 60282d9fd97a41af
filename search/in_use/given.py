"""A plan in use within the search: which searchers can stay near it, and how it fares itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from search.in_use.align import closest
from search.in_use.moves import Placed, misfits
from search.objective import Objective
from search.problem import GivenPlan
from search.propose.candidates import Candidate
from search.space.option import Space

NAME = "given plan"
NEARBY = ("cpsat",)
"""Searchers that can be told how many tables may move; the others place all tables afresh."""


def anywhere(space: Space) -> Space:
    """The space with every table free to move."""
    if space.given is None:
        return space
    return replace(space, given=replace(space.given, max_moves=len(space.options)))


def bounded(space: Space) -> Space:
    """The space that the bound is of: where no table may move at all, that of all plans, because
    a plan that is only rated is best held against what moving could bring."""
    fixed = space.given is not None and not space.given.max_moves
    return anywhere(space) if fixed else space


def nearby(space: Space, searchers: Sequence[str]) -> Sequence[str]:
    """Those of the searchers that can keep to the limit on moves."""
    if space.given is None or not space.given.is_limited:
        return searchers
    return [name for name in searchers if name in NEARBY and space.given.max_moves]


def in_use(objective: Objective) -> list[Candidate]:
    """The given plan as a candidate, if constraints allow it."""
    given = objective.space.given
    choices = tuple(choice for choice in given.choices if choice) if given else ()
    if len(choices) < len(objective.space.options):
        return []
    return [Candidate(choices, float(objective.score([choices])[0]), NAME)]


def renamed(objective: Objective, candidate: Candidate) -> Candidate:
    """The plan with its ranks named such that the fewest tables move."""
    assignment, ms = closest(objective, candidate.assignment, candidate.iteration_ms)
    return replace(candidate, assignment=assignment, iteration_ms=ms)


def rated(objective: Objective, placed: Placed) -> GivenPlan:
    """The given plan as it is: its time, and why it cannot stay."""
    plan, space = placed.plan, objective.space
    tables = tuple(plan.tables[key] for key in space.keys)
    ms = float(objective.batch.score([tables])[0])
    return GivenPlan(plan, ms, misfits(space, objective.problem, placed), placed.max_moves)
