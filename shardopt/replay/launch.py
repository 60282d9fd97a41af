"""Starts the ranks of a generated benchmark and collects their reports."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from predictor.csv_rows import MOST_RANKS
from predictor.errors import InputError, ShardoptError
from shardopt.ranks.launch import Command, rank_environment, run_commands
from shardopt.ranks.rank import RankDiedError
from shardopt.ranks.scratch import scratch_folder
from shardopt.replay.write import MAIN, SCHEMA

MAX_TRIES = 8
"""Starts of a benchmark, each without one more op that ends the process."""
DEADLY = (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGBUS)
"""Signals by which an op ends its process."""


OnIteration = Callable[[int, int, float], None]


class ReplayError(ShardoptError):
    """A rank of a benchmark failed; the text is its own last words."""


def check_benchmark(folder: Path) -> dict[str, Any]:
    """Read the data that all ranks of a benchmark share.

    Raises:
        InputError: the folder holds no benchmark that this version can run.
    """
    path = folder / "data.json"
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        alone = "a program alone" if (folder / MAIN).is_file() else "no benchmark"
        raise InputError(
            f"{folder}: {alone} (no data.json); generate the benchmark from its trace with "
            "`shardopt bench generate TRACE... -o DIR`, which writes data.json and rank*.json too"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise InputError(f"{path}: not a benchmark of schema {SCHEMA}; generate it again")
    world = data.get("world_size")
    if type(world) is not int or not 1 <= world <= MOST_RANKS:
        raise InputError(
            f"{path}: `world_size` must be a whole number from 1 to {MOST_RANKS}, not {world!r:.40}"
        )
    if not (folder / MAIN).is_file():
        raise InputError(f"{folder}: has no {MAIN}; generate the benchmark again")
    return data


def replay(
    folder: Path,
    words: Sequence[str] = (),
    ranks: int | None = None,
    on_iteration: OnIteration = lambda done, total, left_s: None,
) -> dict[str, Any]:
    """Run a benchmark, one process a rank on this machine; none is left behind.

    An op that ends a process is left out, and the benchmark is started again without it.

    Args:
        words: options of `runtime/settings.py`.
        ranks: number of processes; None: as many as the traced job had.
        on_iteration: called as each iteration begins, with the number done, the total, and the
            seconds left.

    Raises:
        InputError: no benchmark, options that it refuses, or no place for temporary files.
        ReplayError: a rank died.
    """
    data = check_benchmark(folder)
    count = int(data["world_size"]) if ranks is None else ranks
    without: list[str] = []
    while True:
        options = [*words, *(word for name in without for word in ("--without", name))]
        with scratch_folder() as scratch:
            store = {"BENCHMARK_STORE": str(scratch / "store")}
            commands = [
                _command(folder, scratch, options, rank, {**rank_environment(rank, count), **store})
                for rank in range(count)
            ]
            try:
                return _run(commands, scratch, on_iteration)
            except RankDiedError as error:
                op = _deadly_op(scratch, error)
                if not op or op.startswith("c10d::") or op in without:
                    raise ReplayError(_message(error, op)) from None
                if len(without) >= MAX_TRIES:
                    raise ReplayError(
                        f"{_message(error, op)}; {MAX_TRIES} ops before it did so too"
                    ) from None
                without.append(op)


def replay_rank(
    folder: Path, words: Sequence[str], on_iteration: OnIteration = lambda done, total, left_s: None
) -> dict[str, Any]:
    """Run rank 0 of a job that torchrun started in this process's place.

    Raises:
        InputError: no place for temporary files.
        ReplayError: it died.
    """
    with scratch_folder() as scratch:
        try:
            command = _command(folder, scratch, words, 0, os.environ)
            return _run([command], scratch, on_iteration)
        except RankDiedError as error:
            raise ReplayError(_message(error, _deadly_op(scratch, error))) from None


def become_rank(folder: Path, words: Sequence[str]) -> NoReturn:
    """Go on as the rank that torchrun started this process for."""
    program = str(folder / MAIN)
    os.execv(sys.executable, [sys.executable, program, *words])


def _command(
    folder: Path, scratch: Path, words: Sequence[str], rank: int, environment: Mapping[str, str]
) -> Command:
    command = [sys.executable, str(folder / MAIN), *words, "--last-op", str(scratch / f"op.{rank}")]
    if rank == 0:
        command += ["--result", str(scratch / "result.json"), "--report"]
    return Command(command, environment, reports=rank == 0)


def _run(commands: Sequence[Command], scratch: Path, on_iteration: OnIteration) -> dict[str, Any]:
    """Run all ranks and return the result that rank 0 writes."""
    run_commands(commands, scratch, lambda _, report: on_iteration(*report))
    try:
        result: dict[str, Any] = json.loads((scratch / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReplayError(f"rank 0 left no result in {scratch.parent}: {error}") from None
    return result


def _deadly_op(scratch: Path, error: RankDiedError) -> str:
    """Return the op that ended its process; empty if none did, or it is unknown."""
    if error.signal in DEADLY:
        with suppress(OSError):
            return (scratch / f"op.{error.rank}").read_text(encoding="utf-8")
    return ""


def _message(error: RankDiedError, op: str) -> str:
    """Describe the death of a rank, by its own last words if it left any."""
    if error.signal is None and error.log:
        return error.log
    return f"{op} ends the process: {error}" if op else str(error)
