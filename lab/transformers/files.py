"""What a folder of measured transformers holds: the ops of every shape, and rounds of times."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.transformer import FAMILIES, TransformerShape
from predictor.cost.ops.cpu_ops import BINS, OpRow
from predictor.errors import InputError
from predictor.iteration.op_graph import CallGroup, CollectiveStart, CollectiveWait, RankCalls
from shardopt.measure.store import Fields, RowKind, RowsFile, read_rows, write_rows

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


@dataclass(frozen=True)
class GradientSync:
    """Time to sum a bucket of gradients over the ranks, in ms: ``bucket + gradients g + bytes b``.

    DistributedDataParallel copies each gradient into its bucket and back, and gloo moves and adds
    bytes.
    """

    bucket_ms: float
    gradient_ms: float
    byte_ms: float

    def ms(self, gradients: int, size_bytes: int) -> float:
        """Of one bucket."""
        return self.bucket_ms + gradients * self.gradient_ms + size_bytes * self.byte_ms


def gradient_sum(gradients: int, size_bytes: int) -> CollectiveStart:
    """The all-reduce of a bucket of gradients."""
    return CollectiveStart("allreduce_", size_bytes, gradients=gradients)


def training_step(
    parts: Mapping[str, tuple[OpRow, ...]], buckets: Sequence[CollectiveStart]
) -> RankCalls:
    """A training step under data parallelism.

    Args:
        parts: forward, backward.0, backward.1, ..., optimizer -> rows of its ops. Each part of the
            backward ends with the sum of a bucket; the optimizer waits for all sums.
        buckets: one for each part of the backward.
    """
    segments = {FORWARD: 0, OPTIMIZER: 2 * len(buckets)}
    segments |= {f"{BACKWARD}.{at}": at for at in range(len(buckets))}
    calls = tuple(CallGroup(segments[part], part, rows, 1) for part, rows in parts.items())
    return RankCalls(calls, (*buckets, *map(CollectiveWait, range(len(buckets)))))


SEED = 2024
CALIBRATIONS = {1: 24, 2: 15}
"""Shapes that are captured, by the number of ranks."""
_TARGETS = {
    "bert": (
        (6, 192, 6, 768, 3000, 64, 16),
        (3, 384, 6, 1536, 1500, 200, 3),
        (8, 128, 4, 512, 1000, 128, 4),
        (4, 320, 5, 1280, 2500, 96, 6),
        (2, 448, 7, 1792, 3500, 112, 5),
    ),
    "gpt2": (
        (3, 448, 7, 1792, 2500, 64, 8),
        (8, 128, 2, 512, 2000, 128, 4),
        (5, 256, 4, 1024, 3000, 96, 6),
        (2, 512, 8, 2048, 4500, 128, 3),
        (4, 320, 10, 960, 1500, 160, 3),
    ),
    "xlnet": (
        (4, 256, 8, 1024, 2000, 96, 4),
        (2, 384, 6, 1152, 3000, 128, 3),
        (5, 192, 3, 384, 1000, 48, 16),
        (3, 448, 7, 896, 2500, 64, 6),
        (2, 320, 5, 1280, 1500, 160, 3),
    ),
}
_OF_TWO_RANKS = {"bert": (0, 3, 4), "gpt2": (0, 2, 3), "xlnet": (0, 1, 3)}
MOST_FLOP = 3.5e10
TOKENS = (192, 1600)
MOST_BYTES = 24e6
"""Of one tensor: glibc takes larger ones from the system each time, page by page."""


def targets(ranks: int) -> list[TransformerShape]:
    """Shapes that are predicted, for one rank or two."""
    chosen = {
        family: [row for at, row in enumerate(rows) if ranks == 1 or at in _OF_TWO_RANKS[family]]
        for family, rows in _TARGETS.items()
    }
    return [TransformerShape(family, *row) for family, rows in chosen.items() for row in rows]


def calibrations(ranks: int) -> list[TransformerShape]:
    """Shapes that are captured, drawn from a seed; none is a target."""
    rng = random.Random(f"{SEED} {ranks}")
    taken = {shape.name for shape in targets(1)}
    found: list[TransformerShape] = []
    while len(found) < CALIBRATIONS[ranks]:
        shape = _draw(rng, FAMILIES[len(found) % len(FAMILIES)])
        if _fits(shape) and shape.name not in taken:
            taken.add(shape.name)
            found.append(shape)
    return found


def _draw(rng: random.Random, family: str) -> TransformerShape:
    width = 64 * rng.randint(2, 8)
    sequence = rng.choice((8 * rng.randint(3, 32), rng.choice((32, 64, 128, 256))))
    shape = TransformerShape(family, rng.randint(1, 6), width, 1, 0, 0, sequence, 1)
    return replace(
        shape,
        heads=width // rng.choice((32, 64)),
        inner=width * rng.choice((2, 3, 4)),
        vocabulary=rng.randrange(500, 5000),
        batch=rng.randint(1, 16),
    )


def _fits(shape: TransformerShape) -> bool:
    logits = 4 * shape.tokens * shape.vocabulary
    scores = 8 * shape.batch * shape.heads * shape.sequence**2
    return (
        TOKENS[0] <= shape.tokens <= TOKENS[1]
        and shape.flop <= MOST_FLOP
        and max(logits, scores) <= MOST_BYTES
    )


OPS = "ops.csv"
BUCKETS = "buckets.csv"
MACHINE = "machine.json"
TIMES = ("steps", "alone", "captured")
"""Of a round that counts: what was timed -> shape -> ms of every rank."""
KIB = 1024
MOST_OTHER_CORES = 0.2


@dataclass(frozen=True)
class Rounds:
    """Medians over all rounds and steps, by the name of a shape, ms.

    Args:
        steps: of a step, the slowest rank's.
        alone: of a step that exchanges no gradients; of captured shapes only.
        captured: of each row of ops inside such a step.
        disturbed: further rounds, whose times were not kept (see `is_disturbed`).
    """

    count: int
    disturbed: int
    steps: Mapping[str, float]
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


Round = Fields
"""One round as its line has it: ``round``, ``other_cores`` and, unless disturbed, `TIMES`."""


def _parse_round(fields: Fields) -> Round:
    return {
        key: fields[key] for key in ("round", "other_cores", *(TIMES if "steps" in fields else ()))
    }


ROUND = RowKind(
    what="round",
    keys=("round", "other_cores"),
    parse=_parse_round,
    fields=dict,
    json_lines=True,
    remedy=f"a round holds {', '.join(TIMES)}, unless other work disturbed it; delete the line",
)


def rounds_of(folder: Path, ranks: int) -> RowsFile[Round]:
    """The finished rounds of so many ranks, to which more can be added."""
    return RowsFile(rounds_file(folder, ranks), ROUND)


def read_rounds(folder: Path, ranks: int) -> Rounds:
    """All rounds of so many ranks.

    Raises:
        InputError: there is none, or a line is broken.
    """
    path = rounds_file(folder, ranks)
    rounds = read_rows(path, ROUND)
    kept = [each for each in rounds if "steps" in each]
    if rounds and not kept:
        raise InputError(
            f"{path}: all {len(rounds)} rounds were disturbed by other work; measure again with "
            "python -m lab transformers on an idle machine"
        )
    if not rounds:
        raise InputError(f"{path}: holds no round; measure with python -m lab transformers")
    steps = _samples(kept, "steps")
    return Rounds(
        len(kept),
        len(rounds) - len(kept),
        {name: _median(times) for name, times in steps.items()},
        {name: _median(times) for name, times in _samples(kept, "alone").items()},
        _captured_ms(kept),
    )


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


@dataclass(frozen=True)
class _OpLine:
    """A line of `OPS`; shape and part stand in their first line only."""

    shape: str
    part: str
    row: OpRow


def _parse_op(fields: Fields) -> _OpLine:
    sizes = tuple(map(int, fields["sizes"].split()))
    reuse = [0.0] * BINS
    for entry in fields["reuse_kib"].split():
        at, size = entry.split(":")
        reuse[int(at)] = KIB * float(size)
    row = OpRow(fields["kind"], sizes, tuple(reuse), int(fields["count"]))
    return _OpLine(fields["shape"], fields["part"], row)


def _op_fields(line: _OpLine) -> Fields:
    row = line.row
    reuse = (f"{at}:{size / KIB:.4g}" for at, size in enumerate(row.reuse) if size)
    return {
        "shape": line.shape,
        "part": line.part,
        "kind": row.kind,
        "sizes": " ".join(map(str, row.sizes)),
        "count": row.count,
        "reuse_kib": " ".join(reuse),
    }


REMEDY = "restore the file, or measure again into a new folder"
OP = RowKind(
    what="row of ops",
    keys=("shape", "part", "kind", "sizes", "count", "reuse_kib"),
    parse=_parse_op,
    fields=_op_fields,
    remedy=REMEDY,
)


@dataclass(frozen=True)
class _BucketLine:
    """A line of `BUCKETS`."""

    shape: str
    bucket: int
    start: CollectiveStart


BUCKET = RowKind(
    what="bucket",
    keys=("shape", "bucket", "gradients", "bytes"),
    parse=lambda of: _BucketLine(
        of["shape"], int(of["bucket"]), gradient_sum(int(of["gradients"]), int(of["bytes"]))
    ),
    fields=lambda line: {
        "shape": line.shape,
        "bucket": line.bucket,
        "gradients": line.start.gradients,
        "bytes": line.start.bytes,
    },
    remedy=REMEDY,
)


def write_ops(folder: Path, steps: Mapping[str, RankCalls]) -> None:
    """Rows of ops and buckets of every shape."""
    lines = [
        _OpLine("" if at or part_at else name, "" if at else part.op, row)
        for name, step in steps.items()
        for part_at, part in enumerate(step.calls)
        for at, row in enumerate(part.rows)
    ]
    write_rows(folder / OPS, OP, lines)
    buckets = [
        _BucketLine(name, at, bucket)
        for name, step in steps.items()
        for at, bucket in enumerate(step.collectives)
    ]
    write_rows(folder / BUCKETS, BUCKET, buckets)


def read_ops(folder: Path) -> dict[str, RankCalls]:
    """What `write_ops` wrote, by the name of the shape.

    Raises:
        InputError: a file cannot be read, or a line of it.
    """
    parts: dict[str, dict[str, list[OpRow]]] = defaultdict(lambda: defaultdict(list))
    name = part = ""
    for line in read_rows(folder / OPS, OP):
        name, part = line.shape or name, line.part or part
        parts[name][part].append(line.row)
    buckets: dict[str, list[CollectiveStart]] = defaultdict(list)
    for of in read_rows(folder / BUCKETS, BUCKET):
        buckets[of.shape].append(of.start)
    return {
        name: training_step({part: tuple(rows) for part, rows in of.items()}, buckets[name])
        for name, of in parts.items()
    }
