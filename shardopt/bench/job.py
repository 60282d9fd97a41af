"""Job of a bench run, and the checks that this machine can do it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from predictor.errors import InfeasibleError, InputError, PlanError
from predictor.model.memory.ranks import plan_memory
from predictor.model.plan import ShardingPlan
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from predictor.units import GIB, format_bytes
from shardopt.extras import require_packages
from shardopt.measure.machine import available_bytes
from shardopt.ranks.hosts import HOSTS, Link, check_hosts
from shardopt.ranks.rank import available_cores, check_gpus
from shardopt.ranks.realtime import Runtime

RANK_BYTES = GIB // 2
"""Memory of a rank beside tables: libraries, dense part, batches; 0.35 GiB is seen."""


@dataclass(frozen=True)
class Job:
    """Task of a bench run; all ranks get the same.

    Args:
        plans: name -> plan, all for the same ranks; the others are compared with the first.
        rounds: how many in all, those of an earlier run included.
        block: measured iterations of a plan in a round.
        warmup: rounds before measuring; None lets the samples decide.
        first_round: the first that is still to be measured.
        link: between the ranks, each of which is then a separate host on this machine.
        runtime: of the ranks.
        build: makes the model that is trained (`shardopt.training.model.ModelBuilder`);
            None: the DLRM that the workload describes. Ranks get it pickled.
        facts: what else the rows say of the model.
        data: name of a plan -> the same model with other data, which that plan trains on.
    """

    workload: Workload
    plans: dict[str, ShardingPlan]
    backend: str = "gloo"
    rounds: int = 10
    block: int = 6
    warmup: int | None = None
    seed: int = 0
    first_round: int = 0
    link: Link | None = None
    runtime: Runtime = Runtime.PLAIN
    build: Callable[[Workload, str], Any] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Workload] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Ranks, which all plans share."""
        return next(iter(self.plans.values())).world_size

    @property
    def local_world_size(self) -> int:
        """Ranks that count as one host."""
        return next(iter(self.plans.values())).local_world_size


def check_job(job: Job, *, given_ranks: int | None = None, joined: bool = False) -> None:
    """Refuse what cannot run, before any process starts.

    Args:
        given_ranks: ranks that the user asked for, or that torchrun started.
        joined: the ranks are there already, so that those of other hosts are not this machine's.

    Raises:
        PlanError: plans for different ranks, or for others than given or than a link joins.
        InputError: fewer cores or GPUs than ranks, no CUDA for nccl, or no link can be made here.
        InfeasibleError: the tables need more memory than there is.
        MissingPackageError: TorchRec is not installed.
    """
    if job.build is None or not job.workload.training:
        check_layers(job.workload)
    _check_ranks(job, given_ranks)
    if job.link is not None:
        _check_link(job, job.link, joined)
    require_packages("torch", "fbgemm_gpu", "torchrec")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", job.local_world_size))
    if joined and local != job.local_world_size:
        raise PlanError(
            f"the plans are for hosts of {job.local_world_size} ranks, but torchrun started "
            f"{local} on each; plan again for hosts of {local}",
            inputs=("gpus_per_node",),
        )
    here = local if joined else job.world_size
    if job.backend == "nccl":
        check_gpus(here)
        return
    cores = len(available_cores())
    if here > cores:
        raise InputError(
            f"the plans are for {here} ranks, but this process may use only {cores} cores, and "
            "ranks that share a core disturb each other's times; run plans for fewer ranks, or "
            "join ranks of several hosts with torchrun"
        )
    if not joined:
        check_memory(job, available_bytes())


def check_layers(workload: Workload) -> None:
    """Refuse a model that cannot be built of its file, before anything is planned or started.

    Raises:
        InputError: it is for inference, or its dense part is captured or measured, not given layer
            by layer.
    """
    if not workload.training:
        raise InputError(
            f"model '{workload.name}' has mode inference, which can be predicted but not run here; "
            "set mode: training"
        )
    _ = workload.dlrm


def _check_ranks(job: Job, expected: int | None) -> None:
    first = next(iter(job.plans))
    for name, plan in job.plans.items():
        if expected is not None and plan.world_size != expected:
            raise PlanError(
                f"{name} is for {plan.world_size} ranks, but {expected} are asked for; plan again "
                f"for {expected}, or run it on {plan.world_size}",
                inputs=("gpus",),
            )
        ranks = (plan.world_size, plan.local_world_size)
        if ranks != (job.world_size, job.local_world_size):
            raise PlanError(
                f"{name} is for {ranks[0]} ranks on hosts of {ranks[1]}, {first} for "
                f"{job.world_size} on hosts of {job.local_world_size}; plans that run side by "
                "side share their ranks: run them one by one, or plan again"
            )


def _check_link(job: Job, link: Link, joined: bool) -> None:
    if joined:
        raise InputError(
            "a link needs ranks that this command starts, but torchrun started this one; run "
            "without torchrun, or without a link",
            inputs=("link",),
        )
    if (job.world_size, job.local_world_size) != (HOSTS, 1):
        raise PlanError(
            f"the plans are for {job.world_size} ranks on hosts of {job.local_world_size}, but "
            f"a link joins {HOSTS} hosts of one rank; plan for such hosts",
            inputs=("link", "gpus", "gpus_per_node"),
        )
    check_hosts(link, job.backend)


def check_memory(job: Job, available: int, ranks: int | None = None) -> None:
    """Hold weights, optimizer state and ids of all plans, built at once, against what is free.

    Args:
        available: bytes of host memory that all ranks share.
        ranks: how many of the first do; None: all.
    """
    needs = rank_bytes(job.workload, list(job.plans.values()))[:ranks]
    if sum(needs) <= available:
        return
    by_rank = ", ".join(f"rank {rank} {format_bytes(need)}" for rank, need in enumerate(needs))
    raise InfeasibleError(
        f"{len(job.plans)} plans built at once need {format_bytes(sum(needs))} of memory "
        f"({by_rank}), but only {format_bytes(available)} are free: "
        f"{format_bytes(sum(needs) - available)} are missing; run fewer plans at a time, or "
        "plans with smaller tables"
    )


def rank_bytes(workload: Workload, plans: Sequence[ShardingPlan]) -> list[int]:
    """Host memory of each rank that trains under all of the plans; the same one is built once."""
    first = plans[0]
    topology = Topology.uniform(
        first.world_size, first.local_world_size, hbm_bytes=0, ddr_bytes=2**62
    )
    bytes_of_rank = [RANK_BYTES] * first.world_size
    for plan in (p for i, p in enumerate(plans) if p not in plans[:i]):
        for rank, memory in enumerate(plan_memory(workload, topology, plan, device="cpu")):
            bytes_of_rank[rank] += memory.hbm_bytes + memory.ddr_bytes
    return bytes_of_rank
