"""Parameters of a test that the check runs; the rest is nightly (CONTRIBUTING.md, "Tests")."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

SEED = int(os.environ.get("SHARDOPT_SEED", "0"))
"""Seed of nightly tests, the date as `make test-nightly` gives it."""


def quick_first(count: int, values: Iterable[Any]) -> list[Any]:
    """Keep the first ``count`` values in the check; a value is a tuple if there are many names."""
    return [_param(value, number < count) for number, value in enumerate(values)]


def quick_only(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Keep these values in the check."""
    quick, values = list(quick), list(values)
    assert all(value in values for value in quick), "a quick value is none of the values"
    return [_param(value, value in quick) for value in values]


def seeds(quick: Iterable[int], nightly: int) -> list[Any]:
    """Seeds of the check, then as many nightly ones that change with the date."""
    rotating = (1000 + SEED * 1000 + number for number in range(nightly))
    return [*quick, *(_param(seed, False) for seed in rotating)]


def _param(value: Any, quick: bool) -> Any:
    parts = value if isinstance(value, tuple) else (value,)
    return pytest.param(*parts, marks=() if quick else pytest.mark.slow)
