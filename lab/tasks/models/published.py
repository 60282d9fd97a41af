"""Published models, scaled down until two CPU ranks train them in some tens of milliseconds.

What each source gives is kept in its proportions: tables, rows, ids of a sample, widths of layers.
Rows are scaled or capped to a few hundred MB, widths are divided by 2 to 8.

Sources:
    dcnv2: MLPerf DLRM-DCNv2 on Criteo 1TB (facebookresearch/dlrm, torchrec_dlrm/README.MD;
        configs/models/dlrm_dcnv2_criteo1tb.yaml says what is known and what is assumed).
    rm1, rm2, rm3: harvard-acc/DeepRecSys, models/configs/dlrm_rm{1,2,3}.json; more or fewer tables
        as RecNMP (Ke et al. 2020) has small and large variants of each. Their ids are uniform; two
        models of three get the repeats of Meta's tables instead.
    meta: facebookresearch/dlrm_datasets, embedding_bag/{2021,2022}/locality_stats.txt, for repeats
        and mean ids; numbers of tables, dims and layers after Lin et al. 2024
        (owensgroup/ml_perf_model), who build models out of the same tables.
"""

from __future__ import annotations

import random

from lab.tasks.models.chance import log_uniform, lognormal, pick, uniform, whole
from lab.tasks.models.size import cap_rows, scale_rows, with_batch
from predictor.model.distribution import Distribution, ReuseHistogram, Uniform, Zipf
from predictor.model.workload import DcnV2, DenseArch, Feature, Optimizer, Table, Workload

CRITEO_ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956),
    *(405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152),
    *(12_973, 108, 36),
)
CRITEO_IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
CRITEO_ALPHA = 1.1
"""Assumed; configs/models/dlrm_dcnv2_criteo1tb.yaml says why."""

REUSE = {
    "2021": (0.473, 0.152, 0.139, 0.112, 0.072, 0.032, 0.011, 0.005, 0.002, 0.001),
    "2021 parts": (0.423, 0.165, 0.167, 0.121, 0.073, 0.031, 0.011, 0.004, 0.002, 0.001, 0.001),
    "2022": (0.342, 0.144, 0.149, 0.138, 0.112, 0.068, 0.029, 0.010, 0.004, 0.002, 0.001, 0.001),
}
"""Share of the distinct ids of a table that occur once, up to twice, 4, 8, ... times."""
MEAN_IDS = {"2021": 15.8, "2021 parts": 8.3, "2022": 13.6}
"""Ids of a sample and table: total_indices over tables and batch of the file names."""
SAMPLES = {"2021": 65_536, "2021 parts": 65_536, "2022": 131_072}

BYTES = (150e6, 550e6)


def draw_published(seed: int, rng: random.Random) -> Workload:
    """The model of a seed; five seeds in a row are the five kinds."""
    kinds = (_dcnv2, _rm1, _rm2, _rm3, _meta)
    kind = kinds[seed % len(kinds)]
    return kind(f"published-{seed:03d}-{kind.__name__[1:]}", rng)


def _dcnv2(name: str, rng: random.Random) -> Workload:
    """26 tables of one width, most of them tiny; one has half of all ids."""
    dim = pick(rng, (16, 32, 64))
    tables = [
        Table(
            f"cat_{i}",
            rows,
            dim,
            # a bag of h ids reads h shuffled copies of one law; see the model file
            (Feature(f"c_{i}", float(h), distribution=Zipf(CRITEO_ALPHA, (h - 1) / 2)),),
            optimizer=Optimizer.ADAGRAD,
        )
        for i, (rows, h) in enumerate(zip(CRITEO_ROWS, CRITEO_IDS, strict=True))
    ]
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
    """Few tables, 80 ids each, narrow rows."""
    tables = _alike(rng, whole(rng, 6, 10), rows=4_000_000, dim=32, ids=80.0)
    dense = DenseArch(128, (64, 32), (256, 64, 1), "concat")
    return with_batch(name, scale_rows(tables, log_uniform(rng, *BYTES)), dense, rng)


def _rm2(name: str, rng: random.Random) -> Workload:
    """Many tables with many ids each; a part of the published 120."""
    ids = 120 / pick(rng, (4, 6))
    tables = _alike(rng, whole(rng, 28, 36), rows=500_000, dim=pick(rng, (32, 64)), ids=ids)
    dense = DenseArch(256, (128, 64), (128, 64, 1), "concat")
    return with_batch(name, scale_rows(tables, log_uniform(rng, *BYTES)), dense, rng)


def _rm3(name: str, rng: random.Random) -> Workload:
    """Few tables, 20 ids each, under heavy layers."""
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
    """Tables of many sizes, some with many ids and most with few, as often repeated as Meta's."""
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
