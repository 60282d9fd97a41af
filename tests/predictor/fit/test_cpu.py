"""Fits of CPU ranks find the constants that made the rows."""

import numpy as np
import pytest

from predictor import units
from predictor.cost.gemm import gemm_times
from predictor.cost.lookup.embedding import lookup_model
from predictor.cost.lookup.shard import LookupShard
from predictor.fit import cpu as fit_cpu
from predictor.fit.cpu import BACKWARD, DENSE, FORWARD, GemmRows, MemoryRows, TableCounts, TbeRows
from predictor.fit.held_out import HeldOut
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import CpuEmbedding
from predictor.model.distribution import Uniform
from predictor.model.plan import ComputeKernel

pytest.importorskip("scipy")

HARDWARE = load_hardware("cpu-gloo")
LAW = HARDWARE.embedding


def random_tbes(count: int, seed: int) -> list[list[TableCounts]]:
    rng = np.random.default_rng(seed)

    def table() -> TableCounts:
        rows = float(np.exp(rng.uniform(np.log(1e3), np.log(4e6))))
        ids = float(np.exp(rng.uniform(np.log(1e3), np.log(1e5))))
        distinct = min(rows, ids) * rng.uniform(0.1, 1.0)
        return TableCounts(
            rows, float(rng.choice([16, 64, 128])), rng.uniform(200, 8e3), ids, distinct
        )

    return [[table() for _ in range(1 + i % 5)] for i in range(count)]


def rows_of(law: CpuEmbedding, names: tuple[str, ...], seed: int, count: int = 80) -> TbeRows:
    tables = random_tbes(count, seed)
    empty = TbeRows(tables, np.ones(count))
    return TbeRows(tables, fit_cpu.predict_lookups(law, empty, names))


def test_columns_are_the_law_that_predicts() -> None:
    assert isinstance(LAW, CpuEmbedding)
    shards = [
        LookupShard(Uniform().bins(rows), ids, 512.0, rows, dim)
        for rows, dim, ids in ((1000, 16, 5e3), (100_000, 64, 2e4), (4_000_000, 128, 1e5))
    ]
    tables = [TableCounts(s.rows, s.dim, s.bags, s.ids, s.distinct_rows) for s in shards]
    rows, model = TbeRows([tables], np.ones(1)), lookup_model(HARDWARE)
    forward = model.forward_floor_ms() + sum(map(model.forward_ms, shards))
    backward = model.backward_floor_ms() + sum(map(model.backward_ms, shards))
    assert fit_cpu.predict_lookups(LAW, rows, FORWARD)[0] == pytest.approx(forward)
    assert fit_cpu.predict_lookups(LAW, rows, BACKWARD)[0] == pytest.approx(backward)


def test_the_embedding_law_is_recovered() -> None:
    assert isinstance(LAW, CpuEmbedding)
    fitted = fit_cpu.fit_lookups(rows_of(LAW, FORWARD, 0), rows_of(LAW, BACKWARD, 1), LAW)
    assert (fitted.page_kib, fitted.tlb_mib) == (LAW.page_kib, LAW.tlb_mib)
    for name in (*FORWARD, *BACKWARD):
        assert getattr(fitted, name) == pytest.approx(getattr(LAW, name), rel=0.02, abs=0.02), name
    for names in (FORWARD, BACKWARD):
        errors = fit_cpu.lookup_errors(fitted, rows_of(LAW, names, 2), names)
        assert np.abs(errors).max() < 1e-3


DENSE_LAW = LAW.model_copy(
    update={
        "backward_dense_table_us": 300.0,
        "backward_dense_ns_per_weight": 0.4,
        "backward_dense_ns_per_lookup": 6.0,
        "backward_dense_ns_per_lookup_dim": 0.05,
        "backward_dense_ns_per_row_dim": 0.8,
    }
)


def test_the_law_of_dense_gradients_is_recovered() -> None:
    assert isinstance(LAW, CpuEmbedding)
    assert isinstance(DENSE_LAW, CpuEmbedding)
    rows = rows_of(DENSE_LAW, DENSE, seed=4)
    rows = TbeRows(rows.tables, rows.time_ms + units.us(500.0))
    found, launch_us = fit_cpu.fit_dense(rows, LAW)
    assert launch_us == pytest.approx(500.0, rel=1e-3)
    for name in DENSE:
        assert getattr(found, name) == pytest.approx(getattr(DENSE_LAW, name), rel=1e-3), name
    assert np.abs(fit_cpu.dense_errors(found, launch_us, rows)).max() < 1e-3
    assert found.backward_ns_per_row == LAW.backward_ns_per_row


