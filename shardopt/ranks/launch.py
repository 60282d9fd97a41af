"""Starts ranks, one process each, passes on their reports, and says which one broke and why.

`run_ranks` runs a Python function in every rank; `run_commands` runs programs that know nothing of
shardopt. No rank outlives the process that started it, however that ends.

"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from predictor.errors import InputError
from shardopt.ranks.hosts import Link, shaped_hosts
from shardopt.ranks.rank import Rank, RankDiedError, death_line, errors_of
from shardopt.ranks.scratch import scratch_folder
from shardopt.ranks.worker import JOB

PACKAGES = Path(__file__).resolve().parents[2]
"""Folder of the three packages, from which ranks import them."""
GRACE_S = 5.0
"""Time in s for the other ranks to end, or to say what is wrong, once a rank has died."""
POLL_S = 0.2
START_S = 300.0
"""Least time in s that ranks may import, join and build before their first report: on a loaded
machine that takes minutes, however short a silence is allowed later."""
SAMPLE_S = 1.0
STATES = {"T": "is stopped by a signal", "t": "is stopped by a debugger", "D": "waits for a device"}
"""State of a process in /proc/PID/stat that shows why it does not answer (man 5 proc)."""
LOG_LINES = 3
LOST = 3
"""Exit code by which a generated benchmark says that another rank may be the cause."""
NOISE = re.compile(r"^(?:\[rank\d+\]:)?\[W|^USDT:|^frame #")
"""Lines of a log that are no error: torch's warnings and its stack traces."""

OnReport = Callable[[int, Any], None]


@dataclass(frozen=True)
class Command:
    """The program of a rank.

    Args:
        environment: all of it, see `rank_environment`.
        reports: append to the words the number of a pipe for `multiprocessing.Connection.send`.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    reports: bool = False


@dataclass(frozen=True)
class _Started:
    process: subprocess.Popen[bytes]
    reader: Connection


def _ignore(*_: object) -> None:
    pass


def run_ranks(
    body: Callable[..., None],
    count: int,
    *arguments: object,
    join: Rank | None = None,
    local_world_size: int | None = None,
    link: Link | None = None,
    on_report: OnReport = _ignore,
    silence_s: float | None = None,
) -> None:
    """Run a function in `count` ranks until it is done: processes on this machine that are started
    for it, or those that torchrun has started, of which this is one.

    Args:
        body: called as ``body(rank, report, *arguments)`` in every process, with its
            `shardopt.ranks.rank.Rank` and a function that sends something to ``on_report``.
            It and its arguments must be picklable.
        join: the rank of torchrun that this process is; None to start all ranks. What follows is
            for ranks that are started.
        local_world_size: ranks that count as one host; all of them if None.
        link: puts every rank on a separate host, joined by such a link.
        on_report: called with the rank and what it reported, in order.
        silence_s: without any report for so long, the ranks count as hung; they may take
            `START_S` to the first.

    Raises:
        RankDiedError: a rank failed; what was reported before has been passed on.
        InputError: no folder for temporary files, or the link cannot be made.
    """
    if join is not None:
        with errors_of(join):
            body(join, partial(on_report, join.index), *arguments)
        return
    with ExitStack() as stack:
        # without a link ranks stay where they are started
        hosts = [] if link is None else stack.enter_context(shaped_hosts(link))
        folder = stack.enter_context(scratch_folder())
        (folder / JOB).write_bytes(pickle.dumps((body, arguments, count, hosts)))
        python = [sys.executable, "-P", "-W", "ignore", "-m", "shardopt.ranks.worker"]
        commands = [
            Command(
                [*python, str(folder), str(index)],
                {**rank_environment(index, count, local_world_size), "PYTHONPATH": python_path()},
                reports=True,
            )
            for index in range(count)
        ]
        run_commands(commands, folder, on_report, silence_s)


def python_path() -> str:
    """PYTHONPATH of a process that imports these three packages, wherever it is started."""
    return os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))


def rank_environment(
    index: int, world_size: int, local_world_size: int | None = None
) -> dict[str, str]:
    """This process's environment with what torchrun would set for a rank."""
    local = local_world_size or world_size
    return {
        **os.environ,
        "RANK": str(index),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(index % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": "1",
    }


def run_commands(
    commands: Sequence[Command],
    folder: Path,
    on_report: OnReport = _ignore,
    silence_s: float | None = None,
) -> None:
    """Run the programs of all ranks until they are done; see `run_ranks`.

    Args:
        folder: gets ``log.RANK``, what a rank writes; a rank may leave its error, see
            `shardopt.ranks.rank.error_facts`, in ``error.RANK``.
    """
    ranks: list[_Started] = []
    try:
        for index, command in enumerate(commands):
            ranks.append(_start(command, folder / f"log.{index}"))
        failed = _watch(ranks, on_report, silence_s, folder)
    finally:
        _end(ranks)
    if failed:
        raise _cause(folder, failed)


def _start(command: Command, log: Path) -> _Started:
    reader, writer = os.pipe()
    try:
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [*command.words, *([str(writer)] if command.reports else [])],
                env=dict(command.environment),
                # a rank ends when its input is closed, thus with this process, however that ends
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                # a program that does not report closes it by ending
                pass_fds=[writer],
                # an interrupt is for this process, which keeps what is finished and ends the ranks
                start_new_session=True,
            )
    except OSError as error:
        os.close(reader)
        raise InputError(f"the ranks cannot be started: {error}") from None
    finally:
        os.close(writer)
    return _Started(process, Connection(reader, writable=False))


