"""Parametrisations of which a few values show the behaviour and the others are slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick_first(count: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of a test, tuples for several names; those after the first ``count`` are slow."""
    return [_param(value, number < count) for number, value in enumerate(values)]


def quick_only(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of a test; those that are not in ``quick`` are slow."""
    quick, values = list(quick), list(values)
    assert all(value in values for value in quick), "a quick value is none of the values"
    return [_param(value, value in quick) for value in values]


def _param(value: Any, quick: bool) -> Any:
    parts = value if isinstance(value, tuple) else (value,)
    return pytest.param(*parts, marks=() if quick else pytest.mark.slow)
