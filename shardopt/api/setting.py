"""From a model file, a machine and a plan to what is predicted and searched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from predictor.cost.loads import ShardLoads
from predictor.cost.stragglers import FEWEST_IDS
from predictor.csv_rows import MOST_RANKS
from predictor.errors import InputError, PlanError, RangeError
from predictor.hardware.loader import DEFAULT_HARDWARE, context_bytes, load_hardware
from predictor.hardware.networks import Network
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.ranges import OutOfRange, ranks_outside
from predictor.model.memory.peak import DEFAULT_RESERVE, default_reserve, leave_for_shards
from predictor.model.plan import ComputeKernel, ShardingPlan, ShardingType
from predictor.model.plan_check import FUSED_WIDTH
from predictor.model.topology import ReplicaGroups, Topology
from predictor.model.workload import Table, Workload
from predictor.predict import Prediction, predict
from predictor.section import MAX_COUNT
from predictor.units import gib
from search.problem import Problem
from search.space.enumerate import listed_types
from search.tune.knobs import Case
from shardopt.api.cache import digest, versions
from shardopt.api.request import Machine, check_number
from shardopt.config import ClusterConfig, load_cluster, read_model
from shardopt.config.cluster import (
    MAX_GIB,
    default_nvlink_domain,
    devices_of,
    hardware_of,
)
from shardopt.config.distributions import workloads_of_stats
from shardopt.formatting import listed, range_lines

ModelRead: TypeAlias = tuple[Workload, list[str], dict[str, Workload]]
"""Result of `read_model`."""


@dataclass(frozen=True)
class Setting:
    """A model on a machine.

    Args:
        topology: the ranks that plans cover, with the memory left for tables: all, or those of a
            sharding group.
        installed: all ranks with all of their memory.
        hardware_name: name or path of the profile, as it goes into a plan file.
        hardware_from: who chose it: ``given``, ``cluster``, ``plan`` or ``default``.
        network: between hosts; None: the one that the profile assumes.
        notes: what the user should be told once.
        reserve: share of device memory kept free.
        windows: the workloads of several windows of data, the first one's is ``workload``; empty
            where there is one.
    """

    workload: Workload
    topology: Topology
    installed: Topology
    hardware: HardwareProfile
    hardware_name: str
    hardware_from: str
    notes: tuple[str, ...] = ()
    reserve: float = DEFAULT_RESERVE
    windows: Mapping[str, Workload] = field(default_factory=dict)
    network: Network | None = None

    def problem(self) -> Problem:
        """Return the problem for `search.solve.solve`."""
        return Problem(self.workload, self.topology, self.hardware)

    def case(self) -> Case:
        """Return the case for `search.tune`."""
        return Case(self.workload, self.installed, self.hardware, self.reserve)

    def predict(self, plan: ShardingPlan, shards: ShardLoads | None = None) -> Prediction:
        """The iteration time and memory of one plan.

        Args:
            shards: see `predictor.predict.predict`.
        """
        return predict(self.workload, self.topology, self.hardware, plan, shards)

    def digests(self) -> dict[str, str]:
        """SHA-256 of model and machine, by what they are."""
        return {
            "model": digest(self.workload),
            "hardware": digest(self.hardware),
            "ranks": digest(self.topology, self.installed),
        }

    def facts(self) -> dict[str, Any]:
        """Model, hardware and ranks as plan files and JSON output name them."""
        groups = self.workload.replica_groups
        copies = {} if groups is None else {"replica_groups": groups.facts(self.installed)}
        network = {} if self.network is None else {"network": asdict(self.network)}
        return {
            "model": {"name": self.workload.name, "sha256": self.workload.sha256},
            "hardware": self.hardware_name,
            "world_size": self.topology.world_size,
            "local_world_size": self.topology.local_world_size,
            "batch_size": self.workload.batch_size,
            **network,
            **copies,
        }

    def head(self, seed: int) -> dict[str, Any]:
        """The head of a plan file, before the times; `to_torchrec` places shards on its device."""
        device = self.hardware.device
        return {**self.facts(), "device": device, "seed": seed, "versions": versions()}


def resolve(
    model: str | PathLike[str] | ModelRead,
    machine: Machine,
    plan: ShardingPlan | None = None,
    stats: Sequence[Path] = (),
    *,
    strict: bool = False,
) -> Setting:
    """Read the model and settle the machine.

    Args:
        model: the model file, or what `read_model` made of it at the batch size of the machine.
        plan: gives ranks and hardware where neither the machine nor its cluster file does.
        stats: stats files, in place of those that the model file names; several are windows of
            data.
        strict: refuse ranks that the profile does not cover.

    Raises:
        RangeError: such ranks.
        InputError: a number is out of range, or the machine contradicts itself or the plan.
        ProfileError: there is no such hardware profile.
        InfeasibleError: nothing is left for tables once the reserve is taken.
    """
    check_machine(machine, needs_ranks=plan is None)
    if not isinstance(model, tuple):
        model = read_model(Path(model), batch_size=machine.batch_size)
    workload, notes, windows = model
    if stats:
        windows = workloads_of_stats(workload, stats)
    job, groups = _job_of(plan)
    if groups is not None:
        workload = replace(workload, replica_groups=groups)
        windows = {n: replace(w, replica_groups=groups) for n, w in windows.items()}
    workload = next(iter(windows.values()), workload)
    windows = windows if len(windows) > 1 else {}
    cluster = load_cluster(machine.cluster) if machine.cluster is not None else None
    name, hardware, origin = _hardware(machine, cluster, plan)
    network = _network(machine, cluster, plan)
    hardware = hardware if network is None else network.joins(hardware)
    workload = with_dense_kernels(workload, hardware.device)
    windows = {n: with_dense_kernels(w, hardware.device) for n, w in windows.items()}
    installed = _topology(machine, cluster, job, hardware)
    if plan is not None:
        _check_ranks(workload.sharding_group(installed), plan, machine)
    reserve = default_reserve(workload) if machine.reserve is None else machine.reserve
    context = context_bytes(hardware)
    rooms = [
        leave_for_shards(window, installed, reserve, hardware.device, context)
        for window in windows.values() or [workload]
    ]
    hbm, ddr = (  # the least of all windows: a plan must fit in each
        tuple(map(min, zip(*(getattr(room, caps) for room in rooms), strict=True)))
        for caps in ("hbm_cap_bytes", "ddr_cap_bytes")
    )
    topology = replace(rooms[0], hbm_cap_bytes=hbm, ddr_cap_bytes=ddr)
    if strict:
        refuse_outside(ranks_outside(hardware, installed))
    remarks = [*notes, *_notes(workload, topology.world_size, hardware)]
    if machine.network is not None and installed.groups == 1:
        remarks.append(
            f"NVLink or one host joins all ranks, so network {machine.network} has no part"
        )
    remarks += cluster.notes if cluster is not None else ()
    if origin == "default":
        remarks.append(f"hardware is {name}, the default; choose another by name or file")
    return Setting(
        workload,
        topology,
        installed,
        hardware,
        name,
        origin,
        tuple(remarks),
        reserve,
        windows,
        network,
    )


def with_dense_kernels(workload: Workload, device: str) -> Workload:
    """The workload whose tables of a width that FBGEMM's fused kernels refuse have the dense one,
    where their constraints leave that open.

    It is the offer of the runtime, not a constraint that the user could drop.
    """

    def offered(table: Table) -> tuple[tuple[ShardingType, ComputeKernel], ...]:
        named = table.constraints.sharding_types or (ShardingType.DATA_PARALLEL,)
        listed = listed_types(table, device)
        return tuple((kind, ComputeKernel.DENSE) for kind in listed if kind in named)

    return replace(
        workload,
        tables=tuple(
            replace(table, constraints=replace(table.constraints, offered=offered(table)))
            if workload.training
            and _needs_dense(table, device)
            and table.constraints.compute_kernels is None
            else table
            for table in workload.tables
        ),
    )


def _needs_dense(table: Table, device: str) -> bool:
    """Tell if the dense kernel is the only one that runs a table."""
    named = table.constraints.sharding_types
    return (
        table.embedding_dim % FUSED_WIDTH != 0
        and (table.is_pooled or device == "cuda")
        and (not named or ShardingType.DATA_PARALLEL in named)
    )


def refuse_outside(costs: Iterable[OutOfRange], where: str = "") -> None:
    """Refuse costs outside the ranges of their profile, as ``strict`` asks.

    Args:
        where: the plan, where there are several.

    Raises:
        RangeError: there is such a cost; says which and what to do.
    """
    lines = range_lines(costs)
    if lines:
        place = f"{where}: " if where else ""
        raise RangeError(
            f"{place}{'; '.join(lines)} (refused, as strict is asked for); plan for other ranks or "
            "a smaller batch, use a profile that covers them, or do not ask for strict",
            inputs=("strict",),
        )


Job: TypeAlias = tuple[int, int]
"""World size and ranks per host."""


def _job_of(plan: ShardingPlan | None) -> tuple[Job | None, ReplicaGroups | None]:
    """The ranks that a plan was made for, and how they form groups if its file says so."""
    if plan is None:
        return None, None
    if "replica_groups" not in plan.meta:
        return (plan.world_size, plan.local_world_size), None
    groups, *job = ReplicaGroups.from_facts(plan.meta["replica_groups"], "the plan")
    return (job[0], job[1]), groups


def _check_ranks(covered: Topology, plan: ShardingPlan, machine: Machine) -> None:
    if covered.world_size == plan.world_size:
        return
    cluster = machine.cluster is not None
    which = f"cluster file {machine.cluster} has" if cluster else "machine has"
    raise InputError(
        f"the {which} {covered.world_size} ranks, but the plan places its shards on "
        f"{plan.world_size}; leave the ranks to the plan, or leave this plan out and search for "
        f"{covered.world_size}",
        inputs=("cluster",) if cluster else ("gpus",),
    )


def _notes(workload: Workload, world_size: int, hardware: HardwareProfile) -> Iterator[str]:
    """Yield notes on features that hardly any batch of all ranks reads, on tables of odd widths,
    and on a profile whose calibration was not quiet."""
    samples = workload.batch_size * world_size
    features = (feature for table in workload.tables for feature in table.features)
    rare = [f for f in features if samples * f.lookups_per_sample < FEWEST_IDS]
    if rare:
        more = f" and {len(rare) - 1} more" if len(rare) > 1 else ""
        yield (
            f"feature {rare[0].name}{more}: pooling_factor {rare[0].pooling_factor:g} is less "
            f"than one id in {1 / FEWEST_IDS:.0f} batches; it costs what one id in so many batches "
            "costs"
        )
    odd = [t for t in workload.tables if t.embedding_dim % FUSED_WIDTH]
    if odd and workload.training:
        names = listed(f"'{t.name}' (embedding_dim {t.embedding_dim})" for t in odd)
        yield (
            f"FBGEMM's fused kernels refuse tables whose width is no multiple of {FUSED_WIDTH}: "
            f"{names}; only the dense kernel runs them, data_parallel; a padded embedding_dim "
            "leaves all types"
        )
    verdict = hardware.verdict
    if verdict is not None and verdict.quality != "quiet":
        yield (
            f"hardware {hardware.name}: its calibration is {verdict.quality} "
            f"({'; '.join(verdict.why)}); measure again on a quiet machine"
        )


def check_machine(machine: Machine, *, needs_ranks: bool) -> None:
    """Refuse numbers outside their range and choices that exclude each other."""
    for name in ("gpus", "gpus_per_node"):
        check_number(name, getattr(machine, name), 1, MOST_RANKS)
    check_number("batch_size", machine.batch_size, 1, MAX_COUNT)
    for name in ("hbm_gib", "ddr_gib"):
        check_number(name, getattr(machine, name), 0, MAX_GIB)
    if machine.reserve is not None and not 0 <= machine.reserve < 1:
        raise InputError(
            f"reserve is {machine.reserve:g}; it must be a share of device memory, "
            f"at least 0 and below 1 ({DEFAULT_RESERVE:g} is the default)",
            inputs=("reserve",),
        )
    if machine.cluster is not None:
        for name, value in (("gpus", machine.gpus), ("gpus_per_node", machine.gpus_per_node)):
            if value is not None:
                raise InputError(
                    f"a cluster file says how many ranks there are, so {name} cannot be given too",
                    inputs=(name, "cluster"),
                )
    elif machine.gpus is None and needs_ranks:
        raise InputError(
            "how many GPUs? Give their number, such as 8, or a cluster file",
            inputs=("gpus", "cluster"),
        )


def _hardware(
    machine: Machine, cluster: ClusterConfig | None, plan: ShardingPlan | None
) -> tuple[str, HardwareProfile, str]:
    """Return the profile's name or path, the profile, and who chose it."""
    if machine.hardware is not None:
        return machine.hardware, load_hardware(machine.hardware), "given"
    from_cluster = hardware_of(cluster) if cluster is not None else None
    if from_cluster is not None:
        return *from_cluster, "cluster"
    planned = plan.meta.get("hardware") if plan is not None else None
    if isinstance(planned, str) and planned:
        return planned, load_hardware(planned), "plan"
    return DEFAULT_HARDWARE, load_hardware(DEFAULT_HARDWARE), "default"


