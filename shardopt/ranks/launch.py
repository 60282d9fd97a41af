"""Starting the ranks of a bench run, listening to them, and telling which one broke and why."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from predictor.errors import ShardoptError
from shardopt.bench.job import Job
from shardopt.ranks.hosts import hosts_of

PACKAGES = Path(__file__).resolve().parents[2]
"""Where the three packages lie; the ranks are started from there."""
GRACE_S = 5.0
"""How long the others have to notice that a rank died, and to say so."""
POLL_S = 0.2
LOG_LINES = 3

Processes = Sequence["subprocess.Popen[bytes]"]


class RankDiedError(ShardoptError):
    """A rank ended the bench; the text is its own error."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_ranks(
    job: Job,
    tell: Callable[[dict[str, Any]], None],
    started: Callable[[list[int]], None] = lambda pids: None,
) -> None:
    """One process a rank on this machine, until all are done; none is left behind.

    Args:
        tell: called with each message of rank 0 (see `worker.run_rank`).
        started: told the ranks' process ids.

    Raises:
        RankDiedError: a rank failed; what was told before stands.
    """
    with (
        hosts_of(job.link) as hosts,
        tempfile.TemporaryDirectory(prefix="shardopt-bench-") as name,
    ):
        folder = Path(name)
        (folder / "job.pickle").write_bytes(pickle.dumps((job, hosts)))
        reader, writer = os.pipe()
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(job.world_size):
                processes.append(_start(job, folder, rank, writer if rank == 0 else None))
            os.close(writer)
            started([process.pid for process in processes])
            _listen(reader, processes, tell)
            _join(processes)
            codes = [process.poll() for process in processes]
            if any(codes):
                raise _blame(folder, codes)
        finally:
            os.close(reader)
            for process in processes:
                process.kill()
                process.wait()


def _start(job: Job, folder: Path, rank: int, pipe: int | None) -> subprocess.Popen[bytes]:
    local = job.local_world_size
    path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "RANK": str(rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": "1",
    }
    words = [str(folder), str(rank), *([] if pipe is None else [str(pipe)])]
    with (folder / f"log.{rank}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", "-m", "shardopt.bench.worker", *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[] if pipe is None else [pipe],
            # an interrupt is for the parent, which keeps what is finished and ends the ranks
            start_new_session=True,
        )


def _listen(reader: int, processes: Processes, tell: Callable[[dict[str, Any]], None]) -> None:
    """Pass on messages until rank 0 closes the pipe or a rank has died."""
    held = b""
    ends: float | None = None
    while ends is None or time.monotonic() < ends:
        if select.select([reader], [], [], POLL_S)[0]:
            read = os.read(reader, 1 << 20)
            if not read:
                return
            *lines, held = (held + read).split(b"\n")
            for line in lines:
                tell(json.loads(line))
        elif ends is None and any(process.poll() for process in processes):
            ends = time.monotonic() + GRACE_S


def _join(processes: Processes) -> None:
    """Wait for the end of all, but not for those who wait for a dead one."""
    ends = time.monotonic() + GRACE_S
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, ends - time.monotonic()))


def _blame(folder: Path, codes: Sequence[int | None]) -> RankDiedError:
    """The rank that broke first: the others only lost their connection to it."""
    errors: dict[int, dict[str, Any]] = {}
    for rank in range(len(codes)):
        with suppress(OSError, ValueError):
            errors[rank] = json.loads((folder / f"error.{rank}").read_text(encoding="utf-8"))
    killed = [r for r, code in enumerate(codes) if code and r not in errors]
    if killed:
        return RankDiedError(_killed_words(folder, killed[0], codes[killed[0]] or 0))
    rank = min(errors, key=lambda r: errors[r]["at"], default=0)
    error = errors.get(rank)
    if error is None:
        return RankDiedError("a rank ended too early and left no word")
    if error["own"]:
        return RankDiedError(error["message"], error["exit_code"])
    return RankDiedError(died_words(rank, error))


def died_words(rank: int, error: Mapping[str, Any]) -> str:
    """An error that `worker.described` has described, in a line."""
    lines = error["message"].strip().splitlines() or [""]
    return f"rank {rank} died of {error['type']} at {error['where']}: {lines[0]}"


def _killed_words(folder: Path, rank: int, code: int) -> str:
    how = f"with exit code {code}"
    if code < 0:
        with suppress(ValueError):
            how = f"of signal {signal.Signals(-code).name}"
    hint = " (the system may have run out of memory)" if code == -signal.SIGKILL else ""
    with suppress(OSError):
        log = (folder / f"log.{rank}").read_text(encoding="utf-8", errors="replace")
        last = [line.strip() for line in log.splitlines() if line.strip()][-LOG_LINES:]
        if last:
            return f"rank {rank} died {how}{hint}; its last words: {' / '.join(last)}"
    return f"rank {rank} died {how}{hint}"
