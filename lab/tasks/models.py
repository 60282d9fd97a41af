"""Random models that are the same under every version of Python.

Only uniform numbers of the Mersenne Twister come from `random`: the streams of its distributions
may change between versions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import NormalDist
from typing import TypeVar

from lab.criteo import CAPPED_ROWS, MULTI_HOT, criteo_tables
from predictor.errors import InputError, did_you_mean
from predictor.model.distribution import Distribution, ReuseHistogram, Uniform, Zipf
from predictor.model.workload import DcnV2, DenseArch, Feature, Optimizer, Table, Workload
from shardopt.config.write import with_digest

T = TypeVar("T")


def whole(rng: random.Random, low: int, high: int) -> int:
    """Draw an integer from `low` to `high`, both included."""
    return low + int(rng.random() * (high - low + 1))


def pick(rng: random.Random, options: Sequence[T]) -> T:
    return options[whole(rng, 0, len(options) - 1)]


def uniform(rng: random.Random, low: float, high: float) -> float:
    return low + rng.random() * (high - low)


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """Draw a number between two bounds above 0, with equal probability in every octave."""
    return math.exp(uniform(rng, math.log(low), math.log(high)))


def lognormal(rng: random.Random, median: float, sigma: float) -> float:
    """Draw a number whose logarithm is normal."""
    # random() may be 0, where the inverse normal distribution is infinite
    return median * math.exp(sigma * NormalDist().inv_cdf(max(rng.random(), 1e-12)))


BATCH = (256, 512, 1024, 2048)
"""Samples of a rank."""
AIM = (12.0, 36.0)
"""Bounds of the drawn count of a model; the nearest batch is chosen."""
COUNT = (8.0, 90.0)
"""Bounds of the count of every model."""
MAX_TABLES_BYTES = 600 * 10**6
"""Largest size of one model's tables; several plans of it are in memory at once."""
MIN_ROWS = 2
PIPELINES = ("base", "base", "base", "base", "sparse_dist")

ID, VALUE, EXCHANGED, PRODUCT, TABLE = 100e-6, 1e-6, 12e-6, 50e-9, 0.7


def with_batch(
    name: str, tables: Sequence[Table], dense: DenseArch, rng: random.Random
) -> Workload:
    """Return the model with the batch nearest to a drawn count, and a drawn pipeline."""
    aim = log_uniform(rng, *AIM)
    pipeline = pick(rng, PIPELINES)
    models = [Workload(name, batch, tuple(tables), dense, pipeline) for batch in BATCH]
    return min(models, key=lambda model: abs(math.log(count(model) / aim)))


def count(workload: Workload) -> float:
    """Estimate the milliseconds of an iteration from counts, without any prediction."""
    tables = workload.tables
    sample = sum(
        t.lookups_per_sample * (ID + VALUE * t.embedding_dim)
        + t.outputs_per_sample * t.embedding_dim * EXCHANGED
        for t in tables
    )
    sample += PRODUCT * products(workload)
    return workload.batch_size * sample + TABLE * len(tables)


def products(workload: Workload) -> int:
    """Count the multiplications of a sample's forward through the dense part."""
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
    """Scale the rows of all tables by one factor to fit into some bytes.

    Tables keep at least `MIN_ROWS` rows.
    """
    total = sum(t.weight_bytes for t in tables)
    factor = min(1.0, max_bytes / total)
    return [
        replace(t, num_embeddings=max(MIN_ROWS, int(factor * t.num_embeddings))) for t in tables
    ]


def cap_rows(tables: Sequence[Table], max_bytes: float) -> list[Table]:
    """Cap the rows of all tables, as by hashing, to fit into some bytes.

    MLPerf caps its Criteo tables at 40 million rows in the same way.
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


REUSE = {
    "2021": (0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005, 0.002, 0.001),
    "2021 parts": (0.423, 0.165, 0.167, 0.121, 0.073, 0.031, 0.011, 0.004, 0.002, 0.001, 0.001),
    "2022": (0.342, 0.144, 0.149, 0.138, 0.112, 0.068, 0.029, 0.010, 0.004, 0.002, 0.001, 0.001),
}
"""Shares of a table's distinct ids that occur once, up to twice, 4, 8, ... times."""
MEAN_IDS = {"2021": 15.8, "2021 parts": 8.3, "2022": 13.6}
"""Ids of a sample and table: total_indices over tables and batch of the file names."""
SAMPLES = {"2021": 65_536, "2021 parts": 65_536, "2022": 131_072}