def test_the_law_of_dense_gradients_is_the_one_that_predicts() -> None:
    hw = HARDWARE.model_copy(update={"embedding": DENSE_LAW})
    shard = LookupShard(
        Uniform().bins(5000), 2e4, 512.0, 5000, 64, kernel=ComputeKernel.DENSE, optimizer="sgd"
    )
    table = TableCounts(shard.rows, shard.dim, shard.bags, shard.ids, shard.distinct_rows)
    assert isinstance(DENSE_LAW, CpuEmbedding)
    fitted = fit_cpu.predict_lookups(DENSE_LAW, TbeRows([[table]], np.ones(1)), DENSE)[0]
    assert lookup_model(hw).backward_ms(shard) == pytest.approx(fitted)


def test_a_dense_gradient_does_not_sort_and_is_written_for_rows_that_nobody_looks_up() -> None:
    hw = HARDWARE.model_copy(update={"embedding": DENSE_LAW})
    model = lookup_model(hw)

    def backward_ms(rows: int, kernel: ComputeKernel, optimizer: str = "sgd") -> float:
        # the same ids on the same hot rows, of a table with more that are never drawn
        bins = Uniform().bins(1000)
        shard = LookupShard(bins, 2e4, 512.0, rows, 64, kernel=kernel, optimizer=optimizer)
        return model.backward_ms(shard)

    dense = backward_ms(100_000, ComputeKernel.DENSE) - backward_ms(1000, ComputeKernel.DENSE)
    assert dense == pytest.approx(0.4e-6 * 99_000 * 64)
    of_optimizer = (backward_ms(1000, ComputeKernel.DENSE, name) for name in ("sgd", "adagrad"))
    assert next(of_optimizer) == next(of_optimizer)


def test_one_wild_row_does_not_pull_the_fit() -> None:
    assert isinstance(LAW, CpuEmbedding)
    forward, backward = rows_of(LAW, FORWARD, 0), rows_of(LAW, BACKWARD, 1)
    backward.time_ms[7] *= 3
    fitted = fit_cpu.fit_lookups(forward, backward, LAW)
    errors = fit_cpu.lookup_errors(fitted, rows_of(LAW, BACKWARD, 2), BACKWARD)
    assert np.abs(errors).max() < 0.02


def test_memory_floor_and_bandwidth_are_recovered() -> None:
    size = 2.0 ** np.arange(12, 27)
    rows = MemoryRows(size, units.us(4.0) + size / units.gb_per_s(20.0))
    floor, gb_s = fit_cpu.fit_memory(rows)
    assert (floor, gb_s) == (pytest.approx(4.0), pytest.approx(20.0))
    assert np.abs(fit_cpu.memory_errors(floor, gb_s, rows)).max() < 1e-6


def test_gemm_is_recovered() -> None:
    rng = np.random.default_rng(0)
    m, n, k = (np.round(2 ** rng.uniform(low, 11, 60)) for low in (8, 4, 4))
    hbm = units.gb_per_s(100.0)
    true = HARDWARE.gemm.model_copy(update={"tflops": {"fp32": 0.12, "bf16": 0.3}, "floor_us": 9.0})
    rows = GemmRows(m, n, k, gemm_times(true, 1, hbm, (m, n, k), "fp32"))
    fitted = fit_cpu.fit_cpu_gemm(rows, hbm, HARDWARE.gemm)
    assert np.abs(fit_cpu.cpu_gemm_errors(fitted, hbm, rows)).mean() < 0.01
    assert fitted.tflops["fp32"] == pytest.approx(0.12, rel=0.05)
    other = GemmRows(m, n, k, gemm_times(true, 1, hbm, (m, n, k), "bf16"))
    narrow = fit_cpu.fit_gemm_rate(other, hbm, true, "bf16")
    assert narrow.tflops["bf16"] == pytest.approx(0.3, rel=0.02)


def test_held_out_errors_add_up() -> None:
    both = HeldOut(np.array([0.1, -0.1]), 5) + HeldOut(np.array([0.3]), 6)
    assert (both.n, both.fitted) == (3, 11)
    assert both.mape == pytest.approx(0.5 / 3)
    assert both.bias == pytest.approx(0.1)
    assert np.isnan(HeldOut(np.zeros(0), 3).mape)


def test_a_group_is_as_wrong_as_the_kernels_that_take_its_time() -> None:
    errors = np.array([0.5, 0.1])
    assert HeldOut(errors, 2).rms == pytest.approx(np.sqrt(0.13))
    timed = HeldOut(errors, 2, np.array([1.0, 99.0]))
    assert timed.rms == pytest.approx(np.sqrt((0.25 + 99 * 0.01) / 100))
    assert timed.mape == HeldOut(errors, 2).mape
    assert (timed + HeldOut(errors, 2)).times == pytest.approx([1.0, 99.0, 1.0, 1.0])
