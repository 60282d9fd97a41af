"""FBGEMM's fused TBE, as TorchRec runs it: forward, and backward with the optimizer inside."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardopt.calibrate.design import Point
from shardopt.calibrate.rows import Measured, measured
from shardopt.calibrate.sampling import Timer, passes

BATCHES = 4
"""Distinct batches in turn: one batch again and again would find its rows in the caches."""
LEARNING_RATE = 0.01
OPTIMIZER = "exact_row_wise_adagrad"
"""Where a point names none."""


def measure_lookup(point: Point, timer: Timer, seconds: float) -> list[Measured]:
    """Rows ``forward`` and ``backward`` of one TBE.

    Their facts: per table ``[rows, dim, bags, ids, distinct rows]``, means over the batches.
    """
    import torch

    params = point.params
    tables, bags, weighted = params["tables"], params["batch"], params.get("weighted", False)
    shapes = [(table["rows"], table["dim"]) for table in tables]
    tbe = make_tbe(shapes, timer.device, params.get("optimizer", OPTIMIZER))
    rng = np.random.default_rng(0)
    drawn = [[_draw(table, bags, rng) for table in tables] for _ in range(BATCHES)]
    inputs = [_jagged(batch, timer.device) for batch in drawn]
    if weighted:
        inputs = [
            (ids, offsets, torch.full_like(ids, 0.5, dtype=torch.float32))
            for ids, offsets in inputs
        ]
    width = sum(table["dim"] for table in tables)
    gradient = torch.full((bags, width), 1e-3, device=timer.device)
    forward, backward = passes(
        timer,
        lambda i: tbe(*inputs[i % BATCHES]),
        lambda output: output.backward(gradient),
        seconds,
    )
    facts = [
        [table["rows"], table["dim"], bags, *_counts([batch[i] for batch in drawn])]
        for i, table in enumerate(tables)
    ]
    return [
        measured(point, forward, "forward", tables=facts),
        measured(point, backward, "backward", tables=facts),
    ]


def make_tbe(shapes: list[tuple[int, int]], device: str, optimizer: str, **others: Any) -> Any:
    """A TBE of tables of these rows and widths.

    Args:
        others: further arguments of FBGEMM's class.
    """
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
        [(rows, dim, where, compute) for rows, dim in shapes],
        optimizer=EmbOptimType(optimizer),
        learning_rate=LEARNING_RATE,
        device=torch.device(device),
        **others,
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
