"""Topologies and hardware profiles of several devices."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchrec")

import torch
from torch import nn
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from tests.shardopt.torchrec.hook_models import (
    SHARDERS,
    Model,
    bag,
    factors,
    planner,
    topology,
)

pytestmark = pytest.mark.usefixtures("kept_answers")


@pytest.mark.parametrize(
    ("device", "hardware", "words"),
    [
        ("cpu", "h100-sxm", "topology is of cpu.*h100-sxm is of cuda"),
        ("cuda", "cpu-gloo", "topology is of cuda.*cpu-gloo is of cpu"),
        ("mtia", None, "of mtia devices.*cuda and cpu only"),
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


def test_a_cluster_file_says_what_the_topology_cannot(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    given = {"constraints": factors(a=20.0, b=2.0), "batch_size": 512}
    ranks = topology(4, local_world_size=2)
    flat = planner(topology=ranks, hardware="a100-80gb", **given)
    narrow = planner(topology=ranks, cluster=file, **given)
    for made in (flat, narrow):
        made.plan(Model(), SHARDERS)
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


def test_tables_with_a_fused_optimizer_are_not_replicated_on_cpus() -> None:
    """TorchRec offers it, and its DistributedDataParallel refuses it."""
    fused = FusedEmbeddingBagCollection(
        [bag("a", 100), bag("b", 100)], torch.optim.SGD, {"lr": 0.1}, device=torch.device("meta")
    )
    model = nn.ModuleDict({"x": fused})
    made = planner(topology=Topology(world_size=2, compute_device="cpu"), hardware="cpu-gloo")
    plan = made.plan(model, [FusedEmbeddingBagCollectionSharder()]).plan["x"]
    assert "data_parallel" not in {sharding.sharding_type for sharding in plan.values()}


def test_ranks_that_do_not_fill_hosts_are_planned_as_torchrec_does() -> None:
    given = {"constraints": factors(a=20.0, b=2.0), "batch_size": 512, "debug": False}
    made = planner(topology=topology(12, local_world_size=8), **given)
    theirs = EmbeddingShardingPlanner(topology(12, local_world_size=8), **given)
    assert str(made.plan(Model(), SHARDERS)) == str(theirs.plan(Model(), SHARDERS))
    assert made.found is None
