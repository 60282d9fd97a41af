"""Constants of a GPU come back from rows that its laws made."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from predictor.cost.lookup.cuda import CudaLookups
from predictor.cost.lookup.embedding import lookup_model
from predictor.cost.lookup.shard import LookupShard, own_fetched_rows, shared_fetched_rows
from predictor.errors import ProfileError
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.distribution import Zipf
from predictor.model.plan import ComputeKernel
from shardopt.calibrate.fitting import FreeConstant, gmae
from shardopt.calibrate.gpu_lookups import (
    LOOKUPS,
    UVM,
    LaunchRows,
    _fit_launches,
    cache_bins,
    counted_bins,
    predict_launches,
)

pytest.importorskip("scipy")

BASE = load_hardware("h100-sxm")
HIDDEN = {
    "forward_efficiency": 0.7,
    "backward_efficiency": 0.55,
    "sort_efficiency": 0.5,
    "row_overhead_bytes": 90.0,
    "l2_share": 0.6,
    "kernel_us": 4.5,
    "uvm_efficiency": 0.4,
    "prefetch_ns_per_lookup": 1.1,
}
NOISE = 0.03


def changed(hw: HardwareProfile, group: str, **constants: float) -> HardwareProfile:
    for key, value in constants.items():
        hw = FreeConstant(group, key, 0.0, 0.0).put(hw, value)
    return hw


def noisy(times: np.ndarray, seed: int = 0) -> np.ndarray:
    return times * np.exp(np.random.default_rng(seed).normal(0.0, NOISE, len(times)))


def launches(kernel: ComputeKernel, batches: tuple[int, ...], parts: tuple[str, ...]) -> LaunchRows:
    tables, passes = [], []
    grid = product(batches, (16, 64, 128), (2.0, 30.0), (20_000, 3_000_000), (0.0, 1.1), parts)
    for i, (batch, dim, pooling, rows, alpha, part) in enumerate(grid):
        shard = LookupShard(
            cache_bins(Zipf(alpha).bins(rows)), batch * pooling, batch, rows, dim, kernel=kernel
        )
        tables.append([shard] * (1 + 3 * (i % 3 == 0)))
        passes.append(part)
    return LaunchRows(tables, passes, np.ones(len(passes)))


def measured(hw: HardwareProfile, rows: LaunchRows, seed: int) -> LaunchRows:
    return LaunchRows(rows.tables, rows.parts, noisy(predict_launches(hw, rows), seed))


@pytest.mark.slow
def test_lookups_of_hidden_constants_are_predicted() -> None:
    true = changed(changed(BASE, "embedding", **HIDDEN), "memory", l2_gb_s=3500.0)
    fused, both = ComputeKernel.FUSED, ("forward", "backward")
    fit = measured(true, launches(fused, (600, 5000, 40_000), both), 1)
    found = _fit_launches(BASE, fit)
    test = measured(true, launches(fused, (1500, 20_000), both), 2)
    for part in both:
        chosen = [i for i, of in enumerate(test.parts) if of == part]
        of = LaunchRows(
            [test.tables[i] for i in chosen], [part] * len(chosen), test.time_ms[chosen]
        )
        errors = predict_launches(found.hw, of) / of.time_ms - 1.0
        assert gmae(errors) < 0.05, part
        assert gmae(predict_launches(BASE, of) / of.time_ms - 1.0) > 0.1, "the base is another"
    assert set(UVM) <= set(found.kept), "no row reads host memory"
    for constant in found.kept:
        assert constant.value(found.hw) == constant.value(BASE), constant.key
    assert {c.key for c in found.fitted} >= {"forward_efficiency", "backward_efficiency"}


def test_a_few_rows_of_another_kernel_pull_little() -> None:
    true = changed(BASE, "embedding", forward_efficiency=0.6, kernel_us=4.5)
    rows = measured(true, launches(ComputeKernel.FUSED, (600, 5000, 40_000), ("forward",)), 1)
    slow = np.where(np.arange(len(rows.time_ms)) % 20 == 7, 3.0, 1.0)
    found = _fit_launches(BASE, LaunchRows(rows.tables, rows.parts, rows.time_ms * slow))
    usual = slow == 1.0
    errors = (predict_launches(found.hw, rows) / rows.time_ms - 1.0)[usual]
    assert gmae(errors) < 0.05


def test_lookups_from_host_memory_tell_the_link_and_the_prefetch() -> None:
    true = changed(BASE, "embedding", uvm_efficiency=0.3, prefetch_ns_per_lookup=2.0)
    managed = launches(ComputeKernel.FUSED_UVM, (2000,), ("forward", "backward"))
    cached = launches(ComputeKernel.FUSED_UVM_CACHING, (2000, 9000), ("prefetch", "forward"))
    rows = LaunchRows(
        [*managed.tables, *cached.tables],
        [*managed.parts, *cached.parts],
        np.ones(len(managed.parts) + len(cached.parts)),
    )
    found = _fit_launches(BASE, measured(true, rows, 0))
    assert set(found.fitted) == set(UVM)
    assert set(found.kept) == set(LOOKUPS)
    assert found.hw.embedding.model_dump()["uvm_efficiency"] == pytest.approx(0.3, rel=0.05)
    assert found.hw.embedding.model_dump()["prefetch_ns_per_lookup"] == pytest.approx(2.0, rel=0.1)


def test_no_rows_leave_every_constant() -> None:
    found = _fit_launches(BASE, LaunchRows([], [], np.zeros(0)))
    assert found.hw == BASE
    assert found.kept == LOOKUPS + UVM


def test_a_cpus_lookups_are_no_gpus() -> None:
    with pytest.raises(ProfileError, match="not a GPU's"):
        predict_launches(load_hardware("cpu-gloo"), LaunchRows([], [], np.zeros(0)))


@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.2])
def test_counted_rows_give_the_skew_that_they_were_drawn_with(alpha: float) -> None:
    rows, ids = 300_000, 100_000.0
    distinct = Zipf(alpha).bins(rows).unique(ids)
    found = counted_bins(rows, ids, distinct)
    assert found.unique(ids) == pytest.approx(distinct, rel=1e-3)
    for cache in (3_000.0, 30_000.0):
        assert found.hit_rate(cache) == pytest.approx(
            Zipf(alpha).bins(rows).hit_rate(cache), abs=0.01
        )


def test_more_distinct_rows_than_uniform_ids_have_are_uniform() -> None:
    assert counted_bins(1000, 100.0, 100.0).probs.max() == pytest.approx(1e-3)


def test_tables_of_a_measured_launch_share_one_cache() -> None:
    kind = ComputeKernel.FUSED_UVM_CACHING
    hot, cold = (
        LookupShard(Zipf(0.8).bins(200_000), draws, 1e4, 200_000, 64, kernel=kind)
        for draws in (4e5, 2e4)
    )
    both, first, second = predict_launches(
        BASE,
        LaunchRows([[hot, cold], [hot], [cold]], ["prefetch"] * 3, np.ones(3)),
    )
    model = lookup_model(BASE)
    assert isinstance(model, CudaLookups)
    alone = own_fetched_rows(hot) + own_fetched_rows(cold)
    change = model.fetch_ms(hot) * (sum(shared_fetched_rows((hot, cold))) - alone)
    assert abs(change) > 0.01 * first
    assert both == pytest.approx(first + second - model.prefetch_floor_ms() + change)
