"""Plans that the search knows of: with their predicted times, ranked, without repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from search.objective import Assignment
from search.space.option import ChoicesInUse


@dataclass(frozen=True)
class Candidate:
    """A plan with its predicted iteration time and who found it."""

    assignment: Assignment
    iteration_ms: float
    found_by: str


def rank_distinct(
    candidates: Sequence[Candidate], in_use: ChoicesInUse | None = None
) -> list[Candidate]:
    """Best first, without plans that differ only by a renaming of ranks.

    Of plans that are equally fast to six digits, the one that moves fewer tables of the plan in use
    comes first, then the one with fewer shards.
    """
    seen: set[frozenset[object]] = set()
    found = []
    for candidate in sorted(candidates, key=lambda c: _rank(c, in_use)):
        name = signature(candidate.assignment)
        if name not in seen:
            seen.add(name)
            found.append(candidate)
    return found


def _rank(candidate: Candidate, in_use: ChoicesInUse | None) -> tuple[float, int, int, float]:
    moves = 0 if in_use is None else len(in_use.moved(candidate.assignment))
    shards = sum(option.num_shards for option, _ in candidate.assignment)
    return float(f"{candidate.iteration_ms:.6g}"), moves, shards, candidate.iteration_ms


@lru_cache(maxsize=64)
def signature(assignment: Assignment) -> frozenset[object]:
    """Equal for plans that differ only by a renaming of ranks or of like shards of a table."""
    on_rank: dict[int, list[object]] = {}
    for option, ranks in assignment:
        for rank, size in zip(ranks, option.sizes, strict=True):
            held = (*option.way[:2], option.cache_load_factor, option.table, size)
            on_rank.setdefault(rank, []).append(held)
    counted = [frozenset(_count(held).items()) for held in on_rank.values()]
    return frozenset(_count(counted).items())


def _count(items: Sequence[object]) -> dict[object, int]:
    found: dict[object, int] = {}
    for item in items:
        found[item] = found.get(item, 0) + 1
    return found
