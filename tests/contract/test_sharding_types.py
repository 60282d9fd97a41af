"""Every table of sharding types has every type: one that is missing would be priced as nothing."""

from __future__ import annotations

import pytest

from predictor.cost.loads import SUMMED_FIRST
from predictor.iteration.torchrec.sparse import TYPE_ORDER
from predictor.model.plan import (
    ROW_SPLITS,
    ComputeKernel,
    ShardingPlan,
    ShardingType,
    TablePlan,
)
from predictor.model.plan_check import RuntimeSetting, find_mean_problem, find_runtime_problem
from predictor.model.workload import Constraints
from search.bound.choices import BY_ROW
from search.space.enumerate import enumerate_space
from search.space.option import PARTITION, Option, place
from shardopt.formatting import type_mix
from tests.builders import a_table, a_topology, a_workload


def test_exchanges_have_an_order_among_all_types() -> None:
    assert sorted(TYPE_ORDER) == sorted(ShardingType)


def test_shards_of_every_type_are_bound_to_ranks_in_some_way() -> None:
    assert sorted(PARTITION) == sorted(ShardingType)


def test_reports_name_every_type() -> None:
    tables = {kind.value: TablePlan(kind, ComputeKernel.FUSED, ()) for kind in ShardingType}
    assert len(type_mix(ShardingPlan(tables, 1, 1)).split(", ")) == len(ShardingType)


def test_partial_sums_come_from_types_that_split_rows() -> None:
    assert set(SUMMED_FIRST) == ROW_SPLITS


@pytest.mark.parametrize("kind", ShardingType)
def test_means_by_row_are_the_same_for_filters_bound_and_check(kind: ShardingType) -> None:
    by_row = Option(0, kind, ComputeKernel.FUSED, (), ()).by_row
    assert (kind in BY_ROW) == by_row
    beside = {"mean": (kind, "mean"), "other": (ShardingType.TABLE_WISE, "sum")}
    assert (find_mean_problem(beside) is not None) == by_row


@pytest.mark.parametrize("kind", ShardingType)
def test_a_constraint_that_names_a_type_gets_plans_that_run(kind: ShardingType) -> None:
    topology = a_topology(4, 2)
    wants = Constraints(sharding_types=(kind,))
    workload = a_workload(a_table(rows=999, dim=256, constraints=wants))
    setting = RuntimeSetting((999, 256), "sum", 4, 2, "cuda")
    ((*options,),) = enumerate_space(workload, topology).options
    assert {option.sharding_type for option in options} == {kind}
    for option in options:
        first = [rank for run in option.legal_ranks(topology).units for rank in run[0]]
        assert find_runtime_problem(place(option, first), setting) is None
