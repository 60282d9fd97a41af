"""Sizes models by counting, so that an iteration takes some tens of milliseconds on CPU ranks.

The count is in units of about a millisecond of one core, for each rank of an even plan: 100 ns an
id and 1 ns a value that is looked up, 12 ns a value that is exchanged, 50 ns a thousand products
of the dense part (forward and backward), 0.7 ms a table. Round numbers after the 52 tasks of
configs/bench on one host, whose fastest plans take 0.6 to 1.4 times their count. A count knows no
plan, no skew and no cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from lab.tasks.models.chance import log_uniform, pick
from predictor.model.workload import DcnV2, DenseArch, Table, Workload

BATCH = (256, 512, 1024, 2048)
"""Samples of a rank."""
AIM = (12.0, 36.0)
"""Between which the count of a model is drawn; a batch comes as near as it can."""
COUNT = (8.0, 90.0)
"""Between which the count of every model lies."""
MAX_TABLES_BYTES = 600 * 10**6
"""Of one model; several plans of it are in memory at once."""
MIN_ROWS = 2
PIPELINES = ("base", "base", "base", "base", "sparse_dist")

ID, VALUE, EXCHANGED, PRODUCT, TABLE = 100e-6, 1e-6, 12e-6, 50e-9, 0.7


def with_batch(
    name: str, tables: Sequence[Table], dense: DenseArch, rng: random.Random
) -> Workload:
    """The model with the batch whose count is nearest to one drawn, and a pipeline."""
    aim = log_uniform(rng, *AIM)
    pipeline = pick(rng, PIPELINES)
    models = [Workload(name, batch, tuple(tables), dense, pipeline) for batch in BATCH]
    return min(models, key=lambda model: abs(math.log(count(model) / aim)))


def count(workload: Workload, dense_products: float | None = None) -> float:
    """About how many milliseconds an iteration is worth; see the head of this file.

    Args:
        dense_products: of a sample's way forward through the dense part; None: those of a DLRM.
    """
    tables = workload.tables
    sample = sum(
        t.lookups_per_sample * (ID + VALUE * t.embedding_dim)
        + t.outputs_per_sample * t.embedding_dim * EXCHANGED
        for t in tables
    )
    sample += PRODUCT * (products(workload) if dense_products is None else dense_products)
    return workload.batch_size * sample + TABLE * len(tables)


def products(workload: Workload) -> int:
    """Multiplications of a sample's way forward through the dense part."""
    dense = workload.dlrm
    vectors = [t.embedding_dim for t in workload.tables for _ in t.features]
    width = dense.bottom_mlp[-1] + sum(vectors)
    crossed = 0
    if isinstance(dense.interaction, DcnV2):
        crossed = 2 * dense.interaction.layers * dense.interaction.low_rank_dim * width
    elif dense.interaction == "dot":
        crossed = (1 + len(vectors)) * width
        width = dense.bottom_mlp[-1] + len(vectors) * (len(vectors) + 1) // 2
    layers = (dense.in_features, *dense.bottom_mlp), (width, *dense.top_mlp)
    return crossed + sum(a * b for mlp in layers for a, b in pairwise(mlp))


def scale_rows(tables: Sequence[Table], max_bytes: float) -> list[Table]:
    """The tables with so few rows, each by one factor, that they fit into some bytes.

    Those that would have fewer than `MIN_ROWS` keep that many.
    """
    total = sum(t.weight_bytes for t in tables)
    factor = min(1.0, max_bytes / total)
    return [
        replace(t, num_embeddings=max(MIN_ROWS, int(factor * t.num_embeddings))) for t in tables
    ]


def cap_rows(tables: Sequence[Table], max_bytes: float) -> list[Table]:
    """The tables with ids hashed to at most so many rows that they fit into some bytes.

    As MLPerf caps its Criteo tables at 40 million rows.
    """
    low, high = MIN_ROWS, max(t.num_embeddings for t in tables)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(t.weight_bytes for t in _capped(tables, middle)) <= max_bytes:
            low = middle
        else:
            high = middle - 1
    return _capped(tables, low)


def _capped(tables: Sequence[Table], rows: int) -> list[Table]:
    return [replace(t, num_embeddings=min(rows, t.num_embeddings)) for t in tables]
