"""From flags, cluster file and plan to what a command works on: workload, topology, costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from predictor.errors import InputError
from predictor.hardware.loader import DEFAULT_HARDWARE, HardwareProfile, load_hardware
from predictor.iteration.ranges import ranks_outside
from predictor.model.plan import ShardingPlan
from predictor.model.reservation import reserve_topology
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from predictor.units import gib
from shardopt.cli.strict import refuse_outside
from shardopt.config import ClusterConfig, load_cluster, load_model_with_notes
from shardopt.config.cluster import MAX_GIB, MAX_RANKS
from shardopt.config.nvlink import nvlink_domain


@dataclass(frozen=True)
class Flags:
    """The machine flags as given; None where a flag was left out."""

    gpus: int | None = None
    gpus_per_node: int | None = None
    cluster: Path | None = None
    hardware: str | None = None
    hbm_gib: float | None = None
    ddr_gib: float | None = None
    reserve: float = 0.15
    batch_size: int | None = None
    strict: bool = False


@dataclass(frozen=True)
class Setting:
    """What a command works on.

    Args:
        topology: ranks with the memory left for tables.
        installed: the same ranks with all of their memory.
        hardware_name: name or path of the profile, as it goes into a plan file.
        hardware_from: who chose it: ``--hardware``, ``cluster``, ``plan`` or ``default``.
        notes: what the user should be told once.
    """

    workload: Workload
    topology: Topology
    installed: Topology
    hardware: HardwareProfile
    hardware_name: str
    hardware_from: str
    notes: tuple[str, ...] = ()


def resolve(model: Path, flags: Flags, plan: ShardingPlan | None = None) -> Setting:
    """The setting of a command.

    Args:
        model: the model file.
        plan: gives ranks and hardware where flags and cluster file do not.

    Raises:
        InputError: a flag is out of range, flags contradict each other or the plan.
        ProfileError: there is no such hardware profile.
        InfeasibleError: nothing is left for tables once the reserve is taken.
    """
    check_flags(flags, needs_ranks=plan is None)
    workload, notes = load_model_with_notes(model, batch_size=flags.batch_size)
    cluster = load_cluster(flags.cluster) if flags.cluster is not None else None
    name, origin = _hardware_name(flags, cluster, plan)
    hardware = load_hardware(name)
    installed = _topology(flags, cluster, plan, hardware)
    if plan is not None and installed.world_size != plan.world_size:
        given = f"--cluster {flags.cluster} has" if cluster else f"--gpus {flags.gpus} asks for"
        raise InputError(
            f"{given} {installed.world_size} ranks, but the plan places its shards on "
            f"{plan.world_size}; leave the flag out, or plan again for {installed.world_size}"
        )
    if flags.strict:
        refuse_outside(ranks_outside(hardware, installed))  # known before a search
    if origin == "default":
        notes = [*notes, f"hardware is {name}, the default; --hardware chooses another profile"]
    topology = reserve_topology(workload, installed, flags.reserve, hardware.device)
    return Setting(workload, topology, installed, hardware, name, origin, tuple(notes))


def check_flags(flags: Flags, *, needs_ranks: bool) -> None:
    """Refuse values outside their range and flags that exclude each other."""
    _at_least_one("--gpus", flags.gpus, "the number of GPUs", MAX_RANKS)
    _at_least_one("--gpus-per-node", flags.gpus_per_node, "the GPUs of one host", MAX_RANKS)
    _at_least_one("--batch-size", flags.batch_size, "samples per rank", 2**40)
    _gib("--hbm-gib", flags.hbm_gib)
    _gib("--ddr-gib", flags.ddr_gib)
    if not 0 <= flags.reserve < 1:
        raise InputError(
            f"--reserve is {flags.reserve:g}; it must be a share of device memory, "
            "at least 0 and below 1 (0.15 is the default)"
        )
    if flags.cluster is not None:
        for flag, value in (("--gpus", flags.gpus), ("--gpus-per-node", flags.gpus_per_node)):
            if value is not None:
                raise InputError(f"{flag} and --cluster exclude each other; give one of them")
    elif flags.gpus is None and needs_ranks:
        raise InputError("how many GPUs? Give --gpus N, such as --gpus 8, or --cluster FILE")


def _at_least_one(flag: str, value: int | None, what: str, limit: int) -> None:
    if value is not None and not 1 <= value <= limit:
        raise InputError(f"{flag} is {value}; give {what}, at least 1 and at most {limit}")


def _gib(flag: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and 0 <= value <= MAX_GIB):
        raise InputError(
            f"{flag} is {value:g}; give GiB per GPU, at least 0 and at most {MAX_GIB:g}"
        )


def _hardware_name(
    flags: Flags, cluster: ClusterConfig | None, plan: ShardingPlan | None
) -> tuple[str, str]:
    """Name or path of the profile, and who chose it."""
    if flags.hardware is not None:
        return flags.hardware, "--hardware"
    if cluster is not None and cluster.hardware:
        return cluster.hardware, "cluster"
    planned = plan.meta.get("hardware") if plan is not None else None
    if isinstance(planned, str) and planned:
        return planned, "plan"
    return DEFAULT_HARDWARE, "default"


def _topology(
    flags: Flags,
    cluster: ClusterConfig | None,
    plan: ShardingPlan | None,
    hardware: HardwareProfile,
) -> Topology:
    """Ranks with all of their memory: flags, then cluster file, then plan, then profile."""
    if cluster is not None:
        ranks, local, domain = cluster.world_size, cluster.ranks_per_host, cluster.nvlink_domain
    else:
        ranks, local = _ranks(flags, plan)
        domain = nvlink_domain(hardware, ranks, local)
    topology = Topology.uniform(
        ranks,
        local,
        hbm_bytes=hardware.hbm_bytes if flags.hbm_gib is None else gib(flags.hbm_gib),
        ddr_bytes=hardware.ddr_bytes if flags.ddr_gib is None else gib(flags.ddr_gib),
        nvlink_domain=domain,
    )
    if cluster is not None and cluster.hbm_bytes and flags.hbm_gib is None:
        topology = replace(topology, hbm_cap_bytes=cluster.hbm_bytes)
    if cluster is not None and cluster.ddr_bytes and flags.ddr_gib is None:
        topology = replace(topology, ddr_cap_bytes=cluster.ddr_bytes)
    return topology


def _ranks(flags: Flags, plan: ShardingPlan | None) -> tuple[int, int]:
    """World size and ranks per host."""
    planned = (plan.world_size, plan.local_world_size) if plan is not None else (1, 1)
    ranks = flags.gpus if flags.gpus is not None else planned[0]
    if flags.gpus_per_node is not None:
        local = flags.gpus_per_node
    elif plan is not None and ranks == plan.world_size:
        local = planned[1]
    else:
        local = min(8, ranks)
    if ranks % local:
        below, above = ranks // local * local, -(-ranks // local) * local
        choices = " or ".join(str(n) for n in (below, above) if n)
        told = "" if flags.gpus_per_node is not None else ", the default"
        raise InputError(
            f"--gpus {ranks} does not fill hosts of {local} (--gpus-per-node{told}); "
            f"give --gpus {choices}, or another --gpus-per-node that divides {ranks}"
        )
    return ranks, local
