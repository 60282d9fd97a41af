"""Ranks whose processes a test may kill; without TorchRec none of these tests is collected."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from shardopt.ranks import launch

collect_ignore_glob = [] if find_spec("torchrec") else ["*.py"]


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes of the ranks that are started, in their order."""
    started: list[int] = []
    start = launch._start

    def noted(command: launch.Command, log: Path) -> launch._Started:
        rank = start(command, log)
        started.append(rank.process.pid)
        return rank

    monkeypatch.setattr(launch, "_start", noted)
    return started
