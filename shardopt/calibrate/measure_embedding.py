"""FBGEMM's fused TBE, as TorchRec runs it: forward, and backward with the optimizer inside."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardopt.bench.timing import Samples
from shardopt.calibrate.design import Point
from shardopt.calibrate.rows import Measured, measured
from shardopt.calibrate.sampling import WARM_UP, Timer, undisturbed, wanted

BATCHES = 4
"""Distinct batches in turn: one batch again and again would find its rows in the caches."""
LEARNING_RATE = 0.01
REFERENCE: dict[str, Any] = {
    "batch": 1024,
    "tables": [
        {"rows": 100_000, "dim": 64, "pooling": 10.0, "alpha": 1.05},
        {"rows": 1_000_000, "dim": 32, "pooling": 10.0, "alpha": 0.0},
    ],
}
"""Timed at the start, midway and at the end: whether the machine kept its speed."""


def measure_lookup(point: Point, timer: Timer, seconds: float) -> list[Measured]:
    """Rows ``forward`` and ``backward`` of one TBE.

    Their facts: per table ``[rows, dim, bags, ids, distinct rows]``, means over the batches.
    """
    import torch

    params = REFERENCE if point.family == "reference" else point.params
    tables, bags = params["tables"], params["batch"]
    tbe = _tbe(tables, timer.device)
    rng = np.random.default_rng(0)
    drawn = [[_draw(table, bags, rng) for table in tables] for _ in range(BATCHES)]
    inputs = [_jagged(batch, timer.device) for batch in drawn]
    width = sum(table["dim"] for table in tables)
    gradient = torch.full((bags, width), 1e-3, device=timer.device)
    forward, backward = _time(tbe, inputs, gradient, timer, seconds)
    facts = [
        [table["rows"], table["dim"], bags, *_counts([batch[i] for batch in drawn])]
        for i, table in enumerate(tables)
    ]
    return [
        measured(point, forward, "forward", tables=facts),
        measured(point, backward, "backward", tables=facts),
    ]


def _time(
    tbe: Any, inputs: list[Any], gradient: Any, timer: Timer, seconds: float
) -> tuple[Samples, Samples]:
    forward: list[tuple[float, bool]] = []
    backward: list[tuple[float, bool]] = []
    start, i = time.perf_counter(), 0
    while i < WARM_UP or wanted(backward, time.perf_counter() - start, seconds):
        if i == WARM_UP:
            start = time.perf_counter()
            forward.clear()
            backward.clear()
        outputs: list[Any] = []
        ids, offsets = inputs[i % len(inputs)]
        timer.flush()
        forward.append(timer.sample(partial(_keep, outputs, tbe, ids, offsets)))
        timer.flush()
        backward.append(timer.sample(partial(outputs.pop().backward, gradient)))
        i += 1
    return undisturbed(forward), undisturbed(backward)


def _keep(to: list[Any], tbe: Any, ids: Any, offsets: Any) -> None:
    to.append(tbe(ids, offsets))


def _tbe(tables: list[dict[str, Any]], device: str) -> Any:
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    cuda = device == "cuda"
    where = EmbeddingLocation.DEVICE if cuda else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if cuda else ComputeDevice.CPU
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(table["rows"], table["dim"], where, compute) for table in tables],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LEARNING_RATE,
        device=torch.device(device),
    )
    # pages that nobody wrote are all the same page of zeros, and cheap to read
    for weights in tbe.split_embedding_weights():
        weights.fill_(0.01)
    return tbe


def _draw(
    table: dict[str, Any], bags: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids and bag sizes; each bag has floor or ceil of the pooling factor, popular ids anywhere."""
    least = int(table["pooling"])
    lengths = least + (rng.random(bags) < table["pooling"] - least).astype(np.int64)
    rows, count = table["rows"], int(lengths.sum())
    if table["alpha"] == 0:
        return rng.integers(0, rows, count), lengths
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -table["alpha"]
    upto = np.cumsum(weights)
    ranks = np.searchsorted(upto, rng.random(count) * upto[-1])
    # the same popular rows in every batch, spread over the table
    place = np.random.default_rng(rows).permutation(rows)
    return place[np.minimum(ranks, rows - 1)], lengths


def _jagged(batch: list[tuple[NDArray[np.int64], NDArray[np.int64]]], device: str) -> Any:
    import torch

    ids = np.concatenate([ids for ids, _ in batch])
    lengths = np.concatenate([lengths for _, lengths in batch])
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return torch.from_numpy(ids).to(device), torch.from_numpy(offsets).to(device)


def _counts(batches: list[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> tuple[float, float]:
    """Mean ids and distinct rows of one table."""
    ids = float(np.mean([len(ids) for ids, _ in batches]))
    distinct = float(np.mean([len(np.unique(ids)) for ids, _ in batches]))
    return ids, distinct
