"""A 1 % sample predicts what all the data would."""

from __future__ import annotations

import numpy as np
import pytest

from predictor.cost.loads import Load, ShardLoads
from predictor.model.distribution import EmpiricalByRange
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.workload import Feature
from predictor.predict import predict
from tests.builders import a_table, a_topology, a_workload, device_bound, hardware, plan_of, sharded
from tests.quick import quick_first, quick_only
from tests.shardopt.stats.id_distributions import DISTRIBUTIONS, counted, draw, measured

ROWS = 500_000
IDS = 2_000_000
RANKS = 4
TOPOLOGY = a_topology(RANKS)


def predicted(distribution: EmpiricalByRange, kind: ShardingType, pooling: float) -> np.ndarray:
    """Iteration, and forward and backward of the busiest rank, ms."""
    feature = Feature("f", pooling, distribution=distribution)
    # as many draws an iteration as the sample has
    batch = int(IDS / 100 / RANKS / pooling)
    workload = a_workload(a_table(rows=ROWS, dim=128, features=(feature,)), batch_size=batch)
    plan = sharded(workload, TOPOLOGY, kind, ComputeKernel.FUSED)
    loads = ShardLoads(workload, TOPOLOGY, hardware()).of_table(0, plan[0])[1].max(axis=0)
    iteration = predict(workload, TOPOLOGY, device_bound(), plan_of(workload, TOPOLOGY, plan))
    return np.array([iteration.iteration_ms, loads[Load.FORWARD_MS], loads[Load.BACKWARD_MS]])


@pytest.mark.parametrize("shuffled", quick_first(1, [True, False]))
@pytest.mark.parametrize(
    ("name", "pooling"),
    quick_only(
        [("flat head", 1), ("zipf 1.05", 5)],
        [*((name, 1) for name in DISTRIBUTIONS), ("zipf 1.05", 5)],
    ),
)
def test_a_hundredth_of_the_samples_is_enough(name: str, pooling: int, shuffled: bool) -> None:
    ids = draw(DISTRIBUTIONS[name], ROWS, IDS, 11, shuffled=shuffled)
    bags = ids.reshape(-1, pooling)
    picked = np.random.default_rng(12).random(len(bags)) < 0.01
    full, sample = measured(counted(ids), ROWS), measured(counted(bags[picked].ravel()), ROWS)
    for kind in (ShardingType.TABLE_WISE, ShardingType.ROW_WISE):
        wrong = abs(predicted(sample, kind, pooling) / predicted(full, kind, pooling) - 1.0)
        # a backward costs little but its distinct rows, of which a sample tells least
        assert (wrong < [0.01, 0.02, 0.035]).all(), wrong
