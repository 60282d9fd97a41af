"""Hostile input through the commands: an exit code of the contract, no traceback, little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.shardopt.cli.fuzz import FAMILIES

MANY = {
    **dict.fromkeys(FAMILIES, 1000),
    **{
        "plan_fields": 2000,
        "names": 1500,
        "traces": 1500,
        "profiles": 900,
        "storages": 100,
        "confirms": 100,
    },
}
"""Inputs of a family; those of a storage and of a confirmation take a search each."""
MOST_BYTES = 10**9


FEW = 8
QUICK = {
    **{(family, 0): FEW for family in FAMILIES},
    **{("traces", 1734): 1, ("storages", 0): 1, ("confirms", 0): 2},
}
"""Inputs by family and first seed."""


def fuzz(asked: dict[tuple[str, int], int], folder: Path) -> list[dict[str, Any]]:
    """All in one process, of which starting takes longest."""
    words = [str(word) for (family, seed), count in asked.items() for word in (family, seed, count)]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "tests.shardopt.cli.fuzz", str(folder / "x"), *words],
        capture_output=True,
        text=True,
        cwd=root,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(found: dict[str, Any], count: int) -> None:
    assert found["wrong"] == []
    assert sum(found["codes"].values()) == count
    assert found["most_bytes"] < MOST_BYTES


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    """What came of some inputs of each family."""
    found = fuzz(QUICK, tmp_path_factory.mktemp("few"))
    return dict(zip(QUICK, found, strict=True))


@pytest.mark.parametrize(("family", "seed"), QUICK)
def test_a_few_inputs(few: dict[tuple[str, int], dict[str, Any]], family: str, seed: int) -> None:
    """Seeds above 0 once failed: collectives of tensors of a type that there is not."""
    check(few[family, seed], QUICK[family, seed])


@pytest.mark.slow
def test_another_input_that_once_failed(tmp_path: Path) -> None:
    (found,) = fuzz({("traces", 2666): 1}, tmp_path)
    check(found, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "count"), MANY.items())
def test_many_inputs(family: str, count: int, tmp_path: Path) -> None:
    (found,) = fuzz({(family, 1000): count}, tmp_path)
    check(found, count)
