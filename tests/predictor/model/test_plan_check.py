"""Plans that do not fit their model or ranks are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.errors import PlanError
from predictor.model.plan import SERVED, ComputeKernel, Shard, ShardingPlan, TablePlan
from predictor.model.plan import ShardingType as T
from predictor.model.plan_check import (
    RuntimeSetting,
    find_runtime_problem,
    in_torchrec_order,
    match_plan,
)
from tests.builders import a_table, a_topology, a_workload, plan_of, sharded, table_wise


def test_what_does_not_fit_the_model_is_named() -> None:
    workload, topology = a_workload(a_table("cat_0"), a_table("cat_1")), a_topology(2)
    good = plan_of(workload, topology, tuple(table_wise(t) for t in workload.tables))

    def message(plan: ShardingPlan) -> str:
        with pytest.raises(PlanError) as caught:
            match_plan(workload, topology, plan)
        return str(caught.value)

    assert "for 4 ranks, the topology has 2" in message(replace(good, world_size=4))
    tables = dict(good.tables)
    moved = tables.pop("cat_1")
    assert message(replace(good, tables=tables)).startswith("the plan does not place table 'cat_1'")
    extra = {**good.tables, "cat_11": moved}
    assert "'cat_11', which the model does not have (did you mean" in message(
        replace(good, tables=extra)
    )
    outside = TablePlan(T.TABLE_WISE, ComputeKernel.FUSED, (Shard(2, (0, 0), (100_000, 64)),))
    error_text = message(replace(good, tables={**good.tables, "cat_0": outside}))
    assert error_text == "table 'cat_0' has a shard on rank 2; ranks are 0 to 1"
    assert match_plan(workload, topology, good) == tuple(good.tables.values())


@pytest.mark.parametrize("kind", [kind for kind in T if kind is not T.GRID_SHARD])
def test_inference_runs_the_types_of_its_sharders(kind: T) -> None:
    workload, topology = a_workload(a_table("t")), a_topology(2)
    kernel = ComputeKernel.DENSE if kind is T.DATA_PARALLEL else ComputeKernel.FUSED
    plan = in_torchrec_order(sharded(workload, topology, kind, kernel)[0])
    setting = RuntimeSetting((100_000, 64), "sum", 2, 2, "cuda")
    assert find_runtime_problem(plan, setting) is None
    served = find_runtime_problem(plan, replace(setting, training=False))
    assert (served is None) == (kind in SERVED)
