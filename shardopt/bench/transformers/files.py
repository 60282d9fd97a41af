"""What a folder of measured transformers holds: the ops of every shape, and rounds of times."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predictor.cost.cpu_ops import OpRow
from predictor.cost.reuse import BINS
from predictor.csv_rows import read_table
from predictor.errors import InputError
from predictor.iteration.op_graph import CollectiveStart, RankCalls, gradient_sum, training_step
from shardopt.files import atomic_write_text, read_bytes

OPS = "ops.csv"
BUCKETS = "buckets.csv"
MACHINE = "machine.json"
TRACES = "traces.csv"
OPS_COLUMNS = ("shape", "part", "kind", "sizes", "count", "reuse_kib")
TRACE_COLUMNS = ("shape", "ops", "in_execution_trace", "in_kineto")
BUCKET_COLUMNS = ("shape", "bucket", "gradients", "bytes")
ROUND_KEYS = ("round", "other_cores", "steps", "alone", "captured")
KIB = 1024
MOST_OTHER_CORES = 0.2


@dataclass(frozen=True)
class Rounds:
    """Medians over all rounds and steps, by the name of a shape, ms.

    Args:
        steps: of a step, the slowest rank's.
        spread: half the range between quartiles of a step over its median.
        alone: of a step that exchanges no gradients; of captured shapes only.
        captured: of each row of ops inside such a step.
        disturbed: further rounds, whose times were not kept (see `is_disturbed`).
    """

    count: int
    disturbed: int
    steps: Mapping[str, float]
    spread: Mapping[str, float]
    alone: Mapping[str, float]
    captured: Mapping[str, tuple[float, ...]]


def rounds_file(folder: Path, ranks: int) -> Path:
    """Where the rounds of so many ranks lie."""
    return folder / f"rounds-{ranks}.jsonl"


def is_disturbed(other_cores: float | None, idle: int) -> bool:
    """Whether other work took a rank's core in a round: judged by the load, not by any time.

    Args:
        other_cores: mean number of cores that did other work.
        idle: cores without a rank.
    """
    return other_cores is not None and other_cores > max(idle, 0) + MOST_OTHER_CORES


def rounds_done(folder: Path, ranks: int) -> int:
    """Finished rounds of so many ranks."""
    path = rounds_file(folder, ranks)
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def read_rounds(folder: Path, ranks: int) -> Rounds:
    """All rounds of so many ranks.

    Raises:
        InputError: there is none, or a line is broken.
    """
    path = rounds_file(folder, ranks)
    lines = read_bytes(path, "file of rounds").decode("utf-8", "replace").splitlines()
    rounds = [_parse_round(path, number, line) for number, line in enumerate(lines, start=1)]
    kept = [each for each in rounds if "steps" in each]
    if rounds and not kept:
        raise InputError(
            f"{path}: all {len(rounds)} rounds were disturbed by other work; measure again with "
            "shardopt bench transformers on an idle machine"
        )
    if not rounds:
        raise InputError(f"{path}: holds no round; measure with shardopt bench transformers")
    steps = _samples(kept, "steps")
    return Rounds(
        len(kept),
        len(rounds) - len(kept),
        {name: _median(times) for name, times in steps.items()},
        {name: _spread(times) for name, times in steps.items()},
        {name: _median(times) for name, times in _samples(kept, "alone").items()},
        _captured_ms(kept),
    )


def _parse_round(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
        return {key: found[key] for key in ROUND_KEYS[: None if "steps" in found else 2]}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}:{number}: is no round: {error!r}; a line holds {', '.join(ROUND_KEYS)}"
        ) from error


def _samples(rounds: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[list[float]]]:
    """Name -> times of every rank."""
    found: dict[str, list[list[float]]] = {}
    for each in rounds:
        for name, ranks in each[key].items():
            kept = found.setdefault(name, [[] for _ in ranks])
            for times, more in zip(kept, ranks, strict=True):
                times.extend(more)
    return found


def _median(ranks: Sequence[Sequence[float]]) -> float:
    return max(statistics.median(times) for times in ranks)


def _spread(ranks: Sequence[Sequence[float]]) -> float:
    """Half the range between quartiles over the median, the largest of all ranks."""
    halves = []
    for times in ranks:
        low, middle, high = statistics.quantiles(times, n=4)
        halves.append((high - low) / 2 / middle)
    return max(halves)


def _captured_ms(rounds: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, ...]]:
    """The median over rounds and ranks, row by row."""
    found: dict[str, list[list[float]]] = defaultdict(list)
    for each in rounds:
        for name, ranks in each["captured"].items():
            found[name] += ranks
    return {
        name: tuple(map(statistics.median, zip(*times, strict=True)))
        for name, times in found.items()
    }


def write_ops(folder: Path, steps: Mapping[str, RankCalls]) -> None:
    """Rows of ops and buckets of every shape; a shape and a part stand in their first row only."""
    rows = [
        (
            "" if at or part_at else name,
            "" if at else part.op,
            row.kind,
            _numbers(row.sizes),
            row.count,
            _reuse_text(row.reuse),
        )
        for name, step in steps.items()
        for part_at, part in enumerate(step.calls)
        for at, row in enumerate(part.rows)
    ]
    _write(folder / OPS, OPS_COLUMNS, rows)
    buckets = [
        (name, at, bucket.gradients, bucket.bytes)
        for name, step in steps.items()
        for at, bucket in enumerate(step.collectives)
    ]
    _write(folder / BUCKETS, BUCKET_COLUMNS, buckets)


def _write(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    atomic_write_text(path, text.getvalue())


def read_ops(folder: Path) -> dict[str, RankCalls]:
    """What `write_ops` wrote, by the name of the shape.

    Raises:
        InputError: a file cannot be read, or a line of it.
    """
    parts: dict[str, dict[str, list[OpRow]]] = defaultdict(lambda: defaultdict(list))
    name = part = ""
    for next_name, next_part, row in _rows(folder / OPS, OPS_COLUMNS, _op_row):
        name, part = next_name or name, next_part or part
        parts[name][part].append(row)
    buckets: dict[str, list[CollectiveStart]] = defaultdict(list)
    for name, bucket in _rows(folder / BUCKETS, BUCKET_COLUMNS, _bucket):
        buckets[name].append(bucket)
    return {
        name: training_step({part: tuple(rows) for part, rows in of.items()}, buckets[name])
        for name, of in parts.items()
    }


def _rows(path: Path, columns: Sequence[str], parse: Any) -> list[Any]:
    table = read_table(path, columns, parse)
    if table.problems:
        raise InputError(f"{path.parent}/{table.problems[0]}")
    return table.rows


def read_traces(folder: Path) -> tuple[int, int, int] | None:
    """(steps, ops, fewest of them that their traces hold in order); None where none was traced.

    Raises:
        InputError: the file cannot be read, or a line of it.
    """
    if not (folder / TRACES).exists():
        return None
    rows = _rows(
        folder / TRACES, TRACE_COLUMNS, lambda row: [int(row[c]) for c in TRACE_COLUMNS[1:]]
    )
    return len(rows), sum(row[0] for row in rows), sum(min(row[1:]) for row in rows)


def _op_row(row: Mapping[str, str]) -> tuple[str, str, OpRow]:
    sizes = tuple(map(int, row["sizes"].split()))
    reuse = [0.0] * BINS
    for entry in row["reuse_kib"].split():
        at, size = entry.split(":")
        reuse[int(at)] = KIB * float(size)
    return row["shape"], row["part"], OpRow(row["kind"], sizes, tuple(reuse), int(row["count"]))


def _bucket(row: Mapping[str, str]) -> tuple[str, CollectiveStart]:
    return row["shape"], gradient_sum(int(row["gradients"]), int(row["bytes"]))


def _numbers(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _reuse_text(reuse: Sequence[float]) -> str:
    """Bin and KiB of those bins that are not empty."""
    return " ".join(f"{at}:{size / KIB:.4g}" for at, size in enumerate(reuse) if size)
