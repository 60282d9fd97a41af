"""Topologies, hardware profiles of several devices, and groups of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec
from torchrec.distributed import comm
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingStrategy
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from predictor.errors import InputError
from shardopt.torchrec import ReplicaGroups, ShardoptPlanner
from tests.shardopt.torchrec.hook_models import (
    EFFORT,
    SHARDERS,
    Model,
    bag,
    factors,
    planner,
    topology,
)


@pytest.mark.parametrize(
    ("device", "hardware", "words"),
    [
        ("cpu", "h100-sxm", "topology has cpu.*h100-sxm is for cuda"),
        ("cuda", "cpu-gloo", "topology has cuda.*cpu-gloo is for cpu"),
    ],
)
def test_hardware_of_another_device_is_told(device: str, hardware: str, words: str) -> None:
    ranks = Topology(world_size=2, compute_device=device)
    with pytest.raises(PlannerError, match=words):
        planner(topology=ranks, hardware=hardware)


CLUSTER = """\
schema: 1
hosts: 2
ranks_per_host: 2
levels: [{name: pods, oversubscription: 8}]
hardware: a100-80gb
"""


@pytest.mark.slow
def test_a_cluster_file_says_what_the_topology_cannot(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    arguments = {"constraints": factors(a=20.0, b=2.0), "batch_size": 512}
    ranks = topology(4, local_world_size=2)
    flat = planner(topology=ranks, hardware="a100-80gb", **arguments)
    narrow = planner(topology=ranks, cluster=file, **arguments)
    for hook in (flat, narrow):
        hook.plan(Model(), SHARDERS)
    assert flat.found is not None
    assert flat.found.result is not None
    assert narrow.found is not None
    assert narrow.found.result is not None
    assert narrow.found.problem.hardware.name == "a100-80gb"
    assert [level.name for level in narrow.found.problem.topology.network] == ["pods"]
    assert narrow.found.result.best.iteration_ms > flat.found.result.best.iteration_ms


def test_a_cluster_of_other_ranks_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    words = r"has 4 ranks, 2 a host, in groups of 2.*topology has 8, 8 and 8.*pod_size"
    with pytest.raises(PlannerError, match=words):
        planner(topology=topology(8, local_world_size=8), cluster=file)


def test_ranks_that_do_not_fill_hosts_are_planned_as_torchrec_does() -> None:
    arguments = {"constraints": factors(a=20.0, b=2.0), "batch_size": 512, "debug": False}
    hook = planner(topology=topology(12, local_world_size=8), **arguments)
    torchrec_planner = EmbeddingShardingPlanner(topology(12, local_world_size=8), **arguments)
    assert str(hook.plan(Model(), SHARDERS)) == str(torchrec_planner.plan(Model(), SHARDERS))
    assert hook.found is None


RULES = {"t": ParameterConstraints(sharding_types=["table_wise"], pooling_factors=[2.0])}


def tables(optimizer: type[torch.optim.Optimizer]) -> torchrec.EmbeddingBagCollection:
    collection = Model(bag("t", 1000, 16)).ebc
    apply_optimizer_in_backward(optimizer, collection.parameters(), {"lr": 0.1})
    return collection


def grouped_planner(
    groups: ReplicaGroups, job: Topology | None = None, **more: Any
) -> ShardoptPlanner:
    arguments = {"constraints": RULES, "effort": EFFORT, "debug": False, "cache": False, **more}
    ranks = job or Topology(16, "cuda", local_world_size=8)
    return ShardoptPlanner(ranks, 64, replica_groups=groups, **arguments)


def test_a_plan_covers_a_group_of_all_ranks() -> None:
    hook = grouped_planner(ReplicaGroups(4, 10))
    plan = hook.plan(tables(torchrec.optim.RowWiseAdagrad), [EmbeddingBagCollectionSharder()])
    assert {r for t in plan.plan[""].values() for r in t.ranks} <= set(range(4))
    assert hook.replicas is not None
    assert hook.replicas.collection_arguments == {
        "world_size": 16,
        "sharding_group_size": 4,
        "node_group_size": 2,
        "use_inter_host_allreduce": False,
        "sharding_strategy": ShardingStrategy.DEFAULT,
    }
    assert hook.found is not None
    topology = hook.found.problem.topology
    assert (topology.world_size, topology.whole.world_size) == (4, 16)
    assert hook.found.prediction.replica_sync is not None


@pytest.mark.parametrize(("pod", "expected"), [(None, 8), (1, 8), (2, 4), (4, 2)])
def test_a_runtime_that_multiplies_by_its_pod_forms_the_same_groups(
    monkeypatch: pytest.MonkeyPatch, pod: int | None, expected: int
) -> None:
    """TorchRec's `intra_and_cross_node_pg_2D` does so since pull request 4726."""
    racks = Topology(32, "cuda", local_world_size=4, pod_size=4)
    hook = grouped_planner(ReplicaGroups(16, use_inter_host_allreduce=False), racks)
    assert hook.replicas is not None
    group = hook.replicas.group.intra_group_size
    assert hook.replicas.collection_arguments["node_group_size"] == group == 8
    monkeypatch.setattr(comm, "get_resolved_pod_size", lambda: pod, raising=False)
    node_group_size = hook.replicas.collection_arguments["node_group_size"]
    assert node_group_size == expected
    assert node_group_size * (pod or 1) == group


def test_a_pod_that_does_not_divide_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = grouped_planner(ReplicaGroups(4))
    assert hook.replicas is not None
    monkeypatch.setattr(comm, "get_resolved_pod_size", lambda: 3, raising=False)
    with pytest.raises(InputError, match="TORCHREC_RESOLVED_POD_SIZE is 3"):
        _ = hook.replicas.collection_arguments


def test_groups_that_do_not_divide_the_ranks() -> None:
    with pytest.raises(PlannerError, match="size is 3, which does not divide 16 ranks"):
        grouped_planner(ReplicaGroups(3))


def test_a_job_must_be_known() -> None:
    with pytest.raises(PlannerError, match="replica groups divide all ranks of the job"):
        ShardoptPlanner(batch_size=64, replica_groups=ReplicaGroups(2))


def test_optimizers_that_torchrec_cannot_average(caplog: pytest.LogCaptureFixture) -> None:
    of_adam, sharders = tables(torch.optim.Adam), [EmbeddingBagCollectionSharder()]
    with pytest.raises(PlannerError, match="table 't' has the optimizer adam"):
        grouped_planner(ReplicaGroups(4), strict=True).plan(of_adam, sharders)
    assert grouped_planner(ReplicaGroups(4)).plan(of_adam, sharders).plan
    assert "table 't' has the optimizer adam" in caplog.text