def _network(
    machine: Machine, cluster: ClusterConfig | None, plan: ShardingPlan | None
) -> Network | None:
    """Return the network of the hosts: by the machine, then its cluster file, then the plan."""
    if machine.network is not None:
        return Network(machine.network)
    if cluster is not None or machine.hardware is not None or plan is None:
        return cluster.fabric if cluster is not None else None
    planned = plan.meta.get("network")
    if planned is None:
        return None
    try:
        return Network(**planned)
    except (TypeError, InputError) as error:
        raise PlanError(
            f"the plan: network is {planned!r}, which is not the kind of a network and its rate, "
            "as `shardopt plan` writes it; name one, or leave it out"
        ) from error


def _topology(
    machine: Machine,
    cluster: ClusterConfig | None,
    job: Job | None,
    hardware: HardwareProfile,
) -> Topology:
    """Ranks with all of their memory: machine, then cluster file, then plan, then profile."""
    if cluster is not None:
        ranks, local, domain = cluster.world_size, cluster.ranks_per_host, cluster.nvlink_domain
    else:
        ranks, local = _ranks(machine, job)
        domain = default_nvlink_domain(hardware, ranks, local)
    topology = Topology.uniform(
        ranks,
        local,
        hbm_bytes=hardware.hbm_bytes if machine.hbm_gib is None else gib(machine.hbm_gib),
        ddr_bytes=hardware.ddr_bytes if machine.ddr_gib is None else gib(machine.ddr_gib),
        nvlink_domain=domain,
    )
    if cluster is None:
        return topology
    hbm, ddr = cluster.hbm_bytes, cluster.ddr_bytes
    if cluster.host_hardware and machine.hardware is None:
        profiles = devices_of(cluster)
        devices = [profiles[name] for name in cluster.host_hardware]
        hbm = hbm or tuple(device.hbm_bytes for device in devices for _ in range(local))
        ddr = ddr or tuple(device.ddr_bytes for device in devices for _ in range(local))
    if hbm and machine.hbm_gib is None:
        topology = replace(topology, hbm_cap_bytes=hbm)
    if ddr and machine.ddr_gib is None:
        topology = replace(topology, ddr_cap_bytes=ddr)
    return replace(topology, network=cluster.network)


def _ranks(machine: Machine, job: Job | None) -> Job:
    world, planned = job or (1, None)
    ranks = machine.gpus if machine.gpus is not None else world
    local = machine.gpus_per_node
    if local is None:
        local = planned if planned and ranks == world else min(8, ranks)
    if ranks % local:
        below, above = ranks // local * local, -(-ranks // local) * local
        choices = " or ".join(str(n) for n in (below, above) if n)
        default = "" if machine.gpus_per_node is not None else ", the default"
        raise InputError(
            f"{ranks} GPUs do not fill hosts of {local}{default}; use {choices} GPUs, or hosts "
            f"whose number of GPUs divides {ranks}",
            inputs=("gpus", "gpus_per_node"),
        )
    return ranks, local
