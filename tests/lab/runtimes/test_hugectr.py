"""HugeCTR's iteration: what its runtime's constants do, and where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from lab.fit.hugectr import Rows, fit_dcnv2, fit_hybrid
from lab.runtimes.hugectr import (
    HugeCtrBuilder,
    HybridRule,
    Runtime,
    runtime_of_round,
    uplink_size,
)
from predictor.cost.loads import Load
from predictor.hardware.loader import load_hardware
from predictor.model.distribution import Zipf
from predictor.model.plan import ShardingType, TablePlan
from predictor.model.workload import DcnV2, DenseArch, Feature, Table
from tests.builders import a_topology, a_workload, cut, data_parallel, plan_of, table_wise
from tests.public_data import EXCERPTS

RANKS = 4
HUGECTR_V20, HUGECTR_V30, HUGECTR_V31 = (
    runtime_of_round(version) for version in ((2, 0), (3, 0), (3, 1))
)


TABLES = tuple(
    Table(f"t{i}", 1_000_000, 128, (Feature(f"f{i}", 4.0, distribution=Zipf(1.1)),))
    for i in range(RANKS)
)
DENSE = DenseArch(13, (512, 128), (512, 1), DcnV2(3, 512), "fp16", "adagrad")
MODEL = a_workload(*TABLES, batch_size=4096, dense=DENSE)
WHOLE = [table_wise(table, rank) for rank, table in enumerate(TABLES)]


def builder(
    plan: Sequence[TablePlan] = WHOLE,
    world: int = RANKS,
    hardware: str = "h100-sxm",
    runtime: Runtime = HUGECTR_V31,
) -> HugeCtrBuilder:
    top = a_topology(world)
    hw = load_hardware(hardware)
    return HugeCtrBuilder(MODEL, top, hw, plan_of(MODEL, top, plan), runtime)


def test_every_constant_costs_time() -> None:
    hugectr = builder()
    base = hugectr.iteration_ms()
    for change in (
        {"step_us": HUGECTR_V31.step_us + 100},
        {"lookup_factor": 2.0},
        {"update_factor": 3.0},
        {"gemm_factor": 2.0},
        {"graph_node_us": 3.0},
    ):
        hugectr.use(replace(HUGECTR_V31, **change))
        assert hugectr.iteration_ms() > base, change


def test_replicated_tables_are_reduced_not_exchanged() -> None:
    copies = [data_parallel(table, RANKS) for table in TABLES]
    phases = [{op.phase for op in builder(plan).build().ops} for plan in (WHOLE, copies)]
    assert "output_dist_forward" in phases[0]
    assert "output_dist_forward" not in phases[1]
    assert builder(copies).iteration_ms() > builder().iteration_ms()


def hybrid(world: int) -> HugeCtrBuilder:
    return builder(WHOLE, world, "a100-80gb", HUGECTR_V20)


def costs(hugectr: HugeCtrBuilder) -> dict[str, float]:
    return {f"{op.name} {op.phase}": float(op.cost_ms.max()) for op in hugectr.build().ops}


def test_the_hybrid_embedding_reduces_frequent_rows_across_hosts_only() -> None:
    one_host, two = hybrid(8), hybrid(16)
    assert one_host.split is not None
    assert two.split is not None
    assert not any(".cross" in name for name in costs(one_host))
    assert sum(".cross" in name for name in costs(two)) == 2
    fewer = replace(HUGECTR_V20, hybrid=HybridRule(0.03, 1e9))
    before = costs(two)["all-reduce gradients all_reduce"]
    two.use(fewer)
    assert two.split.elements == 0
    assert costs(two)["all-reduce gradients all_reduce"] < before
    before = costs(one_host)["all-reduce gradients all_reduce"]
    one_host.use(replace(HUGECTR_V20, hybrid=HybridRule(0.99, 1.0)))
    assert costs(one_host)["all-reduce gradients all_reduce"] == before


def test_on_one_host_a_frequent_row_is_fetched_once_a_rank() -> None:
    hugectr = hybrid(8)
    assert hugectr.split is not None
    moved = hugectr.split.infrequent + hugectr.split.needed
    assert hugectr.split.infrequent < moved < 1
    outputs = hugectr.loads[..., Load.OUTPUTS].sum()
    assert outputs == pytest.approx(moved * hugectr.plan_loads[..., Load.OUTPUTS].sum())


def test_a_hierarchical_lookup_stores_into_its_host_itself() -> None:
    """Pooling and the exchange over NVLink are one kernel, as long as the longer of the two."""
    hosts = [range(8), range(8, 16)]
    kind = ShardingType.TABLE_ROW_WISE
    hugectr = builder([cut(table, kind, hosts[i % 2]) for i, table in enumerate(TABLES)], 16)
    stores = hugectr.exchanges[0]
    assert costs(hugectr)["ebc.TWRW lookup embedding_forward"] >= float(
        hugectr._outputs(stores, backward=False)[0].cost_ms.max()
    )
    hugectr.use(replace(HUGECTR_V31, lookup_factor=0.0))
    assert costs(hugectr)["ebc.TWRW lookup embedding_forward"] > 0


def test_the_hybrid_embedding_balances_the_ranks() -> None:
    hugectr = builder()
    hugectr.use(HUGECTR_V20)
    assert hugectr.loads.std(axis=2).max() == pytest.approx(0, abs=1e-6)


@pytest.fixture(scope="module")
def measured() -> Rows:
    """The systems of rounds v3.0 and v3.1 that the constants were fitted to."""
    return Rows(EXCERPTS, lambda version: version >= (3, 0))


FITTED = ("lookup_factor", "update_factor", "gemm_factor", "step_us")


@pytest.mark.parametrize("constant", FITTED)
def test_the_shipped_constants_fit_better_than_their_neighbours(
    measured: Rows, constant: str
) -> None:
    """On the systems that they were fitted to; the fit itself is a slow test."""

    def loss(factor: float) -> float:
        def runtime(version: tuple[int, ...]) -> Runtime:
            shipped = runtime_of_round(version)
            return replace(shipped, **{constant: factor * getattr(shipped, constant)})

        return measured.loss(runtime)

    shipped = loss(1.0)
    assert shipped < 0.05
    assert shipped < min(loss(0.8), loss(1.25))


@pytest.mark.slow
def test_the_shipped_constants_are_those_of_the_fit() -> None:
    for fitted, shipped in zip(fit_dcnv2(EXCERPTS), (HUGECTR_V30, HUGECTR_V31), strict=True):
        assert fitted.update_factor == pytest.approx(shipped.update_factor, rel=0.05)
        assert fitted.gemm_factor == pytest.approx(shipped.gemm_factor, rel=0.05)
        assert fitted.lookup_factor == pytest.approx(shipped.lookup_factor, rel=0.1)
        assert fitted.step_us == pytest.approx(shipped.step_us, rel=0.05)
    hybrid_fit = fit_hybrid(EXCERPTS, HUGECTR_V31)
    assert hybrid_fit.update_factor == pytest.approx(HUGECTR_V20.update_factor, rel=0.05)
    assert hybrid_fit.step_us == pytest.approx(HUGECTR_V20.step_us, abs=20)


RULE = HybridRule(duplicates=0.03, bandwidth_ratio=0.7)


def test_a_row_at_the_threshold_is_twice_on_a_rank_with_the_chance_asked_for() -> None:
    batch, ranks = 65536, 8
    share = RULE.threshold(batch, ranks, 1) / batch
    local = batch // ranks
    pairs = local * (local - 1) / 2
    assert pairs * share**2 == pytest.approx(RULE.duplicates)


def test_across_hosts_an_exchange_and_a_reduction_cost_the_same() -> None:
    """``t`` occurrences leave their host with chance (h - 1) / h; one gradient goes round."""
    assert RULE.threshold(65536, 64, 8) == pytest.approx(8 * 0.7 * 8 / 7)
    assert RULE.threshold(1024, 64, 8) == RULE.threshold(65536, 64, 8)


def test_the_fuller_switch_counts_in_either_direction() -> None:
    right = np.array([[0.0] * 4 + [1.0] * 4])
    assert uplink_size(right, (4, 4), 4) == pytest.approx(1.0)
    assert uplink_size(right[:, ::-1], (4, 4), 4) == pytest.approx(1.0)
    # three cards take in five parts of eight from the other switch
    assert uplink_size(np.ones((1, 8)), (5, 3), 4) == pytest.approx(15 / 16)
