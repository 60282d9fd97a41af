"""Hostile input through the commands: an exit code of the contract, no traceback, little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick import SEED
from tests.shardopt.cli.fuzz import ALLOWED, FAMILIES, STARTS_PROCESSES, attempt

MANY = {
    **dict.fromkeys(FAMILIES, 1000),
    **{"plan_fields": 2000, "traces": 1500, "profiles": 900, "storages": 60, "confirms": 100},
}
"""Inputs of a family; those of a storage and of a confirmation take a search each."""
BATCH = 500
BATCHES = [
    (family, first, min(BATCH, count - first))
    for family, count in MANY.items()
    for first in range(0, count, BATCH)
]
MOST_BYTES = 10**9
FEW = {**dict.fromkeys(FAMILIES, 8), "models": 40, "traces": 20, "storages": 1, "confirms": 2}
"""Inputs of a family in the check."""
FAILED_ONCE = {"traces": (1734, 2666), "learned": (1366, 1714)}
"""Seeds: collectives of tensors of a type that there is not; errors of 10**59."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_few_inputs(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in STARTS_PROCESSES:  # what a family puts in their place ends with the test
        monkeypatch.setattr(module, name, getattr(module, name))
    for seed in (*range(FEW[family]), *FAILED_ONCE.get(family, ())):
        code, problem = attempt(FAMILIES[family], seed, tmp_path / "x")
        assert (problem, code in ALLOWED) == ("", True)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "first", "count"), BATCHES)
def test_many_inputs(family: str, first: int, count: int, tmp_path: Path) -> None:
    """In a process of its own, whose memory is measured; each batch has the time of a slow test."""
    root = Path(__file__).parents[3]
    words = (tmp_path / "x", family, 1000 + 10_000 * SEED + first, count)
    done = subprocess.run(
        [sys.executable, "-m", "tests.shardopt.cli.fuzz", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=root,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["wrong"] == []
    assert sum(summary["codes"].values()) == count
    assert summary["most_bytes"] < MOST_BYTES
