"""Paths of public measurements: excerpts in the repository, all of them outside it.

``tests/data/README.md`` says what the excerpts are. ``SHARDOPT_DATA`` names the folder of the full
tables and traces; without it they are looked for beside the repository.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXCERPTS = ROOT / "tests" / "data" / "public"
FULL = Path(os.environ.get("SHARDOPT_DATA") or ROOT.parent / "shared" / "data")
TRACES = FULL / "traces"


OF_FULL_DATA = [
    pytest.mark.slow,
    pytest.mark.skipif(not TRACES.is_dir(), reason=f"no public data in {FULL}"),
]
"""Marks of a test of the full tables or traces."""

Test = TypeVar("Test", bound=Callable[..., None])


def needs_public_data(test: Test) -> Test:
    """Decorates a test of the full tables or traces."""
    for mark in OF_FULL_DATA:
        test = mark(test)
    return test


every_table = pytest.mark.parametrize(
    "folder",
    [
        pytest.param(EXCERPTS, id="excerpts"),
        pytest.param(FULL, id="full", marks=OF_FULL_DATA),
    ],
)
"""A claim that holds of the excerpts and of the full tables."""
