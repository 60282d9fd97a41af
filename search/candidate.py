"""Candidate plans with predicted times, ranked, without repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from search.objective import Assignment
from search.space.option import ChoicesInUse, Option


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
    signatures: set[bytes] = set()
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


@lru_cache(maxsize=1 << 12)
def signature(assignment: Assignment) -> bytes:
    """Return a key that ignores the names of ranks and the order of equal shards of a table.

    Every rank is the sum of the hashes of its shards; ranks are sorted.
    """
    ranks = np.fromiter(chain.from_iterable(ranks for _, ranks in assignment), dtype=np.intp)
    on_rank = np.zeros(int(ranks.max()) + 1, dtype=np.uint64)
    np.add.at(on_rank, ranks, np.concatenate([_shard_hashes(option) for option, _ in assignment]))
    return np.sort(on_rank[on_rank != 0]).tobytes()


@lru_cache(maxsize=1 << 16)
def _shard_hashes(option: Option) -> NDArray[np.uint64]:
    """Return the hash of every shard of an option, ``[shards]``; equal shards have the same."""
    kind = (*option.way[:2], option.cache_load_factor, option.table)
    return np.array([hash((*kind, size)) for size in option.sizes]).astype(np.uint64)
