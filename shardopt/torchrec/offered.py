"""Which of TorchRec's options a plan may hold, and which tables TorchRec places itself.

A plan holds what runs, and trains every table as TorchRec's own plan would. Tables that shardopt
has no model for are placed by TorchRec, by its own estimates.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from predictor.model.plan import ComputeKernel, ShardingPlan, ShardingType
from predictor.model.plan_check import FUSED_WIDTH
from predictor.model.topology import Topology
from search.baselines.torchrec_planner import CostedOption, Perf, best_proposal
from search.problem import Problem
from search.space.option import Option
from shardopt.extras import needs_torchrec
from shardopt.formatting import listed
from shardopt.logs import logger
from shardopt.torchrec.options import TableKey, group_by_table, kernel_of
from shardopt.torchrec.read_module import tables_of

with needs_torchrec():
    from torchrec.distributed.planner import Topology as TorchRecTopology
    from torchrec.distributed.planner.types import (
        Enumerator,
        ParameterConstraints,
        Partitioner,
        PerfModel,
        PlannerError,
        PlannerErrorType,
        Proposer,
        ShardingOption,
    )
    from torchrec.distributed.planner.utils import reset_shard_rank

Options = list[ShardingOption]


def reasons_of(
    options: Sequence[ShardingOption],
    topology: TorchRecTopology,
    sharder_of: Callable[[ShardingOption], Any],
) -> dict[TableKey, str]:
    """Tables that are left to TorchRec on some ranks, and why.

    Args:
        sharder_of: an option's sharder, or TorchRec's data of it.
    """
    reasons = {
        (table.option.path, table.option.name): table.why_not_predicted()
        for table in tables_of(options, sharder_of)
    }
    return all_left(options, topology) or {key: why for key, why in reasons.items() if why}


def all_left(options: Sequence[ShardingOption], topology: TorchRecTopology) -> dict[TableKey, str]:
    """All tables, where ranks do not fill their hosts; none otherwise."""
    world, local = topology.world_size, topology.local_world_size
    if world <= local or world % local == 0:
        return {}
    return dict.fromkeys(group_by_table(options), f"{world} ranks do not fill hosts of {local}")


@dataclass(frozen=True)
class TorchRecSearch:
    """The parts of `EmbeddingShardingPlanner`, which try every proposal in turn.

    Args:
        proposers, partitioner, performance_model: the user's, or TorchRec's own.
    """

    proposers: Sequence[Proposer]
    partitioner: Partitioner
    performance_model: PerfModel
    enumerator: Enumerator

    def place(self, space: Options, topology: TorchRecTopology) -> tuple[Options, float]:
        """The best plan by TorchRec's rating, and that rating.

        Args:
            space: all options of the tables to place.

        Raises:
            PlannerError: none fits.
        """
        best: tuple[Options, float] | None = None
        error: PlannerError | None = None
        for proposer in self.proposers:
            proposer.load(search_space=space, enumerator=self.enumerator)
            rated_plans: dict[tuple[int, ...], tuple[Options | None, float | None]] = {}
            while proposal := proposer.propose():
                key = tuple(sorted(map(hash, proposal)))
                if key not in rated_plans:
                    try:
                        partition = self.partitioner.partition(
                            proposal=proposal, storage_constraint=topology
                        )
                        rated = self.performance_model.rate(plan=partition)
                        rated_plans[key] = partition, rated
                        if best is None or rated < best[1]:
                            best = copy.deepcopy(partition), rated
                    except PlannerError as refused:
                        error, rated_plans[key] = refused, (None, None)
                plan, rating = rated_plans[key]
                proposer.feedback(
                    partitionable=plan is not None,
                    plan=proposal if plan is None else plan,
                    perf_rating=rating,
                    storage_constraint=topology,
                )
                reset_shard_rank(proposal)
        if best is None:
            raise PlannerError(
                error_type=PlannerErrorType.PARTITION,
                message=f"no plan of TorchRec fits for what is left to it: {error}",
            )
        return best


def without(topology: TorchRecTopology, options: Options) -> TorchRecTopology:
    """Return the topology with the memory that placed options leave."""
    remaining = copy.deepcopy(topology)
    for shard in (shard for option in options for shard in option.shards):
        remaining.devices[shard.rank].storage -= shard.storage
    return remaining


def check_storage(options: Options, topology: TorchRecTopology) -> None:
    """Refuse a plan that does not fit by the user's own storage estimator."""
    for before, after in zip(topology.devices, without(topology, options).devices, strict=True):
        needed = before.storage - after.storage
        if not needed.fits_in(before.storage):
            raise PlannerError(
                error_type=PlannerErrorType.PARTITION,
                message=f"the storage estimator counts {needed} on rank {before.rank}, which has "
                f"only {before.storage} left, while shardopt counted less; use a larger "
                "storage_reservation",
            )


