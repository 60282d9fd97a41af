"""Plans that a loader brings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torchrec")

from torchrec.distributed.planner.types import PlanLoader

from predictor.model.plan import ShardingPlan
from predictor.units import GIB
from search.space.build import whole_space
from search.space.option import place
from shardopt.torchrec import ShardoptPlanner
from shardopt.torchrec.plan.options import to_options
from tests.shardopt.torchrec.hook_models import (
    SHARDERS,
    Model,
    bag,
    factors,
    planner,
    problem_of,
    topology,
)

pytestmark = pytest.mark.usefixtures("kept_answers")


def loading(first: ShardoptPlanner) -> PlanLoader:
    """Loads the best plan of another planner, under the hashes of its options."""

    class Loader(PlanLoader):
        def load(self) -> dict[int, Any]:
            return {option.storage_hash(): option for option in first._best_plan}

        def plan_context_hash(self) -> str:
            return first.hash_planner_context_inputs_str()

        def get_plan_id(self) -> str:
            return "kept"

    return Loader()


def test_a_loaded_plan_is_not_searched_again() -> None:
    first = planner()
    first.plan(Model(), SHARDERS)
    second = planner(plan_loader=loading(first))
    plan = second.plan(Model(), SHARDERS)
    assert str(plan) == str(first.plan(Model(), SHARDERS))
    assert second.found.result is None
    assert second.found.plan == first.found.plan
    assert second.found.prediction.iteration_ms == first.found.prediction.iteration_ms


def test_a_plan_with_what_no_enumerator_lists_loads_again() -> None:
    """Cuts of columns and load factors that the search adds."""
    model = Model(bag("a", 4_000_000, 256), bag("b", 4_000_000, 256))
    told = factors(a=40.0, b=40.0)
    for constraint in told.values():
        constraint.sharding_types = ["column_wise"]
        constraint.compute_kernels = ["fused_uvm_caching"]
        constraint.min_partition = 64
    given = {"constraints": told, "topology": topology(4, 4 * GIB), "effort": 0.05}
    first = planner(**given)

    def cut(options: list[Any]) -> list[Any]:
        """A plan that the search may find."""
        problem = first.found or first._searched
        space = whole_space(problem.problem)
        wanted = ((2, 0.2), (4, 0.05))
        tables = {
            key: place(
                next(o for o in options if (o.num_shards, o.cache_load_factor) == want),
                range(want[0]),
            )
            for key, options, want in zip(space.keys, space.options, wanted, strict=True)
        }
        plan = ShardingPlan(tables, 4, 4)
        made = to_options(plan, problem.problem.workload, first._smallest.space)
        first._enumerator.populate_estimates(made)
        return made

    first._callbacks.insert(0, cut)
    plan = first.plan(model, SHARDERS)
    assert {len(t.ranks) for t in plan.plan["ebc"].values()} == {2, 4}
    assert first.found.changed
    again = planner(**given, plan_loader=loading(first)).plan(model, SHARDERS)
    assert str(again) == str(plan)
    assert [t.cache_params.load_factor for t in again.plan["ebc"].values()] == [0.2, 0.05]


def test_the_usual_load_factor_is_not_written_into_a_plan() -> None:
    told = factors(a=20.0, b=2.0)
    for constraint in told.values():
        constraint.compute_kernels = ["fused_uvm_caching"]
    made = planner(constraints=told)
    problem = problem_of(made, Model())
    workload, space = problem.workload, made._smallest.space
    tables = {
        key: place(next(o for o in options if o.cache_load_factor == 0.2), (0,))
        for key, options in zip(workload.keys, whole_space(problem).options, strict=True)
    }
    usual = to_options(ShardingPlan(tables, 4, 4), workload, space)
    assert {option.cache_load_factor for option in usual} == {None}
    key = workload.keys[0]
    tables[key] = replace(tables[key], parameters={"cache_params": {"load_factor": 0.5}})
    mixed = to_options(ShardingPlan(tables, 4, 4), workload, space)
    assert [option.cache_load_factor for option in mixed] == [0.5, 0.2]
