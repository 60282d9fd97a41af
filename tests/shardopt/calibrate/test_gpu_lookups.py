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
from predictor.model.distribution import Zipf
from predictor.model.plan import ComputeKernel
from predictor.units import us
from shardopt.calibrate.fitting import gmae
from shardopt.calibrate.gpu_lookups import (
    LOOKUPS,
    UVM,
    Launch,
    cache_bins,
    counted_bins,
    fit_launches,
    predict_launches,
)
from tests.shardopt.calibrate.synthetic import changed

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


def noisy(times: np.ndarray, seed: int = 0) -> np.ndarray:
    return times * np.exp(np.random.default_rng(seed).normal(0.0, NOISE, len(times)))


def launches(
    kernel: ComputeKernel, batches: tuple[int, ...], parts: tuple[str, ...]
) -> list[Launch]:
    measured: list[Launch] = []
    grid = product(batches, (16, 64, 128), (2.0, 30.0), (20_000, 3_000_000), (0.0, 1.1), parts)
    for i, (batch, dim, pooling, rows, alpha, part) in enumerate(grid):
        shard = LookupShard(
            cache_bins(Zipf(alpha).bins(rows)), batch * pooling, batch, rows, dim, kernel=kernel
        )
        measured.append(([shard] * (1 + 3 * (i % 3 == 0)), part))
    return measured


def test_a_few_rows_of_another_kernel_pull_little() -> None:
    true = changed(BASE, "embedding", forward_efficiency=0.6, kernel_us=4.5)
    rows = launches(ComputeKernel.FUSED, (600, 5000, 40_000), ("forward",))
    time_ms = noisy(predict_launches(true, rows), 1)
    slow = np.where(np.arange(len(rows)) % 20 == 7, 3.0, 1.0)
    fit = fit_launches(BASE, rows, time_ms * slow)
    errors = (predict_launches(fit.hw, rows) / time_ms - 1.0)[slow == 1.0]
    assert gmae(errors) < 0.05


def test_lookups_from_host_memory_tell_the_link_and_the_prefetch() -> None:
    true = changed(BASE, "embedding", uvm_efficiency=0.3, prefetch_ns_per_lookup=2.0)
    rows = launches(ComputeKernel.FUSED_UVM, (2000,), ("forward", "backward"))
    rows += launches(ComputeKernel.FUSED_UVM_CACHING, (2000, 9000), ("prefetch", "forward"))
    fit = fit_launches(BASE, rows, noisy(predict_launches(true, rows)))
    assert set(fit.fitted) == set(UVM)
    assert set(fit.kept) == set(LOOKUPS)
    assert fit.hw.embedding.model_dump()["uvm_efficiency"] == pytest.approx(0.3, rel=0.05)
    assert fit.hw.embedding.model_dump()["prefetch_ns_per_lookup"] == pytest.approx(2.0, rel=0.1)


def test_no_rows_leave_every_constant_and_a_cpus_lookups_are_no_gpus() -> None:
    fit = fit_launches(BASE, [], np.zeros(0))
    assert fit.hw == BASE
    assert fit.kept == LOOKUPS + UVM
    with pytest.raises(ProfileError, match="not a GPU's"):
        predict_launches(load_hardware("cpu-gloo"), [])


@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.2])
def test_counted_rows_give_the_skew_that_they_were_drawn_with(alpha: float) -> None:
    rows, ids = 300_000, 100_000.0
    distinct = Zipf(alpha).bins(rows).unique(ids)
    bins = counted_bins(rows, ids, distinct)
    assert bins.unique(ids) == pytest.approx(distinct, rel=1e-3)
    assert counted_bins(1000, 100.0, 100.0).probs.max() == pytest.approx(1e-3), "uniform at most"
    for cache in (3_000.0, 30_000.0):
        assert bins.hit_rate(cache) == pytest.approx(
            Zipf(alpha).bins(rows).hit_rate(cache), abs=0.01
        )


def test_tables_of_a_measured_launch_share_one_cache() -> None:
    kind = ComputeKernel.FUSED_UVM_CACHING
    hot, cold = (
        LookupShard(Zipf(0.8).bins(200_000), draws, 1e4, 200_000, 64, kernel=kind)
        for draws in (4e5, 2e4)
    )
    both, first, second = predict_launches(
        BASE, [(shards, "prefetch") for shards in ([hot, cold], [hot], [cold])]
    )
    model = lookup_model(BASE)
    assert isinstance(model, CudaLookups)
    alone = own_fetched_rows(hot) + own_fetched_rows(cold)
    # a row that is fetched is not one that the cache holds already, whose time of use is written
    fixed_ms = us(1e-3 * model.constants.prefetch_ns_per_row)
    change = (model.fetch_ms(hot) - fixed_ms) * (sum(shared_fetched_rows((hot, cold))) - alone)
    assert abs(change) > 0.01 * first
    assert both == pytest.approx(first + second - model.prefetch_floor_ms() + change)
