"""Hostile input through the commands: an exit code of the contract, no traceback, little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick import quick_first
from tests.shardopt.cli.fuzz import FAMILIES

EACH = 2000
"""Inputs of a family: 10,000 in all."""
MOST_BYTES = 10**9


def fuzz(family: str, first: int, count: int, folder: Path) -> None:
    words = [sys.executable, "-m", "tests.shardopt.cli.fuzz", family, str(first), str(count)]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [*words, str(folder / "x")], capture_output=True, text=True, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert sum(found["codes"].values()) == count
    assert found["most_bytes"] < MOST_BYTES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_few_inputs(family: str, tmp_path: Path) -> None:
    fuzz(family, 0, 8, tmp_path)


@pytest.mark.parametrize("seed", quick_first(1, [1734, 2666]))
def test_inputs_that_once_failed(seed: int, tmp_path: Path) -> None:
    """Collectives of tensors of a type that there is not."""
    fuzz("traces", seed, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_inputs(family: str, tmp_path: Path) -> None:
    fuzz(family, 1000, EACH, tmp_path)
