"""Starts the ranks of a generated benchmark and collects what they report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from predictor.errors import InputError, ShardoptError
from shardopt.replay.generate import MAIN, SCHEMA

GRACE_S = 5.0
"""How long the others have once a rank has died."""
POLL_S = 0.1
MAX_TRIES = 8
"""Starts of a benchmark, each without one more op that ends the process."""
LOG_LINES = 3


class ReplayError(ShardoptError):
    """A rank of a benchmark failed; the text is its own last words."""


def check_benchmark(folder: Path) -> dict[str, Any]:
    """The data that all ranks of a benchmark share.

    Raises:
        InputError: the folder holds no benchmark that this version can run.
    """
    path = folder / "data.json"
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{folder}: no benchmark (no data.json); make one with `shardopt bench generate`"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise InputError(f"{path}: not a benchmark of schema {SCHEMA}; generate it again")
    if not (folder / MAIN).is_file():
        raise InputError(f"{folder}: has no {MAIN}; generate the benchmark again")
    return data


def replay(folder: Path, words: Sequence[str] = (), ranks: int | None = None) -> dict[str, Any]:
    """Run a benchmark, one process a rank on this machine.

    An op that ends a process is left out, and the benchmark is started again without it.

    Args:
        words: options of `runtime.py`.
        ranks: as many as the traced job had unless given.

    Raises:
        InputError: no benchmark, or options that it refuses.
        ReplayError: a rank died.
    """
    data = check_benchmark(folder)
    count = int(data["world_size"]) if ranks is None else ranks
    without: list[str] = []
    while True:
        asked = [*words, *(word for name in without for word in ("--without", name))]
        with tempfile.TemporaryDirectory(prefix="shardopt-replay-") as name:
            died = _run(folder, Path(name), asked, count)
            if died is None:
                result: dict[str, Any] = json.loads((Path(name) / "result.json").read_text())
                return result
        op, message = died
        if not op or op.startswith("c10d::") or op in without or len(without) >= MAX_TRIES:
            raise ReplayError(message)
        without.append(op)


def become_rank(folder: Path, words: Sequence[str]) -> NoReturn:
    """Go on as the rank that torchrun started this process for."""
    program = str(folder / MAIN)
    os.execv(sys.executable, [sys.executable, program, *words])


def _run(folder: Path, place: Path, words: Sequence[str], ranks: int) -> tuple[str, str] | None:
    """None once all ranks are done; else the op that ended one, if any, and what to say."""
    processes = [_start(folder, place, words, rank, ranks) for rank in range(ranks)]
    try:
        ends: float | None = None
        while any(process.poll() is None for process in processes):
            if ends is None and any(process.poll() for process in processes):
                ends = time.monotonic() + GRACE_S
            if ends is not None and time.monotonic() > ends:
                break
            time.sleep(POLL_S)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if not any(codes) and None not in codes:
        return None
    return _blame(place, codes)


def _start(
    folder: Path, place: Path, words: Sequence[str], rank: int, ranks: int
) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "BENCHMARK_STORE": str(place / "store"),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(folder / MAIN), *words, "--last-op", str(place / f"op.{rank}")]
    if rank == 0:
        command += ["--result", str(place / "result.json")]
    with (place / f"log.{rank}").open("wb") as log:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def _blame(place: Path, codes: Sequence[int | None]) -> tuple[str, str]:
    """A rank that a signal ended comes first: the others only lost their connection to it."""
    killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
    failed = killed or [rank for rank, code in enumerate(codes) if code]
    rank = failed[0] if failed else 0
    code = codes[rank]
    words = _last_words(place / f"log.{rank}")
    if code is None or code >= 0:
        return "", words or f"rank {rank} of the benchmark ended with exit code {code}"
    op = ""
    if -code in (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGBUS):
        with suppress(OSError):
            op = (place / f"op.{rank}").read_text(encoding="utf-8")
    hint = " (the system may have run out of memory)" if -code == signal.SIGKILL else ""
    where = f" in {op}" if op else ""
    return op, f"rank {rank} of the benchmark died of signal {-code}{where}{hint}: {words}"


def _last_words(path: Path) -> str:
    with suppress(OSError):
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " / ".join(lines[-LOG_LINES:])
    return ""