def describe_reasons(reasons: Mapping[TableKey, str]) -> str:
    """``table 'a': why; tables 'b', 'c': why``."""
    tables: dict[str, list[str]] = {}
    for (path, name), reason in reasons.items():
        tables.setdefault(reason, []).append(f"'{path}.{name}'" if path else f"'{name}'")
    return "; ".join(
        f"table{'s' if len(names) > 1 else ''} {listed(names)}: {reason}"
        for reason, names in tables.items()
    )


DENSE = ComputeKernel.DENSE.value
REPLICATED = ShardingType.DATA_PARALLEL.value
BY_HOST = (ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)


def runnable(options: Sequence[ShardingOption], topology: TorchRecTopology) -> Options:
    """Leave out options that TorchRec offers and cannot run, where a table has others.

    That is a replicated table of a module with a fused optimizer on CPUs: TorchRec hands the CPU to
    `DistributedDataParallel` as one of ``device_ids``, which takes GPUs alone
    (fused_embeddingbag.py and fused_embedding.py, torchrec 1.7 to 1.9). On any device it is a shard
    of another width than a multiple of four, but for the dense kernel, which FBGEMM refuses. Where
    ranks are part of one host, it is a table with a row shard for every place of the host.
    """
    part = topology.world_size < topology.intra_group_size
    usable = [
        option
        for option in options
        if _runs(option, topology.compute_device) and not (part and option.sharding_type in BY_HOST)
    ]
    usable_of = group_by_table(usable)
    by_table = (usable_of.get(key, offered) for key, offered in group_by_table(options).items())
    return [option for of_table in by_table for option in of_table]


def _runs(option: ShardingOption, device: str) -> bool:
    if option.sharding_type == REPLICATED:
        return device != "cpu" or not _has_own_optimizer(option)
    if option.compute_kernel == DENSE:
        return True
    return all(shard.size[1] % FUSED_WIDTH == 0 for shard in option.shards)


def tell_widths(placed: Sequence[ShardingOption]) -> None:
    """Name the tables of a plan whose shards FBGEMM refuses."""
    names = [f"'{o.name}' (embedding_dim {o.tensor.shape[1]})" for o in placed if not _runs(o, "")]
    if names:
        logger.warning(
            "TorchRec plans these tables, but FBGEMM refuses them when they are sharded, because "
            "its fused kernels need a multiple of %d columns: %s; pad embedding_dim, or allow "
            "data_parallel",
            FUSED_WIDTH,
            listed(names),
        )


def trained_alike(
    options: Sequence[ShardingOption],
    theirs: Callable[[], Options | None],
    constraint: Callable[[str], ParameterConstraints],
) -> Options:
    """Keep the options that step each table by the optimizer that steps it under TorchRec's plan.

    A table of the dense kernel, as every replicated one is, leaves the optimizer that was fused
    into its backward, or that of the sharder's ``fused_params``: the training script's optimizer of
    the dense part steps it, with another rule and learning rate. So a table has the dense kernel
    where TorchRec's default planner would choose it from the same options, and nowhere else. A
    constraint that names the dense kernel or ``data_parallel`` leaves the choice to the search. The
    tables of a module with an optimizer of its own (`FusedEmbeddingBagCollection`) keep that one
    either way.

    Args:
        options: of all tables.
        theirs: gives TorchRec's own plan; None where it finds none.
        constraint: of a table, by name.
    """
    tables = group_by_table(options)
    undecided = {
        key
        for key, of_table in tables.items()
        if len({option.compute_kernel == DENSE for option in of_table}) == 2
        and not _has_own_optimizer(of_table[0])
        and not _asks_for_dense(constraint(of_table[0].name))
    }
    if not undecided:
        return list(options)
    dense = {(o.path, o.name) for o in theirs() or () if o.compute_kernel == DENSE}
    return [
        option
        for key, of_table in tables.items()
        for option in of_table
        if key not in undecided or (option.compute_kernel == DENSE) == (key in dense)
    ]


