"""Loads of shards on their ranks, and the tables that share a lookup."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from predictor.cost.loads import VARIANCES, Load, ShardLoads
from predictor.model.distribution import Empirical, EmpiricalByRange, Zipf
from predictor.model.lookup_group import group_of
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.workload import Constraints, Feature, Table, Workload
from tests.builders import a_table, a_topology, a_workload, hardware, sharded, table_wise

T, K = ShardingType, ComputeKernel
TOPOLOGY = a_topology(4)


def load(workload: Workload, kind: ShardingType, kernel: ComputeKernel = K.FUSED) -> np.ndarray:
    plan = sharded(workload, TOPOLOGY, kind, kernel)[0]
    return ShardLoads(workload, TOPOLOGY, hardware()).of_table(0, plan)[1]


def test_a_whole_table_serves_the_samples_of_all_ranks() -> None:
    features = (Feature("f", 2.0, 3.0), Feature("g", 5.0))
    workload = a_workload(a_table(dim=64, features=features, weighted=True), batch_size=100)
    (shard,) = load(workload, T.TABLE_WISE)
    assert shard[Load.IDS] == pytest.approx(400 * 11)
    assert shard[Load.WEIGHTED_IDS] == shard[Load.IDS]
    assert shard[Load.BAGS] == 400 * 4
    assert shard[Load.OUTPUTS] == 400 * 4 * 64
    assert shard[Load.SHARDS] == 1
    assert shard[Load.GRADIENTS] == 0


def test_row_shards_split_the_ids_but_pool_every_sample() -> None:
    workload = a_workload(a_table(rows=1000), batch_size=100)
    shards = load(workload, T.ROW_WISE)
    assert shards[:, Load.IDS] == pytest.approx([200] * 4)
    assert shards[:, Load.OUTPUTS] == pytest.approx([400 * 64] * 4)
    sequence = a_workload(a_table(rows=1000, pooling="none"), batch_size=100)
    assert load(sequence, T.ROW_WISE)[:, Load.OUTPUTS] == pytest.approx([200 * 64] * 4)


def test_ids_of_a_row_shard_vary_where_those_of_the_table_do_not() -> None:
    workload = a_workload(a_table(rows=1000, features=(Feature("f", 1.0),)), batch_size=100)
    assert not load(workload, T.TABLE_WISE)[:, VARIANCES].any()
    assert (load(workload, T.ROW_WISE)[:, VARIANCES] > 0).all()


def test_a_replica_serves_its_own_batch_and_has_a_dense_gradient() -> None:
    workload = a_workload(a_table(rows=1000), batch_size=100)
    replicas = load(workload, T.DATA_PARALLEL, K.DENSE)
    assert replicas[:, Load.IDS] == pytest.approx([200] * 4)
    assert replicas[:, Load.OUTPUTS] == pytest.approx([100 * 64] * 4)
    assert replicas[:, Load.GRADIENTS] == pytest.approx([64_000] * 4)


def test_a_shard_of_the_dense_kernel_has_a_dense_gradient_wherever_it_is() -> None:
    named = Constraints(sharding_types=(T.TABLE_WISE, T.ROW_WISE), compute_kernels=(K.DENSE,))
    workload = a_workload(a_table(rows=1000, constraints=named), batch_size=100)
    assert load(workload, T.TABLE_WISE, K.DENSE)[:, Load.GRADIENTS].tolist() == [64_000]
    assert load(workload, T.ROW_WISE, K.DENSE)[:, Load.GRADIENTS].tolist() == [16_000] * 4


def test_low_ids_are_hot_in_frequency_order_alone() -> None:
    def ids(order: str) -> np.ndarray:
        feature = Feature("f", 10.0, 1.0, Zipf(1.1), order)
        workload = a_workload(a_table(rows=1000, features=(feature,)), batch_size=100)
        return load(workload, T.ROW_WISE)[:, Load.IDS]

    assert ids("random") == pytest.approx([1000] * 4)
    hot = ids("frequency")
    assert hot.sum() == pytest.approx(4000)
    assert (np.diff(hot) < 0).all()
    assert hot[0] > 2000


@pytest.mark.parametrize("order", ["random", "frequency"])
def test_rows_measured_by_range_go_to_their_shards(order: str) -> None:
    # the hot rows lie in the third quarter of the ids
    where = np.array([[0.0, 0.0, 100.0, 0.0], [250.0, 250.0, 150.0, 250.0]])
    law = EmpiricalByRange(Empirical((100.0, 900.0), (9.0, 1.0)), where, 250, 1000)
    feature = Feature("f", 10.0, 1.0, law, order)
    workload = a_workload(a_table(rows=1000, features=(feature,)), batch_size=100)
    ids = load(workload, T.ROW_WISE)[:, Load.IDS]
    assert ids == pytest.approx(np.array([250, 250, 1050, 250]) / 1800 * 4000)


def test_the_cache_load_factor_of_the_plan_counts() -> None:
    feature = Feature("f", 10.0, 1.0, Zipf(0.8))
    workload = a_workload(a_table(rows=10**6, features=(feature,)))
    plan = sharded(workload, TOPOLOGY, T.TABLE_WISE, K.FUSED_UVM_CACHING)[0]
    loads = ShardLoads(workload, TOPOLOGY, hardware())
    times = [
        loads.of_table(0, replace(plan, parameters={"cache_params": params}))[1][0, Load.FORWARD_MS]
        for params in ({"load_factor": 0.05}, None, {"load_factor": 0.2}, {"load_factor": 0.9})
    ]
    assert times[0] > times[1] == times[2] > times[3]


def group(table: Table, pipeline: str = "base", **more: object) -> object:
    return group_of(table, replace(table_wise(table), **more), pipeline)  # type: ignore[arg-type]


def test_tables_share_a_lookup_as_in_group_tables() -> None:
    base = group(a_table("a", dim=64))
    assert group(a_table("b", dim=128)) == base
    for kernel in (K.FUSED_UVM, K.FUSED_UVM_CACHING):
        assert group(a_table("b", dim=128), compute_kernel=kernel) == base
    for apart in (
        group(a_table(module="other")),
        group(a_table(data_type="fp16")),
        group(a_table(pooling="mean")),
        group(a_table(optimizer="adam")),
        group(a_table(), sharding_type=T.COLUMN_WISE),
        group(a_table(), compute_kernel=K.DENSE),
    ):
        assert apart != base


def test_with_index_dedup_every_rank_sends_its_distinct_ids() -> None:
    feature = Feature("f", 30.0, distribution=Zipf(1.2))
    table = a_table(rows=500, dim=8, features=(feature,), pooling="none", index_dedup=True)
    workload = a_workload(table, batch_size=64)
    rng = np.random.default_rng(0)
    bins = Zipf(1.2).bins(500)
    probs = np.repeat(bins.probs, bins.counts.astype(int))
    draws = rng.choice(len(probs), size=(200, 4, 64 * 30), p=probs / probs.sum())
    sent = np.mean([[len(np.unique(rank)) for rank in batch] for batch in draws])
    rows = np.mean([len(np.unique(batch)) for batch in draws])

    (shard,) = load(workload, T.TABLE_WISE)
    assert shard[Load.IDS] == pytest.approx(4 * sent, rel=0.01)
    assert shard[Load.OUTPUTS] == pytest.approx(4 * sent * 8, rel=0.01)
    assert shard[Load.EXPANDED] == pytest.approx(4 * 64 * 30 * 8)
    parts = load(workload, T.ROW_WISE)
    assert parts.sum(axis=0)[Load.IDS] == pytest.approx(4 * sent, rel=0.01)
    (everywhere, *_) = load(workload, T.DATA_PARALLEL, K.DENSE)
    assert everywhere[Load.IDS] == pytest.approx(sent, rel=0.01)

    plan = table_wise(table)
    lookup = ShardLoads(workload, TOPOLOGY, hardware())._lookup(
        table, feature, plan, plan.shards[0]
    )
    assert lookup.distinct_rows == pytest.approx(rows, rel=0.01)
