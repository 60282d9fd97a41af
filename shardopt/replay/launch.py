"""Starts the ranks of a generated benchmark and collects what they report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from predictor.errors import InputError, ShardoptError
from shardopt.replay.write import MAIN, SCHEMA

GRACE_S = 5.0
"""How long the others have once a rank has died."""
POLL_S = 0.1
MAX_TRIES = 8
"""Starts of a benchmark, each without one more op that ends the process."""
LOG_LINES = 3
DEADLY = (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGBUS)
"""Signals by which an op ends its process."""
LOST = 3
"""Exit code of a rank that may have failed because another did (`runtime/checks.py`)."""
NOISE = re.compile(r"^(?:\[rank\d+\]:)?\[W|^USDT:|^frame #")
"""Lines of a log that are no error: torch's warnings, and its stack traces."""

Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Died:
    """Why a benchmark ended.

    Args:
        op: the one that ended its process; empty: none did, or it is not known.
        message: what to say.
    """

    op: str
    message: str


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
    world = data.get("world_size")
    if type(world) is not int or world < 1:
        raise InputError(f"{path}: `world_size` must be a whole number from 1, not {world!r:.40}")
    if not (folder / MAIN).is_file():
        raise InputError(f"{folder}: has no {MAIN}; generate the benchmark again")
    return data


def replay(folder: Path, words: Sequence[str] = (), ranks: int | None = None) -> dict[str, Any]:
    """Run a benchmark, one process a rank on this machine; none is left behind.

    An op that ends a process is left out, and the benchmark is started again without it.

    Args:
        words: options of `runtime/settings.py`.
        ranks: as many as the traced job had unless given.

    Raises:
        InputError: no benchmark, options that it refuses, or no place for temporary files.
        ReplayError: a rank died.
    """
    data = check_benchmark(folder)
    count = int(data["world_size"]) if ranks is None else ranks
    without: list[str] = []
    while True:
        asked = [*words, *(word for name in without for word in ("--without", name))]
        with _place() as place:
            died = _run(folder, place, asked, count)
            if died is None:
                return _result(place)
        if not died.op or died.op.startswith("c10d::") or died.op in without:
            raise ReplayError(died.message)
        if len(without) >= MAX_TRIES:
            raise ReplayError(f"{died.message}; {MAX_TRIES} ops before it did so too")
        without.append(died.op)


def replay_rank(folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """Run rank 0 of a job that torchrun started in this process's place.

    Raises:
        InputError: no place for temporary files.
        ReplayError: it died.
    """
    with _place() as place:
        process = _start(folder, place, words, 0, dict(os.environ))
        died = _wait_for(place, [process])
        if died is not None:
            raise ReplayError(died.message)
        return _result(place)


def become_rank(folder: Path, words: Sequence[str]) -> NoReturn:
    """Go on as the rank that torchrun started this process for."""
    program = str(folder / MAIN)
    os.execv(sys.executable, [sys.executable, program, *words])


@contextmanager
def _place() -> Iterator[Path]:
    try:
        folder = tempfile.TemporaryDirectory(prefix="shardopt-replay-", ignore_cleanup_errors=True)
    except OSError as error:
        raise InputError(
            f"no place for temporary files: {error.strerror or error}; set TMPDIR to a folder that "
            "can be written"
        ) from None
    with folder as name:
        yield Path(name)


def _result(place: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads((place / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReplayError(f"rank 0 left no result in {place.parent}: {error}") from None
    return result


def _run(folder: Path, place: Path, words: Sequence[str], ranks: int) -> Died | None:
    """None once all ranks are done."""
    processes: list[Process] = []
    try:
        for rank in range(ranks):
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
            processes.append(_start(folder, place, words, rank, environment))
        return _wait_for(place, processes)
    except OSError as error:
        raise InputError(f"the ranks cannot be started: {error}") from None
    finally:
        _end(processes)


def _wait_for(place: Path, processes: Sequence[Process]) -> Died | None:
    """Until all are done, or one has died and the others had time to say so."""
    try:
        ends: float | None = None
        first: list[int] = []
        while any(process.poll() is None for process in processes):
            if ends is None and any(process.poll() for process in processes):
                first = [rank for rank, process in enumerate(processes) if process.poll()]
                ends = time.monotonic() + GRACE_S
            if ends is not None and time.monotonic() > ends:
                break
            time.sleep(POLL_S)
        codes = [process.poll() for process in processes]
    finally:
        _end(processes)
    if not any(codes) and None not in codes:
        return None
    return _blame(place, codes, first)


def _end(processes: Sequence[Process]) -> None:
    for process in processes:
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _start(
    folder: Path, place: Path, words: Sequence[str], rank: int, environment: dict[str, str]
) -> Process:
    command = [sys.executable, str(folder / MAIN), *words, "--last-op", str(place / f"op.{rank}")]
    if rank == 0:
        command += ["--result", str(place / "result.json")]
    with (place / f"log.{rank}").open("wb") as log:
        # a rank ends when its input is closed, thus with this process, however that ends; an
        # interrupt is for this process, which ends the ranks
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _blame(place: Path, codes: Sequence[int | None], first: Sequence[int]) -> Died:
    """The rank that broke first: a signal or its own error tells more than a lost connection.

    Args:
        first: the ranks that were seen dead before all others.
    """
    failed = [rank for rank, code in enumerate(codes) if code]

    def order(rank: int) -> tuple[bool, bool, bool]:
        code = codes[rank] or 0
        return code >= 0, code == LOST, rank not in first

    if not failed:
        return Died("", "a rank of the benchmark did not end")
    rank = min(failed, key=order)
    code = codes[rank] or 0
    words = _last_words(place / f"log.{rank}")
    if code >= 0:
        return Died("", words or f"rank {rank} of the benchmark ended with exit code {code}")
    op = ""
    if -code in DEADLY:
        with suppress(OSError):
            op = (place / f"op.{rank}").read_text(encoding="utf-8")
    name = f"{-code}"
    with suppress(ValueError):
        name = signal.Signals(-code).name
    hint = " (the system may have run out of memory)" if -code == signal.SIGKILL else ""
    where = f" in {op}" if op else ""
    said = f": {words}" if words else ""
    return Died(op, f"rank {rank} of the benchmark died of signal {name}{where}{hint}{said}")


def _last_words(path: Path) -> str:
    with suppress(OSError):
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        lines = [line for line in lines if not NOISE.search(line)]
        return " / ".join(lines[-LOG_LINES:])
    return ""
