"""The lookups of a given model: every table alone, with the ids that its features draw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from predictor.model.workload import Optimizer, Table, Workload
from shardopt.calibrate.design.points import Point
from shardopt.calibrate.kernels.embedding import BATCHES, make_tbe
from shardopt.calibrate.rows import Measurement, row_of_samples
from shardopt.measure.sampling import Timer, sample_passes


def measure_model_lookup(
    model: Workload, point: Point, timer: Timer, seconds: float
) -> list[Measurement]:
    """Rows ``forward`` and ``backward`` of one whole table that serves the samples of all ranks.

    Facts as of a lookup with one table, and what else its kernels depend on.
    """
    import torch

    from shardopt.training.batch import batch_ring

    table = model.tables[model.keys.index(point.params["table"])]
    samples = point.params["batch_size"] * point.params["ranks"]
    only = replace(model, tables=(table,), batch_size=samples)
    ring = [batch.sparse[table.module] for batch in batch_ring(only, size=BATCHES)]
    inputs = [_input(sparse, timer.device) for sparse in ring]
    tbe = _table_tbe(table, timer.device)
    gradients = [torch.full_like(tbe(*given), 1e-3) for given in inputs]

    def forward(repeat: int) -> Any:
        i = repeat % BATCHES
        return tbe(*inputs[i]), gradients[i]

    spent = sample_passes(timer, forward, lambda made: made[0].backward(made[1]), seconds)
    ids = float(np.mean([sparse.values().numel() for sparse in ring]))
    distinct = float(np.mean([len(np.unique(sparse.values().numpy())) for sparse in ring]))
    bags = samples * len(table.features)
    facts = [[table.num_embeddings, table.embedding_dim, bags, ids, distinct]]
    parts = zip(("forward", "backward"), spent, strict=True)
    others = {
        "dtype": table.data_type,
        "optimizer": _optimizer(table),
        "weighted": table.weighted,
        "pooled": table.is_pooled,
        "mean": table.pooling == "mean",
    }
    return [row_of_samples(point, samples, part, tables=facts, **others) for part, samples in parts]


def _input(sparse: Any, device: str) -> tuple[Any, ...]:
    """Ids, offsets and, where the model has them, weights."""
    given = sparse.to(device)
    weights = given.weights_or_none()
    return (given.values(), given.offsets(), *(() if weights is None else (weights,)))


def _table_tbe(table: Table, device: str) -> Any:
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode

    return make_tbe(
        [(table.num_embeddings, table.embedding_dim)],
        device,
        _optimizer(table),
        table.data_type,
        feature_table_map=[0] * len(table.features),
        pooling_mode=PoolingMode[table.pooling.upper()],
    )


def _optimizer(table: Table) -> str:
    """TorchRec makes its SGD the exact one."""
    exact = table.optimizer == Optimizer.SGD
    return str(Optimizer.EXACT_SGD if exact else table.optimizer)
