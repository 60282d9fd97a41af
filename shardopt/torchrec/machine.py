"""A planner's machine: ranks and memory of the Topology, costs of the device, groups of ranks.

Costs come from the profile. The bandwidths of TorchRec's Topology are looked at and not used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from predictor import units
from predictor.errors import InputError
from predictor.hardware.device_names import profile_of_device
from predictor.hardware.loader import DEFAULT_HARDWARE, load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.memory.peak import limit_processes
from predictor.model.topology import ReplicaGroups, Topology
from predictor.model.workload import Workload
from search.problem import Problem
from shardopt.config.cluster import (
    ClusterConfig,
    default_nvlink_domain,
    hardware_of,
    load_cluster,
)
from shardopt.extras import needs_torchrec
from shardopt.logs import logger, silence_torchrec
from shardopt.torchrec.tables import configs_of, find_embedding_modules

with needs_torchrec():
    import torch
    from torch import nn
    from torchrec.distributed import comm
    from torchrec.distributed.planner import Topology as TorchRecTopology
    from torchrec.distributed.planner.types import PlannerError, PlannerErrorType
    from torchrec.distributed.types import ShardingStrategy
    from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS

DEVICES = ("cuda", "cpu")
CPU_PROFILE = "cpu-gloo"
MOST_GB_S = 100_000.0
"""Above any memory or link of a GPU (HBM3e: 8,000). Bytes/s mistaken for bytes/ms exceed it."""


def read_topology(
    theirs: TorchRecTopology, hardware: HardwareProfile, cluster: ClusterConfig | None = None
) -> Topology:
    """Ranks and memory caps of TorchRec's topology, as the reservation left them.

    The NVLink domain is the profile's, unless the topology joins hosts into pods.

    Args:
        cluster: what it says of links counts; its ranks are those of the topology.

    Raises:
        InputError: the ranks do not fill their hosts.
    """
    world = theirs.world_size
    local = min(theirs.local_world_size, world)
    group = min(theirs.intra_group_size, world)  # a job may have a part of one host
    domain = group if group > local else min(default_nvlink_domain(hardware, world, local), group)
    if cluster is not None:
        domain = cluster.nvlink_domain
    return Topology(
        world,
        local,
        tuple(int(device.storage.hbm) for device in theirs.devices),
        tuple(int(device.storage.ddr) for device in theirs.devices),
        domain,
        network=cluster.network if cluster is not None else (),
    )


def read_cluster(path: str | PathLike[str], theirs: TorchRecTopology) -> ClusterConfig:
    """The cluster file of a topology.

    Raises:
        InputError: it cannot be used, or has other hosts or NVLink domains that span hosts.
    """
    cluster = load_cluster(Path(path))
    local = cluster.ranks_per_host
    group = max(local, cluster.nvlink_domain)
    actual = (cluster.world_size, local, group)
    expected = (theirs.world_size, theirs.local_world_size, theirs.intra_group_size)
    if actual != expected:
        raise InputError(
            f"cluster file {path} has {actual[0]} ranks, {actual[1]} a host, in groups of "
            f"{actual[2]} joined by NVLink; the topology has {expected[0]}, {expected[1]} and "
            f"{expected[2]}: give both the same (Topology's pod_size says how many hosts NVLink "
            "joins)"
        )
    return cluster


class TooLargeError(PlannerError):
    """A table that no planner can place."""


def check_table_sizes(module: nn.Module, theirs: TorchRecTopology, reserved: str) -> None:
    """Refuse a table whose weights alone exceed all memory of all ranks.

    TorchRec's enumerator would estimate each of its shards first, which takes minutes where a wide
    table has tens of thousands of them.

    Args:
        reserved: what the reservation says of itself, for the message.

    Raises:
        TooLargeError: names the table.
    """
    storages = [device.storage for device in theirs.devices]
    room = sum(s.hbm + s.ddr + getattr(s, "ssd", 0) for s in storages)
    for path, _, inner in find_embedding_modules(module):
        for config in configs_of(inner):
            elements = config.num_embeddings * config.embedding_dim
            need = elements * DATA_TYPE_NUM_BITS[config.data_type] // 8
            # a virtual table has rows only where ids occur
            if need > room and not getattr(config, "use_virtual_table", False):
                raise TooLargeError(
                    error_type=PlannerErrorType.INSUFFICIENT_STORAGE,
                    message=f"table '{config.name}' of module '{path}': its weights take "
                    f"{units.format_bytes(need)}, and the {theirs.world_size} ranks have "
                    f"{units.format_bytes(room)} of device and host memory together ({reserved}); "
                    "use more ranks, or fewer rows, fewer columns or a smaller data type",
                )


COSTS = (
    *("hbm_mem_bw", "ddr_mem_bw", "hbm_to_ddr_mem_bw", "ssd_mem_bw"),
    *("intra_host_bw", "inter_host_bw"),
    *("bwd_compute_multiplier", "weighted_feature_bwd_compute_multiplier"),
)
"""Parameters of TorchRec's Topology that its planner computes costs from; bandwidths first."""


