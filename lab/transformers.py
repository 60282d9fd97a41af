"""Training steps of transformers on CPU ranks: shapes, ops of a step, gradient all-reduces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from predictor.cost.ops.cpu_ops import OpModels, OpRow

FAMILIES = ("bert", "gpt2", "xlnet")
_LETTERS = "ldhfvsb"


@dataclass(frozen=True)
class TransformerShape:
    """Model of one of the families, and the batch of one rank.

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
        """Name such as ``bert-l4-d256-h4-f1024-v2000-s128-b8``."""
        sizes = list(asdict(self).values())[1:]
        parts = (f"{letter}{size}" for letter, size in zip(_LETTERS, sizes, strict=True))
        return "-".join([self.family, *parts])

    @property
    def tokens(self) -> int:
        return self.sequence * self.batch

    @property
    def flop(self) -> float:
        """FLOP of a step: three times the forward's products (Kaplan et al. 2020, eq. 2.1).

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
    """Parse the name of a shape.

    Raises:
        ValueError: the name is not of this form.
    """
    family, *parts = name.split("-")
    if family not in FAMILIES or [part[:1] for part in parts] != list(_LETTERS):
        raise ValueError(
            f"'{name}' is not the name of a transformer; names look like "
            "bert-l4-d256-h4-f1024-v2000-s128-b8"
        )
    return TransformerShape(family, *(int(part[1:]) for part in parts))


LEAST_SHARE = 1e-3


@dataclass(frozen=True)
class GradientSync:
    """Time to all-reduce a bucket of gradients in ms: ``bucket + gradients g + bytes b``.

    DistributedDataParallel copies each gradient into its bucket and back, and gloo moves and adds
    bytes.
    """

    bucket_ms: float
    gradient_ms: float
    byte_ms: float

    def ms(self, gradients: int, size_bytes: int) -> float:
        return self.bucket_ms + gradients * self.gradient_ms + size_bytes * self.byte_ms


@dataclass(frozen=True)
class Bucket:
    """Gradients that DistributedDataParallel sums in one all-reduce.

    Args:
        bytes: bytes that a rank sends.
    """

    gradients: int
    bytes: int


@dataclass(frozen=True)
class TrainingStep:
    """Training step of every rank under data parallelism.

    Args:
        rows: ops of forward, backward and optimizer.
        buckets: gradient buckets of its backward.
    """

    rows: tuple[OpRow, ...]
    buckets: tuple[Bucket, ...] = ()

    def ms(self, models: OpModels, sync: GradientSync | None) -> float:
        """Return the ms of the step; one core runs the ops and sums the buckets in sequence."""
        sums_ms = (
            sum(sync.ms(bucket.gradients, bucket.bytes) for bucket in self.buckets) if sync else 0.0
        )
        return models.rows_ms(self.rows) + sums_ms


def fit_sync(buckets: Sequence[Sequence[Bucket]], extra_ms: Sequence[float]) -> GradientSync:
    """Fit the time of gradient all-reduces, from steps with and without them.

    Args:
        buckets: all-reduces of each step.
        extra_ms: additional time of each step with all-reduces.
    """
    from scipy.optimize import nnls

    sizes = [
        (
            len(step_buckets),
            sum(b.gradients for b in step_buckets),
            sum(b.bytes for b in step_buckets),
        )
        for step_buckets in buckets
    ]
    rows, extra = np.array(sizes, dtype=np.float64), np.array(extra_ms)
    scale = rows.max(axis=0)
    # large steps have large noise, so errors count between relative and absolute ones
    weights = 1 / np.sqrt(np.maximum(extra, extra.max() * LEAST_SHARE))
    solution, _ = nnls(rows / scale * weights[:, None], extra * weights)
    return GradientSync(*(solution / scale))
