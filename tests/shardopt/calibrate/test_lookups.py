"""Batches of the lookups that are measured, and what is asked of FBGEMM for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.cost.lookup.embedding import lookup_model
from predictor.cost.lookup.shard import LookupShard
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import CpuEmbedding
from predictor.model.distribution import Uniform
from predictor.model.plan import ComputeKernel
from shardopt.calibrate.fitting import CalibratedProfile, Wiring
from shardopt.calibrate.lookups import (
    DENSE,
    FORWARD,
    fit_cpu,
    lookup_points,
    predict_lookups,
)
from shardopt.calibrate.points import QUICK, Point
from shardopt.calibrate.rows import PASSES, Origin
from tests.shardopt.calibrate.synthetic import cpu_rows, row

torch = pytest.importorskip("torch")

HARDWARE = load_hardware("cpu-gloo")
LAW = HARDWARE.embedding
DENSE_LAW = LAW.model_copy(
    update={
        "backward_dense_table_us": 300.0,
        "backward_dense_ns_per_weight": 0.4,
        "backward_dense_ns_per_lookup": 6.0,
        "backward_dense_ns_per_lookup_dim": 0.05,
        "backward_dense_ns_per_row_dim": 0.8,
    }
)


@pytest.mark.parametrize("kernel", ["fused", "dense"])
def test_columns_are_the_law_that_predicts(kernel: str) -> None:
    shards = [
        LookupShard(
            Uniform().bins(rows),
            ids,
            512.0,
            rows,
            dim,
            kernel=ComputeKernel(kernel),
            optimizer="sgd",
        )
        for rows, dim, ids in ((1000, 16, 5e3), (100_000, 64, 2e4), (4_000_000, 128, 1e5))
    ]
    tables = [[s.rows, s.dim, s.bags, s.ids, s.distinct_rows] for s in shards]
    measured = row(Point("lookup", {}), 1.0, "forward", tables=tables)
    model = lookup_model(HARDWARE.model_copy(update={"embedding": DENSE_LAW}))
    forward = model.forward_floor_ms() + sum(map(model.forward_ms, shards))
    backward = sum(map(model.backward_ms, shards))
    assert predict_lookups(LAW, [measured], FORWARD)[0] == pytest.approx(forward)
    if kernel == "dense":
        assert predict_lookups(DENSE_LAW, [measured], DENSE)[0] == pytest.approx(backward)


def test_one_wild_row_does_not_pull_the_law() -> None:
    rows = cpu_rows(HARDWARE, lookup_points(QUICK.lookups))
    wild = next(i for i, r in enumerate(rows) if r.part == "backward" and not r.point.test)
    rows[wild] = replace(rows[wild], median_us=3 * rows[wild].median_us)
    calibrated = fit_cpu(CalibratedProfile(rows, Origin("m", "t"), Wiring(2), HARDWARE, HARDWARE))
    law = calibrated.profile.embedding
    assert isinstance(law, CpuEmbedding)
    assert (law.page_kib, law.tlb_mib) == (LAW.page_kib, LAW.tlb_mib)
    for part in PASSES:
        assert abs(calibrated.errors[f"lookup {part}"].errors).max() < 0.02
