"""``shardopt bench transformers``: training steps of transformers, timed for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from predictor.errors import ShardoptError
from predictor.iteration.op_graph import OpStep
from shardopt.bench.run import environment
from shardopt.bench.transformers.design import calibrations, targets
from shardopt.bench.transformers.files import MACHINE, OPS, TRACES, rounds_done, write_ops
from shardopt.files import atomic_write_text
from shardopt.ranks.launch import PACKAGES
from shardopt.ranks.realtime import permitted

POLL_S = 0.2
LOG_LINES = 3
RANKS = (1, 2)


def run_transformers(
    folder: Path,
    rounds: int,
    ranks: tuple[int, ...] = RANKS,
    told: Callable[[str], None] = lambda text: None,
) -> None:
    """Measure until every number of ranks has its rounds; what is there already stays.

    Args:
        folder: made if it is not there.
        rounds: of each number of ranks.
        told: what is going on, a line at a time.

    Raises:
        ShardoptError: a rank failed; finished rounds are in the folder by then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / OPS).exists():
        told("ops of every shape, without running them")
        write_ops(folder, step_rows())
        about = {"realtime": permitted(), **environment("gloo")}
        atomic_write_text(folder / MACHINE, json.dumps(about, indent=1) + "\n")
    for count in ranks:
        done = rounds_done(folder, count)
        told(f"{count} rank{'' if count == 1 else 's'}: {done} of {rounds} rounds are there")
        if done < rounds:
            _run_ranks(folder, count, rounds)
    if not (folder / TRACES).exists():
        told("traces of a shape of each family")
        _run_traces(folder)


def step_rows() -> dict[str, OpStep]:
    """The ops of every shape that is captured or predicted, none of them run."""
    from shardopt.bench.transformers.ops import op_step, recorded

    shapes = {shape.name: shape for n in RANKS for shape in (*calibrations(n), *targets(n))}
    return {name: op_step(recorded(shape)) for name, shape in shapes.items()}


def _run_traces(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="shardopt-bench-") as scratch:
        process = _python("transformers_trace", [str(folder)], Path(scratch) / "log.0")
        if process.wait():
            raise ShardoptError(_words(Path(scratch), 0, process.returncode))


def _run_ranks(folder: Path, ranks: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="shardopt-bench-") as scratch:
        processes = [_start(folder, Path(scratch), rank, ranks, rounds) for rank in range(ranks)]
        try:
            while any(process.poll() is None for process in processes):
                failed = [rank for rank, process in enumerate(processes) if process.poll()]
                if failed:
                    break
                time.sleep(POLL_S)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, process in enumerate(processes):
            if process.returncode > 0:
                raise ShardoptError(_words(Path(scratch), rank, process.returncode))


def _start(
    folder: Path, scratch: Path, rank: int, ranks: int, rounds: int
) -> subprocess.Popen[bytes]:
    words = [str(folder), str(scratch / "store"), *map(str, (rank, ranks, rounds))]
    return _python("transformers_worker", words, scratch / f"log.{rank}")


def _python(module: str, words: list[str], log: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
    with log.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", f"shardopt.bench.{module}", *words],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            | {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )


def _words(scratch: Path, rank: int, code: int) -> str:
    log = (scratch / f"log.{rank}").read_text(encoding="utf-8", errors="replace")
    last = [line.strip() for line in log.splitlines() if line.strip()][-LOG_LINES:]
    return f"rank {rank} died with exit code {code}; its last words: {' / '.join(last)}"
