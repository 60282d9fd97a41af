"""HugeCTR's iteration: what its runtime's constants do, and where they come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from predictor.distribution import Zipf
from predictor.fit_runtime import fit_dcnv2
from predictor.hardware import load_hardware
from predictor.hugectr import HugeCtrBuilder, frequent_rows
from predictor.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.runtime import HUGECTR_V20, HUGECTR_V30, HUGECTR_V31
from predictor.topology import Topology
from predictor.workload import DcnV2, DenseArch, Feature, Table, Workload

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the public tables are not here")
RANKS = 4


def workload(batch: int = 4096) -> Workload:
    tables = tuple(
        Table(f"t{i}", 1_000_000, 128, (Feature(f"f{i}", 4.0, distribution=Zipf(1.1)),))
        for i in range(RANKS)
    )
    dense = DenseArch(13, (512, 128), (512, 1), DcnV2(3, 512), "fp16", "adagrad")
    return Workload("small", batch, tables, dense)


def plan(replicated: int = 0) -> ShardingPlan:
    tables = {}
    for i in range(RANKS):
        if i < replicated:
            shards = tuple(Shard(r, (0, 0), (1_000_000, 128)) for r in range(RANKS))
            tables[f"t{i}"] = TablePlan(ShardingType.DATA_PARALLEL, ComputeKernel.DENSE, shards)
        else:
            shards = (Shard(i, (0, 0), (1_000_000, 128)),)
            tables[f"t{i}"] = TablePlan(ShardingType.TABLE_WISE, ComputeKernel.FUSED, shards)
    return ShardingPlan(tables, RANKS, RANKS)


def builder(batch: int = 4096, replicated: int = 0) -> HugeCtrBuilder:
    hw = load_hardware("h100-sxm")
    top = Topology.uniform(RANKS, RANKS, hbm_bytes=hw.hbm_bytes, ddr_bytes=hw.ddr_bytes)
    return HugeCtrBuilder(workload(batch), top, hw, plan(replicated), HUGECTR_V31)


def test_every_constant_costs_time() -> None:
    made = builder()
    base = made.iteration_ms()
    for change in (
        {"step_us": HUGECTR_V31.step_us + 100},
        {"lookup_factor": 2.0},
        {"update_factor": 3.0},
        {"gemm_factor": 2.0},
        {"graph_node_us": 3.0},
    ):
        made.use(replace(HUGECTR_V31, **change))
        assert made.iteration_ms() > base, change


def test_the_step_is_paid_once() -> None:
    made = builder()
    base = made.iteration_ms()
    made.use(replace(HUGECTR_V31, step_us=HUGECTR_V31.step_us + 100))
    assert made.iteration_ms() - base == pytest.approx(0.1)


def test_no_host_time_and_the_wire_is_in_half_precision() -> None:
    made = builder()
    graph = made.build()
    assert all(op.host_ms == 0 for op in graph.ops)
    assert made.workload.qcomm.forward == "fp16"
    assert made.workload.dense.data_type == "fp16"


def test_replicated_tables_are_reduced_not_exchanged() -> None:
    phases = [{op.phase for op in builder(replicated=r).build().ops} for r in (0, RANKS)]
    assert "output_dist_forward" in phases[0]
    assert "output_dist_forward" not in phases[1]
    assert builder(replicated=RANKS).iteration_ms() > builder().iteration_ms()


def test_frequent_rows_are_those_that_a_batch_holds_once_a_rank() -> None:
    share, elements = frequent_rows(workload(), RANKS)
    larger, more = frequent_rows(workload(8192), RANKS)
    assert 0 < share < larger < 1
    assert 0 < elements < more
    uniform = replace(workload(), tables=tuple(
        replace(t, features=(Feature("f", 4.0),)) for t in workload().tables
    ))  # fmt: skip
    assert frequent_rows(uniform, RANKS) == (0.0, 0.0)


def test_the_hybrid_embedding_balances_the_ranks() -> None:
    made = builder()
    made.use(HUGECTR_V20)
    assert made.loads.std(axis=2).max() == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
@needs_data
def test_the_shipped_constants_are_those_of_the_fit() -> None:
    for fitted, shipped in zip(fit_dcnv2(DATA), (HUGECTR_V30, HUGECTR_V31), strict=True):
        assert fitted.update_factor == pytest.approx(shipped.update_factor, rel=0.05)
        assert fitted.gemm_factor == pytest.approx(shipped.gemm_factor, rel=0.05)
        assert fitted.lookup_factor == pytest.approx(shipped.lookup_factor, rel=0.1)
        assert fitted.step_us == pytest.approx(shipped.step_us, rel=0.05)
