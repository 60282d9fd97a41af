"""Synthetic batches, as the model file describes them: what every measurement trains on.

Each sample has floor or ceil of `pooling_factor` ids, with that mean; with a `pooling_factor_std`
the floor or ceil of a gamma variable of that mean and standard deviation. Ids follow the feature's
index distribution; `id_order: random` scatters the hot ones over the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor.errors import InputError
from predictor.model.captured import CapturedDense
from predictor.model.distribution import Distribution, Zipf
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
    from torchrec.streamable import Pipelineable

RING_SIZE = 16
"""Distinct batches that a measurement cycles through."""

Ids = NDArray[np.int64]


def computed_dense(workload: Workload) -> DenseArch | CapturedDense:
    """The dense part of a model that can be run.

    Raises:
        InputError: its times were measured, and nothing else is known of it.
    """
    return workload.dense if isinstance(workload.dense, CapturedDense) else workload.dlrm


@dataclass
class Batch(Pipelineable):
    """Batch of one rank and iteration.

    Args:
        dense: `[batch, in_features]`.
        sparse: the ids of every embedding module, by the module's name.
        labels: `[batch]`, 0 or 1.
    """

    dense: torch.Tensor
    sparse: dict[str, KeyedJaggedTensor]
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch on another device."""
        return self._each(lambda part: part.to(device=device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until `stream` is done with it."""
        for part in (self.dense, self.labels, *self.sparse.values()):
            part.record_stream(stream)

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory."""
        return self._each(lambda part: part.pin_memory())

    def _each(self, change: Callable[[Any], Any]) -> Batch:
        sparse = {name: change(ids) for name, ids in self.sparse.items()}
        return Batch(change(self.dense), sparse, change(self.labels))


def batch_ring(
    workload: Workload, *, seed: int = 0, rank: int = 0, size: int = RING_SIZE, pin: bool = False
) -> list[Batch]:
    """The distinct batches of one rank; every rank has its own. ``pin``: in page-locked memory."""
    ring = [synthetic_batch(workload, seed=seed, rank=rank, index=i) for i in range(size)]
    return [batch.pin_memory() for batch in ring] if pin else ring


def synthetic_batch(workload: Workload, *, seed: int = 0, rank: int = 0, index: int = 0) -> Batch:
    """Batch `index` of the ring of `rank`; the same arguments give the same batch anywhere.

    Raises:
        InputError: a feature has `num_poolings` other than 1, which a plain batch cannot hold.
    """
    rng = np.random.default_rng([seed, rank, index])
    size = workload.batch_size
    width = computed_dense(workload).in_features
    dense = rng.standard_normal((size, width), dtype=np.float32)
    labels = rng.integers(0, 2, size).astype(np.float32)
    sparse = {
        module: _sparse([t for t in workload.tables if t.module == module], size, seed, rng)
        for module in workload.modules
    }
    return Batch(torch.from_numpy(dense), sparse, torch.from_numpy(labels))


def _sparse(
    tables: Sequence[Table], size: int, seed: int, rng: np.random.Generator
) -> KeyedJaggedTensor:
    keys: dict[str, tuple[Ids, Ids]] = {}
    weighted = False
    for table in tables:
        check_poolings(table)
        # a feature processor makes the weights itself
        processed = any(feature.position_weights for feature in table.features)
        weighted = (weighted or table.weighted) and not processed
        for feature in table.features:
            if feature.name not in keys:  # two tables may read one feature
                lengths = _lengths(feature, size, rng)
                readers = [t for t in tables if feature.name in [f.name for f in t.features]]
                scatter = _Scatter(min(t.num_embeddings for t in readers), seed)
                keys[feature.name] = lengths, _ids(feature, scatter, int(lengths.sum()), rng)
    lengths = np.concatenate([lengths for lengths, _ in keys.values()])
    values = np.concatenate([values for _, values in keys.values()])
    weights = torch.from_numpy(rng.random(len(values), dtype=np.float32)) if weighted else None
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.from_numpy(values),
        lengths=torch.from_numpy(lengths),
        weights=weights,
    )


def check_poolings(table: Table) -> None:
    """Refuse features that are pooled more, or less, often than once a sample.

    Raises:
        InputError: names the feature.
    """
    for feature in table.features:
        if feature.num_poolings != 1:
            raise InputError(
                f"feature '{feature.name}' of table '{table.name}' has num_poolings "
                f"{feature.num_poolings:g}; only models with 1 can be run"
            )


def _lengths(feature: Feature, size: int, rng: np.random.Generator) -> Ids:
    mean, deviation = feature.pooling_factor, feature.pooling_factor_std
    lengths = np.full(size, mean)
    if deviation and mean:
        lengths = rng.gamma((mean / deviation) ** 2, deviation**2 / mean, size)
    low = lengths.astype(np.int64)
    return low + (rng.random(size) < lengths - low)


def _ids(feature: Feature, scatter: _Scatter, count: int, rng: np.random.Generator) -> Ids:
    ranks = popularity_ranks(feature.distribution, scatter.rows, count, rng)
    return scatter(ranks) if feature.id_order == "random" else ranks


def popularity_ranks(
    distribution: Distribution, rows: int, count: int, rng: np.random.Generator
) -> Ids:
    """`count` draws from a table of `rows` rows; 0 is the most popular row."""
    if isinstance(distribution, Zipf):
        return _zipf_ranks(distribution.alpha, distribution.q, rows, count, rng)
    bins = distribution.bins(rows)
    edges = np.concatenate(([0.0], np.cumsum(bins.counts)))
    shares = bins.counts * bins.probs
    chosen = rng.choice(len(shares), size=count, p=shares / shares.sum())
    ranks = edges[chosen] + rng.random(count) * bins.counts[chosen]
    # a bin may end within a row, and its last row then is shared with the next bin
    return np.minimum(ranks.astype(np.int64), rows - 1)


def _zipf_ranks(alpha: float, q: float, rows: int, count: int, rng: np.random.Generator) -> Ids:
    """Exact draws of p(k) ~ (k + q)^-alpha, k = 1..rows, in memory that does not grow with rows.

    Rejection-inversion (Hörmann and Derflinger 1996): invert the integral H of the density at a
    uniform point and round; accept where the histogram lies under the curve.
    """

    def density(x: Any) -> Any:
        return (x + q) ** -alpha

    def integral(x: Any) -> Any:
        return np.log(x + q) if logarithmic else (x + q) ** power / power

    def inverse(u: Any) -> Any:
        return (np.exp(u) if logarithmic else (u * power) ** (1 / power)) - q

    power = 1 - alpha
    logarithmic = abs(power) < 1e-12
    # the first row is drawn without rejection: its bar is cut off at its height, not at 0.5
    low, first_end = integral(1.5) - density(1.0), integral(1.5)
    high = integral(rows + 0.5)
    parts: list[Ids] = []
    missing = count
    while missing > 0:
        u = low + rng.random(missing + 16) * (high - low)
        first = u <= first_end
        k = np.ones_like(u)
        k[~first] = np.clip(np.rint(inverse(u[~first])), 1, rows)
        accepted = first | (u >= integral(k + 0.5) - density(k))
        parts.append(k[accepted].astype(np.int64) - 1)
        missing -= len(parts[-1])
    return np.concatenate(parts)[:count] if parts else np.empty(0, dtype=np.int64)


class _Scatter:
    """A fixed pseudo-random permutation of a table's rows, without the table's memory.

    A Feistel network on the next power of four, walked until the result is a row again. A linear
    map would spread the hot rows evenly, which random ids do not.
    """

    ROUNDS = 4

    def __init__(self, rows: int, seed: int) -> None:
        self.rows = rows
        self.half = np.uint64(max(1, -(-(rows - 1).bit_length() // 2)))
        self.mask = np.uint64((1 << int(self.half)) - 1)
        rng = np.random.default_rng([seed, rows])
        self.keys = rng.integers(1, 2**63, size=self.ROUNDS, dtype=np.uint64)

    def __call__(self, ranks: Ids) -> Ids:
        """Row of every popularity rank."""
        rows = self._encrypt(ranks.astype(np.uint64))
        outside = np.flatnonzero(rows >= self.rows)
        while len(outside):
            rows[outside] = self._encrypt(rows[outside])
            outside = outside[rows[outside] >= self.rows]
        return rows.astype(np.int64)

    def _encrypt(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        high, low = x >> self.half, x & self.mask
        for key in self.keys:
            mixed = (low + key) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(32)
            mixed *= np.uint64(0xD6E8FEB86659FD93)
            high, low = low, high ^ ((mixed >> np.uint64(32)) & self.mask)
        return (high << self.half) | low
