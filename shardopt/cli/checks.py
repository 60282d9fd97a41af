"""Refusing values of flags that are out of range."""

from __future__ import annotations

from search.stop import Stop
from shardopt.api.request import MAX_SEED, MAX_TOP_K, check_number


def check_search(seed: int, effort: float, time_limit: float | None, top_k: int) -> None:
    """Refuse values of the search flags outside their range."""
    check_number("--seed", seed, 0, MAX_SEED)
    Stop(effort, time_limit)
    check_number("--top-k", top_k, 1, MAX_TOP_K)
