"""The separable costs follow the shards and agree in order with the timeline."""

from __future__ import annotations

import random

import numpy as np
import pytest

from predictor.model.plan import ShardingType
from search.surrogate import BACKWARD, FORWARD, IDS, OUTPUTS, PHASES
from tests.search.problems import a_problem, a_table, a_workload, hosts, objective_of, random_plan


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