def usual_topology(theirs: TorchRecTopology) -> TorchRecTopology:
    """The same ranks with TorchRec's own bandwidths."""
    local = theirs.local_world_size
    with silence_torchrec():
        return TorchRecTopology(
            world_size=theirs.world_size,
            compute_device=theirs.compute_device,
            local_world_size=local,
            pod_size=max(1, theirs.intra_group_size // local),
        )


def given_costs(theirs: TorchRecTopology) -> dict[str, float]:
    """The parameters among `COSTS` that are not TorchRec's own, with their values."""
    costs, usual = _costs_of(theirs), _costs_of(usual_topology(theirs))
    return {name: value for name, value in costs.items() if value != usual.get(name)}


def _costs_of(theirs: TorchRecTopology) -> dict[str, float]:
    sources = (theirs, theirs.comms_bandwidths)
    return {
        name: float(getattr(source, name))
        for name in COSTS
        for source in sources
        if hasattr(source, name)
    }


def check_bandwidths(theirs: TorchRecTopology) -> None:
    """Name the costs of a Topology that are not used, and warn of bytes/s: TorchRec's bandwidths
    are bytes/ms.

    Costs never come from the Topology, but its author may use it for other planners too.
    """
    costs = given_costs(theirs)
    fast = {n: v for n, v in costs.items() if n.endswith("_bw") and v > units.gb_per_s(MOST_GB_S)}
    for name, value in fast.items():
        logger.warning(
            "Topology(%s=%g) is %g GB/s, more than any hardware has, and not used here. "
            "TorchRec's unit is bytes per millisecond: for %g GB/s give %s=%g",
            name,
            value,
            value / units.gb_per_s(1),
            value / 1e9,
            name,
            value / 1e3,
        )
    rest = ", ".join(f"{name}={value:g}" for name, value in costs.items() if name not in fast)
    if rest:
        _tell_unused(rest)


@cache
def _tell_unused(costs: str) -> None:
    """Warn once per process, because several parts of a planner take the same Topology."""
    logger.warning(
        "Topology(%s): these are not used, because costs come from a hardware profile; hardware= "
        "selects one",
        costs,
    )


def unknown_device(device: str) -> InputError:
    """The error of a device without costs."""
    return InputError(
        f"the topology has {device} devices, and shardopt knows the costs of "
        f"{' and '.join(DEVICES)} only; TorchRec's EmbeddingShardingPlanner plans for it"
    )


def detect_hardware(hardware: str | HardwareProfile | None, device: str) -> HardwareProfile:
    """The given profile, else that of the GPU found here, else the default; the choice is logged.

    Args:
        device: type of the device to plan for, ``cuda`` or ``cpu``.

    Raises:
        InputError: there is no profile of such a device, or the given one is of another.
    """
    if device not in DEVICES:
        raise unknown_device(device)
    if hardware is not None:
        profile = hardware if isinstance(hardware, HardwareProfile) else load_hardware(hardware)
        if profile.device != device:
            raise InputError(
                f"the topology has {device} devices, but the hardware profile {profile.name} is "
                f"for {profile.device}; give a profile for {device} devices as hardware, or "
                f"Topology(compute_device='{profile.device}')"
            )
        return profile
    gpu_name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    if device == "cpu":
        name, why = CPU_PROFILE, "the topology is of CPUs"
    else:
        name = profile_of_here(device) or DEFAULT_HARDWARE
        why = f"the GPU here is {gpu_name}" if gpu_name else "the default, as there is no GPU here"
    logger.info("using hardware profile %s (%s); hardware= selects another", name, why)
    return load_hardware(name)


def profile_of_here(device: str) -> str | None:
    """Return the name of the shipped profile for this host's devices; None if there is none, so
    that the profile of another machine is used."""
    if device == "cpu" or not torch.cuda.is_available():
        return None
    return profile_of_device(torch.cuda.get_device_name(0))


@dataclass(frozen=True)
class Replicas:
    """Groups of the ranks of a job.

    Args:
        group: the ranks of one sharding group; its ``job`` are all ranks.
    """

    groups: ReplicaGroups
    group: Topology

    def planner_topology(self, job: TorchRecTopology) -> TorchRecTopology:
        """The topology of a sharding group, as TorchRec's planner takes it."""
        bandwidths = job.comms_bandwidths
        return TorchRecTopology(
            world_size=self.group.world_size,
            compute_device=job.compute_device,
            hbm_cap=min(self.group.hbm_cap_bytes),
            ddr_cap=min(self.group.ddr_cap_bytes),
            local_world_size=self.group.intra_group_size,
            hbm_mem_bw=job.hbm_mem_bw,
            ddr_mem_bw=job.ddr_mem_bw,
            generalized_comms_bandwidths=bandwidths,
        )

    @property
    def collection_arguments(self) -> dict[str, Any]:
        """Return `DMPCollection`'s arguments beside module, device, plan and process group."""
        facts = self.groups.facts(self.group.whole)
        return {
            "world_size": facts["world_size"],
            "sharding_group_size": self.groups.size,
            "node_group_size": _node_group_size(facts["node_group_size"]),
            "use_inter_host_allreduce": self.groups.use_inter_host_allreduce,
            "sharding_strategy": ShardingStrategy(self.groups.sharding_strategy),
        }


def _node_group_size(ranks: int) -> int:
    """``node_group_size`` with which the installed runtime forms groups of so many ranks.

    Up to 1.9 that is the ranks themselves. Since pull request 4726 (2026-09) the runtime multiplies
    it by the pod size of TORCHREC_RESOLVED_POD_SIZE, which the group of a plan already contains.

    Raises:
        InputError: no multiple of that pod has so many ranks.
    """
    resolved = getattr(comm, "get_resolved_pod_size", None)
    pod = (resolved() if resolved is not None else None) or 1
    if ranks % pod:
        raise InputError(
            f"TORCHREC_RESOLVED_POD_SIZE is {pod}, but the plan splits rows within {ranks} ranks, "
            "which it does not divide; plan with the pod_size of the job in Topology, or unset it"
        )
    return ranks // int(pod)


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


class Machine(NamedTuple):
    """Costs and links of the ranks.

    Args:
        links: a cluster file; None where the profile and the topology say it all.
        stand_in: the profile is of another machine, as nobody named one and none of this is known.
    """

    hardware: HardwareProfile
    links: ClusterConfig | None
    replicas: Replicas | None
    stand_in: bool

    def problem(self, workload: Workload, free_topology: TorchRecTopology) -> Problem:
        """Return the problem that the search solves.

        Args:
            free_topology: ranks of the plan with the memory that the reservation left.

        Raises:
            InputError: TorchRec cannot average a table.
        """
        replicas, device = self.replicas, self.hardware.device
        groups = None if replicas is None else replicas.groups
        workload = replace(workload, replica_groups=groups)
        ranks = read_topology(free_topology, self.hardware, None if replicas else self.links)
        if replicas is not None:
            workload.sharding_group(replicas.group.whole)
            hbm, ddr = ranks.hbm_cap_bytes, ranks.ddr_cap_bytes
            ranks = replace(replicas.group, hbm_cap_bytes=hbm, ddr_cap_bytes=ddr)
        return Problem(workload, limit_processes(workload, ranks, device), self.hardware)


def read_machine(
    hardware: str | HardwareProfile | None,
    cluster: str | PathLike[str] | None,
    job: TorchRecTopology,
    device: str,
    replicas: Replicas | None,
) -> Machine:
    """The given profile, else that of the cluster file, of the GPU found here, or the default.

    Args:
        job: all ranks.

    Raises:
        InputError: the profile is of another device, or the cluster of other ranks.
    """
    links = None if cluster is None else read_cluster(cluster, job)
    if hardware is None and links is not None:
        _, hardware = hardware_of(links) or (None, None)
    costs = detect_hardware(hardware, device)
    return Machine(
        costs if links is None else links.joined(costs),
        links,
        replicas,
        hardware is None and profile_of_here(device) is None,
    )
