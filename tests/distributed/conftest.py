"""Ranks whose processes a test may kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardopt.ranks import launch


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes of the ranks that are started, in their order."""
    found: list[int] = []
    start = launch._start

    def noted(command: launch.Command, log: Path) -> launch._Started:
        rank = start(command, log)
        found.append(rank.process.pid)
        return rank

    monkeypatch.setattr(launch, "_start", noted)
    return found
