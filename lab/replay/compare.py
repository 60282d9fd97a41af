"""Models and their generated benchmarks, timed side by side in rounds.

Steps of a model and of its benchmark alternate in the same processes. The work folder has a folder
for each model, with its benchmark and a file for each round, so a later run continues there.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from lab.replay.models import needs_group, ranks_of
from lab.suites import Summary
from shardopt.files import atomic_write_text
from shardopt.measure.machine import Usage, other_cores, usage
from shardopt.ranks.launch import run_ranks
from shardopt.ranks.rank import Rank, Report, available_cores, join_group
from shardopt.ranks.rank import prepare as prepare_rank
from shardopt.ranks.realtime import hasten_gloo, hasten_thread

WARM_UP = 6
TURNS = 4
BLOCK = 4
"""Steps that count, after one with the caches full of the other's tensors."""


def capture(name: str, folder: Path) -> None:
    """Generate a model's benchmark into ``folder/benchmark``.

    Raises:
        RankDiedError: a rank failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run_ranks(_capture, ranks_of(name), name, folder)


def measure(name: str, folder: Path) -> list[dict[str, Any]]:
    """Time a model and its benchmark.

    Args:
        folder: folder that `capture` wrote into.

    Returns:
        For each rank ``replay_ms`` and ``original_ms`` (steps), the ``coverage`` of the replay, and
        the ``usage`` of the machine before and after.

    Raises:
        RankDiedError: a rank failed.
    """
    reports: dict[int, dict[str, Any]] = {}
    run_ranks(_measure, ranks_of(name), name, folder / "benchmark", on_report=reports.__setitem__)
    return [reports[rank] for rank in sorted(reports)]


MOST_FAVOURED = -20
"""Nice value whose share no normal process can exceed."""


def _prepare(rank: Rank, name: str) -> None:
    """Pin and prioritise the rank, and join its group if the model needs one."""
    cores = available_cores()
    if hasattr(os, "sched_setaffinity"):
        # counted from the last one, which takes fewer interrupts
        os.sched_setaffinity(0, {cores[(rank.local - rank.local_size) % len(cores)]})
    prepare_rank(rank)
    hasten_main(rank.world_size)
    if needs_group(name):
        join_group(rank)


def hasten_main(ranks: int) -> None:
    """Prioritise the calling thread over other processes, where that is permitted.

    It is real-time as the only rank. With several ranks it must stay below gloo's real-time
    threads, so it only gets the largest share among normal ones, as do threads it starts later.
    """
    if ranks > 1:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, MOST_FAVOURED)
    elif hasattr(os, "SCHED_FIFO"):
        hasten_thread(threading.get_native_id())


def _barrier() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def _capture(rank: Rank, report: Report, name: str, folder: Path) -> None:
    """Trace a step of the model on every rank, and generate its benchmark."""
    _prepare(rank, name)
    from lab.replay.originals import original
    from shardopt.replay.generate import generate
    from shardopt.replay.runtime.capture import capture as capture_step

    step = original(name, rank.index)
    traces = folder / "traces"
    for _ in range(WARM_UP):
        step()
    capture_step(step, traces, rank.index)
    _barrier()
    if rank.index == 0:
        generate([traces], folder / "benchmark")
    _barrier()


def _measure(rank: Rank, report: Report, name: str, benchmark: Path) -> None:
    _prepare(rank, name)
    from lab.replay.originals import original

    report(_times(original(name, rank.index), benchmark))


def _times(step: Callable[[], None], benchmark: Path) -> dict[str, Any]:
    import torch

    replay = _replay(benchmark)
    with torch.no_grad():
        replay.try_ops()
        for _ in range(WARM_UP):
            replay.step()
    for _ in range(WARM_UP):
        step()
    gc.collect()
    gc.disable()
    original_ms, replay_ms = [], []
    _barrier()
    before = usage()
    for at in range(TURNS):
        for which in ("original", "replay") if at % 2 else ("replay", "original"):
            if which == "original":
                original_ms += _block(step)
            else:
                with torch.no_grad():
                    replay_ms += _block(replay.step)
    _barrier()
    after = usage()
    return {
        "replay_ms": replay_ms,
        "original_ms": original_ms,
        "coverage": replay.coverage(),
        "usage": [asdict(before), asdict(after)],
    }


def _replay(place: Path) -> Any:
    """Load the generated benchmark into this process."""
    sys.path.insert(0, str(place))
    sys.argv = [str(place / "benchmark.py")]
    import torch
    import torch.distributed as dist

    runtime = importlib.import_module("runtime.run")
    mine = runtime.own_data()
    program = importlib.import_module(Path(mine["program"]).stem)
    with torch.no_grad():
        if dist.is_initialized():
            collectives = importlib.import_module("runtime.collectives")
            device = importlib.import_module("runtime.settings").device
            program.ops.collectives = collectives.Collectives(mine["groups"], device)
            program.ops.collectives.start()
        replay = runtime.Replay(program.ITERATION, program.ops, mine)
        replay.make_tensors()
        return replay


def _block(step: Callable[[], None]) -> list[float]:
    _barrier()
    hasten_gloo()
    step()
    spans = []
    for _ in range(BLOCK):
        start = time.perf_counter_ns()
        step()
        spans.append(round((time.perf_counter_ns() - start) / 1e6, 4))
    return spans


DONE = "done"
"""File that marks a benchmark as complete."""
TRIES = 3
"""Most tries of a round that other work disturbs."""
MOST_OTHER_CORES = 0.1
"""Ranks wait for each other, and cores may share a processor: other work slows one on any core."""

Round = list[dict[str, Any]]
"""Result of `measure` for each rank."""


def prepare(names: Sequence[str], work: Path) -> Iterator[str]:
    """Generate the missing benchmarks; yield the name of each when it is done.

    Raises:
        ShardoptError: a model cannot be captured here.
    """
    for name in names:
        folder = folder_of(work, name)
        if not (folder / DONE).exists():
            # an interrupted run may have left half a benchmark
            shutil.rmtree(folder, ignore_errors=True)
            capture(name, folder)
            shutil.rmtree(folder / "traces")
            (folder / DONE).touch()
        yield name


def time_rounds(names: Sequence[str], work: Path, rounds: int) -> Iterator[tuple[str, int]]:
    """Time each benchmark in every missing round; yield each name and round.

    Raises:
        ShardoptError: a rank failed.
    """
    for number in range(rounds):
        # a machine drifts within minutes
        for name in random.Random(number).sample(list(names), len(names)):
            path = folder_of(work, name) / f"round-{number}.json"
            if not path.exists():
                tried: list[Round] = []
                while not tried or (len(tried) < TRIES and _is_disturbed(tried[-1])):
                    tried.append(measure(name, folder_of(work, name)))
                atomic_write_text(path, json.dumps(min(tried, key=_others)))
                yield name, number


def _is_disturbed(ranks: Round) -> bool:
    return _others(ranks) > MOST_OTHER_CORES


def _others(ranks: Round) -> float:
    """Return the mean number of cores with other work; 0 where the system does not report it."""
    spans = [[Usage(**sample) for sample in rank["usage"]] for rank in ranks]
    own_s = sum(after.own_s - before.own_s for before, after in spans)
    first, last = spans[0]
    return other_cores(first, last, own_s) or 0.0


def side_by_side(names: Sequence[str], work: Path) -> list[dict[str, Any]]:
    """Return the rows of the models that were timed against their benchmarks."""
    timed = [(name, _rounds(name, work)) for name in names]
    return [_row(name, rounds) for name, rounds in timed if rounds]


def _row(name: str, rounds: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    original, replay = (
        [_slowest(each, which) for each in rounds] for which in ("original_ms", "replay_ms")
    )
    every = [rank["coverage"] for rank in rounds[0]]
    ops, total = every[0]["total"], sum(coverage["total_us"] for coverage in every)
    ratios = [b / a for a, b in zip(original, replay, strict=True)]
    return {
        "model": name,
        "ranks": len(every),
        "original_ms": median(original),
        "replay_ms": median(replay),
        "ratio": median(ratios),
        "original_samples_ms": original,
        "replay_samples_ms": replay,
        "ops": ops,
        "host_us_an_op": round(1e3 * (median(original) - median(replay)) / ops, 3),
        "coverage": sum(coverage["us"] for coverage in every) / total if total else 1.0,
        "not_replayed": every[0]["reasons"],
    }


def _slowest(ranks: Sequence[dict[str, Any]], which: str) -> float:
    return max(median(rank[which]) for rank in ranks)


def _rounds(name: str, work: Path) -> list[Round]:
    """Return the undisturbed rounds, or all if there are none."""
    rounds = [_read(path) for path in sorted(folder_of(work, name).glob("round-*.json"))]
    return [ranks for ranks in rounds if not _is_disturbed(ranks)] or rounds


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def folder_of(work: Path, name: str) -> Path:
    return work / name.replace(" ", "-")


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors of the replays over all models, as fractions."""
    errors = Summary.of_errors([row["ratio"] - 1 for row in rows])
    return {
        "n": errors.n,
        "mape": errors.mape,
        "geomean": errors.geomean,
        "worst": errors.worst,
        "least_coverage": min(row["coverage"] for row in rows),
    }
