"""The separable costs follow the shards and agree in order with the timeline."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from predictor.cost.loads import LAUNCH
from predictor.model.distribution import Zipf
from predictor.model.plan import ShardingType
from search.bound.choices import BoundChoices
from search.improve.cycle_cuts import time_of
from search.space.option import place
from search.surrogate import BACKWARD, FORWARD, IDS, OUTPUTS, PHASES
from tests.search.problems import (
    a_problem,
    a_table,
    a_workload,
    hosts,
    objective_of,
    random_plan,
    random_problem,
)


@pytest.mark.parametrize("world", [(2, 2), (4, 2)])
def test_every_option_has_finite_phases(world: tuple[int, int]) -> None:
    workload = a_workload(a_table("a", dim=128), a_table("b", 50, 16, pooling="none"))
    objective, surrogate = objective_of(a_problem(workload, hosts(*world)))
    for option in (o for options in objective.space.options for o in options):
        phases = surrogate.phases(option)
        assert phases.shape == (option.num_shards, PHASES)
        assert np.isfinite(phases).all()
        assert (phases >= 0).all()
        local = option.sharding_type is ShardingType.DATA_PARALLEL
        assert (phases[:, [IDS, OUTPUTS]].sum() == 0) == local


def test_more_lookups_cost_more() -> None:
    workload = a_workload(a_table("few", pooling_factor=2.0), a_table("many", pooling_factor=50.0))
    objective, surrogate = objective_of(a_problem(workload, hosts(2)))
    few, many = (
        surrogate.phases(next(o for o in opts if o.sharding_type is ShardingType.TABLE_WISE))
        for opts in objective.space.options
    )
    assert (many[0, [FORWARD, BACKWARD, IDS]] > few[0, [FORWARD, BACKWARD, IDS]]).all()
    assert many[0, OUTPUTS] == pytest.approx(few[0, OUTPUTS])


@pytest.mark.parametrize("seed", range(4))
def test_loads_of_a_plan_are_those_of_the_scorer(seed: int) -> None:
    objective, surrogate = objective_of(random_problem(seed))
    for _ in range(3):
        plan = random_plan(objective, random.Random(seed))
        totals = surrogate.totals(plan)
        assert totals == pytest.approx(objective.scorer.totals(objective.table_plans(plan)))
        assert time_of(surrogate, plan) == pytest.approx(objective.score([plan])[0], rel=1e-12)


def test_balance_on_the_surrogate_is_balance_on_the_timeline() -> None:
    """A better surrogate is rarely a worse timeline, among placements of one choice of options."""
    tables = (a_table(f"t{i}", 10**6, 128, 5.0 * (i + 1)) for i in range(8))
    workload = a_workload(*tables, batch_size=32768)
    objective, surrogate = objective_of(a_problem(workload, hosts(4)))
    options = [next(o for o in opts if o.label == "TW/fused") for opts in objective.space.options]
    rng = random.Random(0)
    plans = [tuple((o, (rng.randrange(4),)) for o in options) for _ in range(60)]
    sums = []
    for plan in plans:
        loads = np.zeros((4, PHASES))
        for option, ranks in plan:
            np.add.at(loads, list(ranks), surrogate.phases(option))
        sums.append(float(loads.max(axis=0).sum()))
    ranked = [np.argsort(np.argsort(values)) for values in (sums, objective.score(plans))]
    assert np.corrcoef(*ranked)[0, 1] > 0.9


def test_random_plans_are_scored_without_a_warning() -> None:
    objective, _ = objective_of(a_problem(a_workload(a_table()), hosts(1)))
    assert np.isfinite(objective.score([random_plan(objective, random.Random(0))])).all()


@pytest.mark.parametrize("id_order", ["random", "frequency"])
def test_loads_by_kind_of_shard_are_those_of_the_placed_plan(id_order: str) -> None:
    """Rows that do not divide, and rows of unlike popularity, make shards differ."""
    table = a_table("a", 1003, 256, 20.0)
    feature = replace(table.features[0], distribution=Zipf(1.1), id_order=id_order)
    workload = a_workload(replace(table, features=(feature,)), a_table("b", 50, 64))
    problem = a_problem(workload, hosts(8, 4))
    objective, surrogate = objective_of(problem)
    scorer = objective.scorer
    choices = BoundChoices(problem, objective.space, scorer)
    for number, choice in enumerate(choices.all):
        option = choice.option
        ranks = [rank for unit in objective.legal(option).units for rank in unit[0]]
        plan, of_shard = place(option, ranks), scorer.shards.of_shard
        placed = np.stack([of_shard(option.table, plan, shard) for shard in plan.shards])
        assert (surrogate.shard_loads(option)[1] == placed).all()
        placed[:, LAUNCH] = 0.0
        assert (choices.shards_of(choice) == placed).all()
        rows = slice(choices.first[number], choices.first[number] + choices.sizes[number])
        assert choices.copies[rows].sum() == option.num_shards
        assert choices.copies[rows] @ choices.shards[rows] == pytest.approx(placed.sum(axis=0))
        assert id_order == "frequency" or choices.sizes[number] <= 2
