"""Refusing values of flags that are out of range."""

from __future__ import annotations

from predictor.errors import InputError
from search.stop import Stop

MAX_SEED = 2**31 - 1
MAX_TOP_K = 1000


def check_number(flag: str, value: float, low: int, high: int) -> None:
    """Refuse a value outside ``low`` to ``high``."""
    if not low <= value <= high:
        raise InputError(f"{flag} is {value}; it must be at least {low} and at most {high}")


def check_search(seed: int, effort: float, time_limit: float | None, top_k: int) -> None:
    """Refuse values of the search flags outside their range."""
    check_number("--seed", seed, 0, MAX_SEED)
    Stop(effort, time_limit)
    check_number("--top-k", top_k, 1, MAX_TOP_K)