def with_room_for(plan: ShardingPlan, problem: Problem) -> Problem:
    """A problem whose ranks have room for a plan by shardopt's count, and at least what they had.

    Args:
        plan: that the user's storage estimator accepts.
    """
    ranks = problem.topology
    needs = problem.memory_of(plan)
    hbm = tuple(max(need.hbm_bytes, need.hbm_cap_bytes) for need in needs)
    ddr = tuple(max(need.ddr_bytes, need.ddr_cap_bytes) for need in needs)
    peaks = [need.peak for need in needs if need.peak is not None]
    limits = tuple(max(peak.reserved_bytes, peak.limit_bytes) for peak in peaks)
    ranks = replace(ranks, hbm_cap_bytes=hbm, ddr_cap_bytes=ddr, limit_bytes=limits)
    return replace(problem, topology=ranks)


STEPPED_BY = {
    False: "because constraints ask for it, TorchRec's own plan gives it to them or no other runs, "
    "are stepped by the script's dense optimizer",
    True: "in modules with an optimizer of their own, are stepped by that",
}
"""Module has an optimizer of its own -> words on its tables."""


def tell_dense(placed: Sequence[ShardingOption]) -> None:
    """Name the tables of a plan that have the dense kernel, and what steps them."""
    for own, stepped_by in STEPPED_BY.items():
        names = [
            f"'{option.path}.{option.name}'" if option.path else f"'{option.name}'"
            for option in placed
            if option.compute_kernel == DENSE and _has_own_optimizer(option) == own
        ]
        if names:
            logger.warning("tables with the dense kernel, %s: %s", stepped_by, listed(names))


def _has_own_optimizer(option: ShardingOption) -> bool:
    return hasattr(option.module[1], "optimizer_type")


def _asks_for_dense(constraint: ParameterConstraints) -> bool:
    kernels, kinds = constraint.compute_kernels or (), constraint.sharding_types or ()
    return DENSE in kernels or REPLICATED in kinds


def torchrecs_plan(options: Sequence[ShardingOption], topology: Topology) -> Options | None:
    """The plan of TorchRec's default planner, by the estimates of the enumerator; None where it
    finds none. Kernels that shardopt does not know are left out, and tables with no other.

    Args:
        options: of all tables, with estimates.
        topology: ranks with the memory that the reservation left.
    """
    by_table = group_by_table(o for o in options if kernel_of(o) in set(ComputeKernel))
    tables = list(by_table.values())
    costed = [[_costed(t, i, o) for i, o in enumerate(offered)] for t, offered in enumerate(tables)]
    best = best_proposal(costed, topology)
    if best.choices is None:
        return None
    placed = []
    for choice, ranks in zip(best.choices, best.ranks, strict=True):
        option = copy.deepcopy(tables[choice.option.table][choice.order])
        for shard, rank in zip(option.shards, ranks, strict=True):
            shard.rank = rank
        placed.append(option)
    return placed


def _costed(table: int, order: int, theirs: ShardingOption) -> CostedOption:
    """An option with the estimates that the enumerator gave it."""
    sizes = tuple((shard.size[0], shard.size[1]) for shard in theirs.shards)
    offsets = tuple((shard.offset[0], shard.offset[1]) for shard in theirs.shards)
    kind, kernel = ShardingType(theirs.sharding_type), ComputeKernel(kernel_of(theirs))
    worst = max((shard.perf for shard in theirs.shards), key=lambda perf: perf.total)
    return CostedOption(
        Option(table, kind, kernel, sizes, offsets, theirs.path),
        Perf(
            worst.fwd_compute,
            worst.fwd_comms,
            worst.bwd_compute + worst.prefetch_compute,
            worst.bwd_comms,
        ),
        tuple(int(shard.storage.hbm) for shard in theirs.shards),
        tuple(int(shard.storage.ddr) for shard in theirs.shards),
        order,
    )


def plan_by_usual_costs(
    options: Sequence[ShardingOption], ranks: Topology, enumerator: Enumerator, request: Any
) -> Options | None:
    """The plan that TorchRec's planner would make if the Topology had TorchRec's own bandwidths.

    Args:
        options: of all tables; the plan has the types and kernels that they name.
        ranks: with the memory that the reservation left.
        enumerator: TorchRec's, by its own costs.
        request: module and sharders.
    """
    offered = {(o.path, o.name, o.sharding_type, kernel_of(o)) for o in options}
    enumerated = enumerator.enumerate(*request)
    same = [o for o in enumerated if (o.path, o.name, o.sharding_type, kernel_of(o)) in offered]
    return torchrecs_plan(same, ranks)
