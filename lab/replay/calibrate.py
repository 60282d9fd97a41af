"""Benchmarks of many models made once, and rounds in which each is timed.

A folder of work holds a folder a model: its benchmark and a file a round, so that a run goes on
where one before it ended.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lab.replay.calls import FIT, TEST, ModelCalls
from lab.replay.side_by_side import capture, measure
from shardopt.files import atomic_write_text
from shardopt.measure.machine import Usage, other_cores
from shardopt.replay.predict import group_calls, list_ranks

LISTED = "listed.json"
TRIES = 3
"""Of a round that other work disturbed."""
MOST_OTHER_CORES = 0.1
"""Ranks wait for each other, and cores may share a processor: other work slows one on any core."""

Round = list[dict[str, Any]]
"""Of each rank what `side_by_side.measure` found."""


def prepare(names: Sequence[str], work: Path) -> Iterator[str]:
    """Generate the benchmarks that are not there yet; gives the name of each as it is done.

    Raises:
        ShardoptError: a model cannot be captured here.
    """
    for name in names:
        folder = folder_of(work, name)
        if not (folder / LISTED).exists():
            # what a run that was ended left behind may be half a benchmark
            shutil.rmtree(folder, ignore_errors=True)
            capture(name, folder)
            shutil.rmtree(folder / "traces")
            atomic_write_text(folder / LISTED, json.dumps(list_ranks(folder / "benchmark")))
        yield name


def time_rounds(names: Sequence[str], work: Path, rounds: int) -> Iterator[tuple[str, int]]:
    """Time each benchmark in every round that is not done; gives what was done.

    Raises:
        ShardoptError: a rank failed.
    """
    for number in range(rounds):
        # a machine drifts within minutes: so calibration models and others run in random order
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
    """Mean number of cores that did other work meanwhile; 0 where the system does not tell."""
    spans = [[Usage(**of) for of in rank["usage"]] for rank in ranks]
    own_s = sum(after.own_s - before.own_s for before, after in spans)
    first, last = spans[0]
    return other_cores(first, last, own_s) or 0.0


def replays(names: Sequence[str], work: Path) -> list[ModelCalls]:
    """Calls of the benchmarks that were timed in some round, with their times."""
    from lab.replay.originals import NAMES

    found = []
    for name in names:
        rounds, lists = _rounds(name, work), _read(folder_of(work, name) / LISTED)
        if rounds:
            ranks = [
                group_calls(of, _medians(each[rank]["calls_us"] for each in rounds))
                for rank, of in enumerate(lists)
            ]
            ms = tuple(_slowest(each, "replay_ms") for each in rounds)
            found.append(ModelCalls(name, TEST if name in NAMES else FIT, ms, tuple(ranks)))
    return found


def side_by_side(names: Sequence[str], work: Path) -> list[dict[str, Any]]:
    """Rows of the models that were timed against their benchmarks in some round."""
    from lab.replay.originals import NAMES

    timed = [(name, _rounds(name, work)) for name in names if name in NAMES]
    return [_row(name, rounds) for name, rounds in timed if rounds]


def _row(name: str, rounds: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    original, replay = (
        [_slowest(each, which) for each in rounds] for which in ("original_ms", "replay_ms")
    )
    every = [rank["coverage"] for rank in rounds[0]]
    ops, total = every[0]["total"], sum(of["total_us"] for of in every)
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
        "coverage": sum(of["us"] for of in every) / total if total else 1.0,
        "not_replayed": every[0]["reasons"],
    }


def _slowest(ranks: Sequence[dict[str, Any]], which: str) -> float:
    return max(median(rank[which]) for rank in ranks)


def _medians(rounds: Iterable[Sequence[float]]) -> list[float]:
    return [median(each) for each in zip(*rounds, strict=True)]


def _rounds(name: str, work: Path) -> list[Round]:
    """Those that nothing disturbed, where there are any."""
    found = [_read(path) for path in sorted(folder_of(work, name).glob("round-*.json"))]
    return [ranks for ranks in found if not _is_disturbed(ranks)] or found


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def folder_of(work: Path, name: str) -> Path:
    """Where a model's files lie."""
    return work / name.replace(" ", "-")
