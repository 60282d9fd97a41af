"""The hook plans for one sharding group, and says what `DMPCollection` takes."""

import pytest

pytest.importorskip("torchrec")

import torch
import torchrec
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingStrategy
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from shardopt.torchrec import ReplicaGroups, ShardoptPlanner

RULES = {"t": ParameterConstraints(sharding_types=["table_wise"], pooling_factors=[2.0])}


def tables(optimizer: type[torch.optim.Optimizer]) -> torchrec.EmbeddingBagCollection:
    config = torchrec.EmbeddingBagConfig(
        num_embeddings=1000, embedding_dim=16, name="t", feature_names=["f"]
    )
    found = torchrec.EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    apply_optimizer_in_backward(optimizer, found.parameters(), {"lr": 0.1})
    return found


def planner(groups: ReplicaGroups, job: Topology | None = None) -> ShardoptPlanner:
    ranks = job or Topology(16, "cuda", local_world_size=8)
    return ShardoptPlanner(
        ranks, 64, constraints=RULES, replica_groups=groups, effort=0.02, debug=False, cache=False
    )


def test_a_plan_covers_a_group_of_all_ranks() -> None:
    made = planner(ReplicaGroups(4, 10))
    plan = made.plan(tables(torchrec.optim.RowWiseAdagrad), [EmbeddingBagCollectionSharder()])
    assert {r for t in plan.plan[""].values() for r in t.ranks} <= set(range(4))
    assert made.replicas is not None
    assert made.replicas.collection_arguments == {
        "world_size": 16,
        "sharding_group_size": 4,
        "node_group_size": 2,
        "use_inter_host_allreduce": False,
        "sharding_strategy": ShardingStrategy.DEFAULT,
    }
    assert made.found is not None
    topology = made.found.problem.topology
    assert (topology.world_size, topology.whole.world_size) == (4, 16)
    assert made.found.prediction.replica_sync is not None


def test_one_group_of_all_ranks_is_planned_as_ever() -> None:
    assert planner(ReplicaGroups(16)).replicas is None


def test_groups_that_do_not_divide_the_ranks() -> None:
    with pytest.raises(PlannerError, match="size is 3, which does not divide 16 ranks"):
        planner(ReplicaGroups(3))


def test_a_job_must_be_known() -> None:
    with pytest.raises(PlannerError, match="replica groups divide all ranks of the job"):
        ShardoptPlanner(batch_size=64, replica_groups=ReplicaGroups(2))


def test_optimizers_that_torchrec_cannot_average() -> None:
    made = planner(ReplicaGroups(4))
    with pytest.raises(PlannerError, match="table 't' has the optimizer adam"):
        made.plan(tables(torch.optim.Adam), [EmbeddingBagCollectionSharder()])
