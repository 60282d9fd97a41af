"""Models of one shape each: what a planner may meet beside tables that are all alike.

After what TorchRec and FBGEMM offer (weighted and sequence features, several modules) and what
their own benchmarks run: many small tables, few wide ones, weighted beside unweighted features
(meta-pytorch/torchrec, distributed/benchmark/yaml). Ids are Zipf's or uniform.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from lab.tasks.models.chance import log_uniform, pick, uniform, whole
from lab.tasks.models.size import scale_rows, with_batch
from predictor.model.distribution import Distribution, Uniform, Zipf
from predictor.model.workload import DenseArch, Feature, Table, Workload

BYTES = (80e6, 500e6)
LAYERS = ((64,), (128, 64), (256, 64), (256, 128, 64))
TOPS = ((64,), (128,), (256, 64), (256, 128))


def draw_shape(seed: int, rng: random.Random) -> Workload:
    """The model of a seed; seven seeds in a row are the seven shapes."""
    shapes = (
        *(_many_small, _few_wide, _mixed_pooling, _weighted, _sequences, _several_modules),
        _uneven_skew,
    )
    shape = shapes[seed % len(shapes)]
    tables = shape(rng)
    dense = DenseArch(13, pick(rng, LAYERS), (*pick(rng, TOPS), 1), "concat")
    name = f"shapes-{seed:03d}-{shape.__name__[1:]}"
    return with_batch(name, scale_rows(tables, log_uniform(rng, *BYTES)), dense, rng)


def _many_small(rng: random.Random) -> list[Table]:
    """40 to 70 tables of few, narrow rows."""
    count = whole(rng, 40, 70)
    return [_table(rng, i, (100, 20_000), (8, 16, 32), (1.0, 10.0)) for i in range(count)]


def _few_wide(rng: random.Random) -> list[Table]:
    """4 to 7 tables of wide rows."""
    dims = (256, 384, 512)
    return [_table(rng, i, (10_000, 200_000), dims, (3.0, 30.0)) for i in range(whole(rng, 4, 7))]


def _mixed_pooling(rng: random.Random) -> list[Table]:
    """Tables with one id a sample beside others with a hundred."""
    count = whole(rng, 12, 24)
    return [
        _table(rng, i, (1_000, 1_000_000), (16, 32, 64, 128), (1.0, 100.0)) for i in range(count)
    ]


def _weighted(rng: random.Random) -> list[Table]:
    """A module of weighted features beside an unweighted one, of about as many tables."""
    size = (1_000, 500_000), (16, 32, 64), (2.0, 40.0)
    plain = [_table(rng, i, *size) for i in range(whole(rng, 6, 10))]
    weighted = [_table(rng, i + len(plain), *size) for i in range(whole(rng, 6, 10))]
    return [*plain, *(replace(t, module="weighted_ebc", weighted=True) for t in weighted)]


def _sequences(rng: random.Random) -> list[Table]:
    """Sequences of ids, whose rows are not pooled, beside pooled features."""
    pooled = [
        _table(rng, i, (1_000, 500_000), (16, 32, 64), (1.0, 30.0))
        for i in range(whole(rng, 8, 14))
    ]
    # an EmbeddingCollection has one width
    dim = (pick(rng, (16, 32)),)
    sequences = [
        _table(rng, i + len(pooled), (5_000, 500_000), dim, (5.0, 30.0))
        for i in range(whole(rng, 2, 4))
    ]
    return [*pooled, *(replace(t, module="ec", pooling="none") for t in sequences)]


def _several_modules(rng: random.Random) -> list[Table]:
    """Three modules, each of tables of its own kind."""
    modules = (
        ("user", (5, 8), (50_000, 1_000_000), (32, 64), (5.0, 40.0)),
        ("item", (3, 6), (20_000, 300_000), (128, 256), (1.0, 5.0)),
        ("context", (6, 10), (10, 5_000), (8, 16), (1.0, 3.0)),
    )
    found: list[Table] = []
    for module, counts, rows, dims, ids in modules:
        for _ in range(whole(rng, *counts)):
            found.append(replace(_table(rng, len(found), rows, dims, ids), module=module))
    return found


def _uneven_skew(rng: random.Random) -> list[Table]:
    """Many ids on few hot rows in one half of the tables, fewer ids on cold rows in the other."""
    hot = [
        _with_law(_table(rng, i, (1_000, 100_000), (32, 64), (20.0, 60.0)), Zipf(1.2))
        for i in range(whole(rng, 5, 9))
    ]
    cold = [
        _with_law(_table(rng, i + len(hot), (200_000, 2_000_000), (32, 64), (4.0, 15.0)), Uniform())
        for i in range(whole(rng, 5, 9))
    ]
    return [*hot, *cold]


def _table(
    rng: random.Random,
    index: int,
    rows: tuple[int, int],
    dims: Sequence[int],
    ids: tuple[float, float],
) -> Table:
    pooling = round(log_uniform(rng, *ids), 1)
    skewed = rng.random() < 0.7
    law: Distribution = Zipf(round(uniform(rng, 0.5, 1.3), 2)) if skewed else Uniform()
    feature = Feature(f"f{index:02d}", pooling, distribution=law)
    return Table(f"t{index:02d}", int(log_uniform(rng, *rows)), pick(rng, dims), (feature,))


def _with_law(table: Table, law: Distribution) -> Table:
    (feature,) = table.features
    return replace(table, features=(replace(feature, distribution=law),))