def _watch(
    ranks: Sequence[_Started], on_report: OnReport, silence_s: float | None, folder: Path
) -> dict[int, tuple[int, float]]:
    """Pass on reports until all ranks have ended; ranks that failed -> exit code, and when."""
    pipes = {rank.reader: index for index, rank in enumerate(ranks)}
    failed: dict[int, tuple[int, float]] = {}
    heard, began, ends = time.monotonic(), False, math.inf
    while True:
        # before the pipes are read: what a rank sent before it ended is in them by then
        codes = [rank.process.poll() for rank in ranks]
        for index, code in enumerate(codes):
            if code and index not in failed:
                failed[index] = code, time.time()
        alive = None in codes
        ready = wait(list(pipes), POLL_S if alive else 0.0)
        for pipe in ready:
            assert isinstance(pipe, Connection)
            heard = time.monotonic()
            try:
                report = pipe.recv()
            except (EOFError, OSError):
                del pipes[pipe]
            else:
                began = True
                on_report(pipes[pipe], report)
        now = time.monotonic()
        if failed or not pipes:
            ends = min(ends, now + GRACE_S)
        if (not ready and not alive) or now > ends:
            return failed
        patience = math.inf if silence_s is None else max(silence_s, 0.0 if began else START_S)
        if now - heard > patience:
            raise _hung([rank.process.pid for rank in ranks], now - heard, began, folder)


def _hung(pids: Sequence[int], silence_s: float, began: bool, folder: Path) -> RankDiedError:
    """Return the error of ranks that were all silent for ``silence_s``. It says what each does, as
    one that computes while others wait may hang, and how the log of each ends."""
    before = _stats(pids)
    time.sleep(SAMPLE_S)
    does = []
    for rank, (state, ticks) in _stats(pids).items():
        word = "computes" if ticks > before.get(rank, (state, ticks))[1] else "waits"
        does.append(f"rank {rank} {STATES.get(state, word)}")
    logs = ((rank, _log_end(folder / f"log.{rank}")) for rank in range(len(pids)))
    ends_of_logs = [f"rank {rank}: {log}" for rank, log in logs if log]
    ends = [f"the ends of their logs: {'; '.join(ends_of_logs)}"] if ends_of_logs else []
    problem = "no rank reported anything for" if began else "no rank had begun after"
    return RankDiedError("; ".join([f"{problem} {silence_s:.3g} s", *does, *ends]))


def _stats(pids: Sequence[int]) -> Mapping[int, tuple[str, int]]:
    """Rank -> its state, and processor time so far, as /proc/PID/stat has them."""
    stats = {}
    for rank, pid in enumerate(pids):
        with suppress(OSError):
            text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
            fields = text.rpartition(")")[2].split()
            stats[rank] = fields[0], int(fields[11]) + int(fields[12])
    return stats


def _end(ranks: Sequence[_Started]) -> None:
    for rank in ranks:
        rank.process.kill()
        rank.process.wait()
        if rank.process.stdin is not None:
            rank.process.stdin.close()
        rank.reader.close()


def _cause(folder: Path, failed: Mapping[int, tuple[int, float]]) -> RankDiedError:
    """The failure of the rank that broke first: others may only have lost their connection to it.

    Args:
        failed: rank -> exit code, and when it was seen.
    """
    errors: dict[int, dict[str, Any]] = {}
    for rank in failed:
        with suppress(OSError, ValueError):
            errors[rank] = json.loads((folder / f"error.{rank}").read_text(encoding="utf-8"))

    def order(rank: int) -> tuple[bool, bool, bool, float]:
        code, seen_at = failed[rank]
        return rank in errors, code >= 0, code == LOST, errors.get(rank, {"at": seen_at})["at"]

    rank = min(failed, key=order)
    code, log = failed[rank][0], _log_end(folder / f"log.{rank}")
    error = errors.get(rank)
    if error is not None:
        own = error["exit_code"] is not None
        return RankDiedError(
            error["message"] if own else death_line(rank, error),
            error["exit_code"] if own else RankDiedError.exit_code,
            error["inputs"],
            rank=rank,
            log=log,
        )
    number, how = None, f"with exit code {code}"
    if code < 0:
        number, how = -code, f"of signal {-code}"
        with suppress(ValueError):
            how = f"of signal {signal.Signals(-code).name}"
    hint = " (the system may have run out of memory)" if code == -signal.SIGKILL else ""
    end = f"; its log ends with: {log}" if log else ""
    return RankDiedError(f"rank {rank} died {how}{hint}{end}", rank=rank, signal=number, log=log)


def _log_end(path: Path) -> str:
    with suppress(OSError):
        text = path.read_text(encoding="utf-8", errors="replace")
        lines = (line.strip() for line in text.splitlines())
        return " / ".join([line for line in lines if line and not NOISE.search(line)][-LOG_LINES:])
    return ""