BYTES = (150e6, 550e6)


def draw_published(seed: int, rng: random.Random) -> Workload:
    """Draw the model of a seed; five seeds in a row are the five kinds."""
    kinds = (_dcnv2, _rm1, _rm2, _rm3, _meta)
    kind = kinds[seed % len(kinds)]
    return kind(f"published-{seed:03d}-{kind.__name__[1:]}", rng)


def _dcnv2(name: str, rng: random.Random) -> Workload:
    """Draw 26 tables of one width, most of them tiny; one has half of all ids."""
    dim = pick(rng, (16, 32, 64))
    tables = criteo_tables(CAPPED_ROWS, MULTI_HOT, dim, Optimizer.ADAGRAD, ("cat", "c"))
    part = pick(rng, (4, 8))
    dense = DenseArch(
        in_features=13,
        bottom_mlp=(512 // part, 256 // part, dim),
        top_mlp=(1024 // part, 1024 // part, 512 // part, 256 // part, 1),
        # the rank of the published crosses is 4 of its dims of 128
        interaction=DcnV2(3, 2 * dim),
        optimizer="adagrad",
    )
    # Adagrad keeps as many values again
    return with_batch(name, cap_rows(tables, log_uniform(rng, *BYTES) / 2), dense, rng)


def _rm1(name: str, rng: random.Random) -> Workload:
    """Draw few tables with 80 ids each and narrow rows."""
    tables = _alike(rng, whole(rng, 6, 10), rows=4_000_000, dim=32, ids=80.0)
    dense = DenseArch(128, (64, 32), (256, 64, 1), "concat")
    return with_batch(name, scale_rows(tables, log_uniform(rng, *BYTES)), dense, rng)


def _rm2(name: str, rng: random.Random) -> Workload:
    """Draw many tables with many ids each, a fraction of the published 120."""
    ids = 120 / pick(rng, (4, 6))
    tables = _alike(rng, whole(rng, 28, 36), rows=500_000, dim=pick(rng, (32, 64)), ids=ids)
    dense = DenseArch(256, (128, 64), (128, 64, 1), "concat")
    return with_batch(name, scale_rows(tables, log_uniform(rng, *BYTES)), dense, rng)


def _rm3(name: str, rng: random.Random) -> Workload:
    """Draw few tables with 20 ids each, under heavy layers."""
    tables = _alike(rng, whole(rng, 8, 12), rows=2_000_000, dim=32, ids=20.0)
    part = pick(rng, (2, 4))
    dense = DenseArch(
        2560 // part, (1024 // part, 256 // part, 32), (512 // part, 256 // part, 1), "concat"
    )
    return with_batch(name, scale_rows(tables, log_uniform(rng, *BYTES)), dense, rng)


def _alike(rng: random.Random, count: int, *, rows: int, dim: int, ids: float) -> list[Table]:
    year = pick(rng, ("uniform", "2021", "2022"))
    law: Distribution = Uniform() if year == "uniform" else _reuse(year, ids)
    return [
        Table(f"t{i:02d}", rows, dim, (Feature(f"f{i:02d}", ids, distribution=law),))
        for i in range(count)
    ]


def _meta(name: str, rng: random.Random) -> Workload:
    """Draw tables of many sizes, some with many ids, most with few, repeated like Meta's."""
    year = pick(rng, tuple(REUSE))
    tables = [_meta_table(i, year, rng) for i in range(whole(rng, 18, 33))]
    part = pick(rng, (4, 8))
    dense = DenseArch(
        512 // part,
        (1024 // part, 256 // part, 128 // part),
        (1024 // part, 512 // part, 256 // part, 1),
        "concat",
    )
    return with_batch(name, scale_rows(tables, log_uniform(rng, *BYTES)), dense, rng)


def _meta_table(index: int, year: str, rng: random.Random) -> Table:
    # the mean of a lognormal law is exp(sigma^2 / 2) times its median
    ids = round(min(max(lognormal(rng, MEAN_IDS[year] / 2.1, 1.2), 1.0), 100.0), 1)
    rows = int(min(max(lognormal(rng, 100_000, uniform(rng, 1.5, 2.0)), 100.0), 1e7))
    dim = pick(rng, (32, 64, 128, 256))
    feature = Feature(f"f{index:02d}", ids, distribution=_reuse(year, ids))
    return Table(f"t{index:02d}", rows, dim, (feature,))


def _reuse(year: str, ids: float) -> ReuseHistogram:
    return ReuseHistogram(SAMPLES[year] * ids, REUSE[year])


SHAPES_BYTES = (80e6, 500e6)
LAYERS = ((64,), (128, 64), (256, 64), (256, 128, 64))
TOPS = ((64,), (128,), (256, 64), (256, 128))


def draw_shape(seed: int, rng: random.Random) -> Workload:
    """Draw the model of a seed; seven seeds in a row are the seven shapes."""
    shapes = (
        *(_many_small, _few_wide, _mixed_pooling, _weighted, _sequences, _several_modules),
        _uneven_skew,
    )
    shape = shapes[seed % len(shapes)]
    tables = shape(rng)
    dense = DenseArch(13, pick(rng, LAYERS), (*pick(rng, TOPS), 1), "concat")
    name = f"shapes-{seed:03d}-{shape.__name__[1:]}"
    return with_batch(name, scale_rows(tables, log_uniform(rng, *SHAPES_BYTES)), dense, rng)


def _many_small(rng: random.Random) -> list[Table]:
    """Draw 40 to 70 tables of few, narrow rows."""
    count = whole(rng, 40, 70)
    return [_table(rng, i, (100, 20_000), (8, 16, 32), (1.0, 10.0)) for i in range(count)]


def _few_wide(rng: random.Random) -> list[Table]:
    """Draw 4 to 7 tables of wide rows."""
    dims = (256, 384, 512)
    return [_table(rng, i, (10_000, 200_000), dims, (3.0, 30.0)) for i in range(whole(rng, 4, 7))]


def _mixed_pooling(rng: random.Random) -> list[Table]:
    """Draw tables with one to a hundred ids a sample."""
    count = whole(rng, 12, 24)
    return [
        _table(rng, i, (1_000, 1_000_000), (16, 32, 64, 128), (1.0, 100.0)) for i in range(count)
    ]


def _weighted(rng: random.Random) -> list[Table]:
    """Draw a module of weighted features beside an unweighted one of about equal size."""
    size = (1_000, 500_000), (16, 32, 64), (2.0, 40.0)
    plain = [_table(rng, i, *size) for i in range(whole(rng, 6, 10))]
    weighted = [_table(rng, i + len(plain), *size) for i in range(whole(rng, 6, 10))]
    return [*plain, *(replace(t, module="weighted_ebc", weighted=True) for t in weighted)]


def _sequences(rng: random.Random) -> list[Table]:
    """Draw unpooled sequences of ids beside pooled features."""
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
    """Draw three modules, each with its own kind of tables."""
    modules = (
        ("user", (5, 8), (50_000, 1_000_000), (32, 64), (5.0, 40.0)),
        ("item", (3, 6), (20_000, 300_000), (128, 256), (1.0, 5.0)),
        ("context", (6, 10), (10, 5_000), (8, 16), (1.0, 3.0)),
    )
    tables: list[Table] = []
    for module, counts, rows, dims, ids in modules:
        for _ in range(whole(rng, *counts)):
            tables.append(replace(_table(rng, len(tables), rows, dims, ids), module=module))
    return tables


def _uneven_skew(rng: random.Random) -> list[Table]:
    """Draw tables with many ids on few hot rows, and tables with fewer ids on cold rows."""
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


SHAPES = "shapes"
FAMILIES: Mapping[str, Callable[[int, random.Random], Workload]] = {
    "published": draw_published,
    SHAPES: draw_shape,
}
"""Name of a family -> function that draws the model of a seed."""


def draw_model(family: str, seed: int) -> Workload:
    """Draw the model of a seed, equal to one read from its file; the same on any machine.

    Args:
        seed: at least 0.

    Raises:
        InputError: there is no such family.
    """
    if family not in FAMILIES:
        raise InputError(
            f"there are no models '{family}'{did_you_mean(family, FAMILIES)}; "
            f"choose {' or '.join(FAMILIES)}",
            inputs=("models",),
        )
    return with_digest(FAMILIES[family](seed, random.Random(f"shardopt {family} {seed}")))
