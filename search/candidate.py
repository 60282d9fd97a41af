"""Candidate plans with predicted times, ranked, without repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from search.objective import Assignment
from search.space.option import ChoicesInUse


@dataclass(frozen=True)
class Candidate:
    """Plan with its predicted iteration time and the searcher that found it."""

    assignment: Assignment
    iteration_ms: float
    found_by: str


def rank_distinct(
    candidates: Sequence[Candidate], in_use: ChoicesInUse | None = None
) -> list[Candidate]:
    """Sort candidates, best first; drop plans that differ only by a renaming of ranks.

    Times that agree to six digits are ordered by moved tables of the plan in use, then by shards.
    """
    signatures: set[frozenset[object]] = set()
    distinct = []
    for candidate in sorted(candidates, key=lambda c: _rank(c, in_use)):
        name = signature(candidate.assignment)
        if name not in signatures:
            signatures.add(name)
            distinct.append(candidate)
    return distinct


def _rank(candidate: Candidate, in_use: ChoicesInUse | None) -> tuple[float, int, int, float]:
    moves = 0 if in_use is None else len(in_use.moved(candidate.assignment))
    shards = sum(option.num_shards for option, _ in candidate.assignment)
    return float(f"{candidate.iteration_ms:.6g}"), moves, shards, candidate.iteration_ms


@lru_cache(maxsize=64)
def signature(assignment: Assignment) -> frozenset[object]:
    """Return a key that ignores the names of ranks and the order of equal shards of a table."""
    on_rank: dict[int, list[object]] = {}
    for option, ranks in assignment:
        for rank, size in zip(ranks, option.sizes, strict=True):
            shard = (*option.way[:2], option.cache_load_factor, option.table, size)
            on_rank.setdefault(rank, []).append(shard)
    counted = [frozenset(_count(shard).items()) for shard in on_rank.values()]
    return frozenset(_count(counted).items())


def _count(items: Sequence[object]) -> dict[object, int]:
    counts: dict[object, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return counts
