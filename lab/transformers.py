"""Measured training steps of transformers on CPU ranks: the shapes, their ops, rounds of times.

A folder holds the ops of every shape (`OPS`), the buckets in which its gradients are summed
(`BUCKETS`), and rounds of times. docs/data.md says what measured them.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from predictor.cost.ops.cpu_ops import BINS, OpRow
from predictor.errors import InputError
from predictor.iteration.op_graph import CallGroup, CollectiveStart, CollectiveWait, RankCalls
from shardopt.measure.store import Fields, RowKind, read_rows

FAMILIES = ("bert", "gpt2", "xlnet")
_LETTERS = "ldhfvsb"


@dataclass(frozen=True)
class TransformerShape:
    """A model of one of the families and the batch of one rank.

    Args:
        family: bert, gpt2 or xlnet.
        width: of the hidden states; a multiple of ``heads``.
        inner: width inside the feed-forward part.
        sequence: tokens of a sample.
        batch: samples of one rank in a step.
    """

    family: str
    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    sequence: int
    batch: int

    @property
    def name(self) -> str:
        """Such as ``bert-l4-d256-h4-f1024-v2000-s128-b8``."""
        sizes = list(asdict(self).values())[1:]
        parts = (f"{letter}{size}" for letter, size in zip(_LETTERS, sizes, strict=True))
        return "-".join([self.family, *parts])

    @property
    def tokens(self) -> int:
        """Of all samples."""
        return self.sequence * self.batch

    @property
    def flop(self) -> float:
        """Of one step: three times the forward's matrix products (Kaplan et al. 2020, eq. 2.1).

        A layer multiplies by ``4 d^2 + 2 d f`` weights a token and attends to the sequence twice;
        XLNet also projects and attends to ``2 s`` relative positions.
        """
        weights = 4 * self.width**2 + 2 * self.width * self.inner
        attended = 2 * self.sequence * self.width
        if self.family == "xlnet":
            weights += 2 * self.width**2
            attended += 2 * self.sequence * self.width
        a_token = self.layers * (weights + attended) + self.width * self.vocabulary
        return 6.0 * a_token * self.tokens


def parse_shape(name: str) -> TransformerShape:
    """The shape that a name stands for.

    Raises:
        ValueError: it is not such a name.
    """
    family, *parts = name.split("-")
    if family not in FAMILIES or [part[:1] for part in parts] != list(_LETTERS):
        raise ValueError(
            f"'{name}' is not the name of a transformer; names look like "
            "bert-l4-d256-h4-f1024-v2000-s128-b8"
        )
    return TransformerShape(family, *(int(part[1:]) for part in parts))


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


LEAST_SHARE = 1e-3


def fit_sync(
    buckets: Sequence[Sequence[CollectiveStart]], extra_ms: Sequence[float]
) -> GradientSync:
    """What summing gradients takes, from steps with and without.

    Args:
        buckets: the all-reduces of each step.
        extra_ms: of each step, what it takes longer with it.
    """
    from scipy.optimize import nnls

    sizes = [(len(of), sum(b.gradients for b in of), sum(b.bytes for b in of)) for of in buckets]
    rows, extra = np.array(sizes, dtype=np.float64), np.array(extra_ms)
    scale = rows.max(axis=0)
    # large steps have large noise: in between relative and absolute errors
    weights = 1 / np.sqrt(np.maximum(extra, extra.max() * LEAST_SHARE))
    found, _ = nnls(rows / scale * weights[:, None], extra * weights)
    return GradientSync(*(found / scale))


OPS, BUCKETS = "ops.csv", "buckets.csv"
TIMES = ("steps", "alone", "captured")
"""Of a round that counts: what was timed -> shape -> ms of every rank."""
KIB = 1024


@dataclass(frozen=True)
class Rounds:
    """Medians over all rounds and steps, by the name of a shape, ms.

    Args:
        steps: of a step, the slowest rank's.
        alone: of a step that exchanges no gradients; of captured shapes only.
        captured: of each row of ops inside such a step.
        disturbed: further rounds, whose times were not kept as other work took a rank's core.
    """

    count: int
    disturbed: int
    steps: Mapping[str, float]
    alone: Mapping[str, float]
    captured: Mapping[str, tuple[float, ...]]


def rounds_file(folder: Path, ranks: int) -> Path:
    """Where the rounds of so many ranks lie."""
    return folder / f"rounds-{ranks}.jsonl"


def _parse_op(of: Fields) -> Fields:
    reuse = [0.0] * BINS
    for entry in of["reuse_kib"].split():
        at, size = entry.split(":")
        reuse[int(at)] = KIB * float(size)
    sizes = tuple(map(int, of["sizes"].split()))
    return {**of, "row": OpRow(of["kind"], sizes, tuple(reuse), int(of["count"]))}


ROUND = RowKind(
    what="round",
    keys=("round", "other_cores"),
    parse=lambda of: {key: of[key] for key in (TIMES if "steps" in of else ())},
    fields=dict,
    json_lines=True,
    remedy=f"a round holds {', '.join(TIMES)}, unless other work disturbed it; delete the line",
)
OP = RowKind(
    what="row of ops",
    keys=("shape", "part", "kind", "sizes", "count", "reuse_kib"),
    parse=_parse_op,
    fields=dict,
)
"""A line of `OPS`; shape and part stand in their first line only."""
BUCKET = RowKind(
    what="bucket",
    keys=("shape", "bucket", "gradients", "bytes"),
    parse=lambda of: {**of, "start": gradient_sum(int(of["gradients"]), int(of["bytes"]))},
    fields=dict,
)


def read_rounds(folder: Path, ranks: int) -> Rounds:
    """All rounds of so many ranks.

    Raises:
        InputError: none was undisturbed, or a line is broken.
    """
    path = rounds_file(folder, ranks)
    rounds = read_rows(path, ROUND)
    kept = [each for each in rounds if each]
    if not kept:
        raise InputError(f"{path}: none of its {len(rounds)} rounds was undisturbed")
    slowest = {
        key: {
            name: max(map(statistics.median, times)) for name, times in _samples(kept, key).items()
        }
        for key in ("steps", "alone")
    }
    captured: dict[str, list[list[float]]] = defaultdict(list)
    for each in kept:
        for name, of in each["captured"].items():
            captured[name] += of
    rows_ms = {
        name: tuple(map(statistics.median, zip(*times, strict=True)))
        for name, times in captured.items()
    }
    return Rounds(len(kept), len(rounds) - len(kept), **slowest, captured=rows_ms)


def _samples(rounds: Sequence[Fields], key: str) -> dict[str, list[list[float]]]:
    """Name -> times of every rank."""
    found: dict[str, list[list[float]]] = {}
    for each in rounds:
        for name, ranks in each[key].items():
            kept = found.setdefault(name, [[] for _ in ranks])
            for times, more in zip(kept, ranks, strict=True):
                times.extend(more)
    return found


def read_ops(folder: Path) -> dict[str, RankCalls]:
    """The step of every shape by its name, as `OPS` and `BUCKETS` have it.

    Raises:
        InputError: a file cannot be read, or a line of it.
    """
    parts: dict[str, dict[str, list[OpRow]]] = defaultdict(lambda: defaultdict(list))
    name = part = ""
    for line in read_rows(folder / OPS, OP):
        name, part = line["shape"] or name, line["part"] or part
        parts[name][part].append(line["row"])
    buckets: dict[str, list[CollectiveStart]] = defaultdict(list)
    for of in read_rows(folder / BUCKETS, BUCKET):
        buckets[of["shape"]].append(of["start"])
    return {
        name: training_step({part: tuple(rows) for part, rows in of.items()}, buckets[name])
        for name, of in parts.items()
    }
