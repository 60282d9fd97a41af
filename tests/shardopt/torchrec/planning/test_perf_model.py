"""The parts of our planner in TorchRec's own: they take and leave what the planner does."""

from __future__ import annotations

import pytest

pytest.importorskip("torchrec")

from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator

from predictor.errors import InputError
from shardopt.torchrec import ShardoptPerfEstimator, ShardoptPerfModel
from tests.shardopt.torchrec.hook_models import SHARDERS, Model, factors, topology
from tests.shardopt.torchrec.left_modules import LEFT, holding


@pytest.mark.parametrize("kind", ["tower", "towers"])
def test_what_the_planner_leaves_to_torchrec_its_parts_leave_too(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, sharder, words = LEFT[kind]
    model, ranks = holding(make()), topology()
    rated = ShardoptPerfModel(ranks, model, [sharder()], 512, default_pooling_factor=3.0)
    costs = ShardoptPerfEstimator(ranks, default_pooling_factor=3.0)
    enumerator = EmbeddingEnumerator(
        ranks, 512, estimator=[costs, EmbeddingStorageEstimator(ranks)]
    )
    plan = EmbeddingShardingPlanner(
        topology=ranks,
        batch_size=512,
        enumerator=enumerator,
        performance_model=rated,
        debug=False,
    ).plan(model, [sharder()])
    assert plan.plan
    assert "rated by TorchRec's own estimate, which is not validated: " in caplog.text
    assert words in caplog.text


def test_ranks_that_do_not_fill_their_hosts_are_rated_by_torchrec() -> None:
    ranks = Topology(world_size=12, local_world_size=8, compute_device="cuda")
    told = factors(a=20.0, b=2.0)
    rated = ShardoptPerfModel(ranks, Model(), SHARDERS, 512, constraints=told)
    costs = ShardoptPerfEstimator(ranks, told)
    plan = EmbeddingShardingPlanner(
        topology=ranks,
        batch_size=512,
        constraints=told,
        enumerator=EmbeddingEnumerator(
            ranks, 512, told, estimator=[costs, EmbeddingStorageEstimator(ranks, told)]
        ),
        performance_model=rated,
        debug=False,
    ).plan(Model(), SHARDERS)
    assert set(plan.plan["ebc"]) == {"a", "b"}


def test_one_default_pooling_factor_for_the_parts_of_the_planner() -> None:
    ranks, model = topology(), Model()
    options = {}
    for name, more in (("told", {}), ("default", {"default_pooling_factor": 7.0})):
        told = factors(a=7.0, b=7.0) if name == "told" else {}
        costs = ShardoptPerfEstimator(ranks, told, **more)
        estimators = [costs, EmbeddingStorageEstimator(ranks, told)]
        found = EmbeddingEnumerator(ranks, 512, told, estimator=estimators)
        rated = ShardoptPerfModel(ranks, model, SHARDERS, 512, constraints=told, **more)
        options[name] = []
        for option in found.enumerate(model, SHARDERS):
            if option.sharding_type == "table_wise" and option.compute_kernel == "fused":
                option.shards[0].rank = 0
                options[name].append(option)
        options[name] = [
            [shard.perf.total for o in options[name] for shard in o.shards],
            rated.rate(options[name]),
        ]
    assert options["told"] == options["default"]
    with pytest.raises(InputError, match="default_pooling_factor is 0"):
        ShardoptPerfEstimator(ranks, default_pooling_factor=0.0)
    with pytest.raises(InputError, match="default_pooling_factor is -1"):
        ShardoptPerfModel(ranks, model, SHARDERS, 512, default_pooling_factor=-1.0)
