"""Starts a worker of this folder as two gloo ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 120


def run_ranks(worker: str, *words: object) -> None:
    """Run the worker on both ranks until they end; what they say is shown if one fails."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name(worker))]
    ranks = [
        subprocess.Popen(
            [*command, *map(str, words)],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=TIMEOUT_S)[0].decode(errors="replace") for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
