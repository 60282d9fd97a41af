"""2D sparse parallelism: planning for one sharding group of the ranks, as `DMPCollection` takes it.

Why: docs/decisions/0067.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from predictor.errors import InputError
from predictor.hardware.schema import HardwareProfile
from predictor.model.topology import ReplicaGroups, Topology
from predictor.model.workload import Workload
from search.problem import Problem
from shardopt.config.cluster import ClusterConfig
from shardopt.extras import needs_torchrec
from shardopt.torchrec.planning.machine import detect_hardware, read_cluster, read_topology

with needs_torchrec():
    from torchrec.distributed.planner import Topology as TorchRecTopology
    from torchrec.distributed.types import ShardingStrategy


@dataclass(frozen=True)
class Replicas:
    """How the ranks of a job form groups.

    Args:
        group: the ranks of one sharding group; its ``job`` are all ranks.
    """

    groups: ReplicaGroups
    group: Topology

    def planner_topology(self, job: TorchRecTopology) -> TorchRecTopology:
        """The topology of a sharding group, as TorchRec's planner takes it."""
        given = job.comms_bandwidths
        return TorchRecTopology(
            world_size=self.group.world_size,
            compute_device=job.compute_device,
            hbm_cap=min(self.group.hbm_cap_bytes),
            ddr_cap=min(self.group.ddr_cap_bytes),
            local_world_size=self.group.intra_group_size,
            hbm_mem_bw=job.hbm_mem_bw,
            ddr_mem_bw=job.ddr_mem_bw,
            generalized_comms_bandwidths=given,
        )

    @property
    def collection_arguments(self) -> dict[str, Any]:
        """What `DMPCollection` takes beside module, device, plan and process group."""
        facts = self.groups.facts(self.group.whole)
        return {
            "world_size": facts["world_size"],
            "sharding_group_size": self.groups.size,
            "node_group_size": facts["node_group_size"],
            "use_inter_host_allreduce": self.groups.use_inter_host_allreduce,
            "sharding_strategy": ShardingStrategy(self.groups.sharding_strategy),
        }


def find_replicas(
    groups: ReplicaGroups | None,
    job: TorchRecTopology | None,
    hardware: str | HardwareProfile | None,
    cluster: str | PathLike[str] | None,
) -> Replicas | None:
    """The groups of a job; None where tables have one copy.

    Raises:
        InputError: the job is not known, or the groups do not divide it.
    """
    if groups is None:
        return None
    if job is None:
        raise InputError(
            "replica groups divide all ranks of the job; give them as "
            "topology=Topology(world_size=..., local_world_size=..., compute_device=...)"
        )
    links = None if cluster is None else read_cluster(cluster, job)
    ranks = read_topology(job, detect_hardware(hardware, job.compute_device), links)
    group = groups.sharding_group(ranks)
    return None if group.job is None else Replicas(groups, group)


def problem_of(
    workload: Workload,
    left: TorchRecTopology,
    hardware: HardwareProfile,
    cluster: ClusterConfig | None,
    replicas: Replicas | None,
) -> Problem:
    """What the search takes.

    Args:
        left: the ranks that the plan covers, with the memory that the reservation left.

    Raises:
        InputError: TorchRec cannot average a table.
    """
    if replicas is None:
        ranks = read_topology(left, hardware, cluster)
        return Problem(replace(workload, replica_groups=None), ranks, hardware)
    workload = replace(workload, replica_groups=replicas.groups)
    workload.sharding_group(replicas.group.whole)
    ranks = read_topology(left, hardware)
    hbm, ddr = ranks.hbm_cap_bytes, ranks.ddr_cap_bytes
    group = replace(replicas.group, hbm_cap_bytes=hbm, ddr_cap_bytes=ddr)
    return Problem(workload, group, hardware)
