"""TorchRec's own plan beside ours: what it takes, when it is kept, and how training differs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from predictor.model.memory.ranks import STATES, fits, missing, plan_memory
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.plan_check import find_mean_problems, match_plan
from predictor.model.topology import Topology
from predictor.model.workload import Table
from predictor.predict import predict
from search.expected_gain import NOTHING
from search.prefer import TOLERANCE
from search.problem import Problem
from shardopt.formatting import listed, ms, percent, plural
from shardopt.logs import logger


@dataclass(frozen=True)
class TorchRecsPlan:
    """The plan of TorchRec's own planner.

    Args:
        iteration_ms: predicted.
        misfit: by how much it does not fit by shardopt's count; empty where it fits.
        sound: TorchRec computes it right.
        returned: it was returned, as the best plan found gains nothing.
    """

    plan: ShardingPlan
    iteration_ms: float
    misfit: str = ""
    sound: bool = True
    returned: bool = False

    @classmethod
    def rated(cls, plan: ShardingPlan, problem: Problem) -> TorchRecsPlan:
        """A plan with what shardopt predicts and counts of it."""
        workload, ranks, hardware = problem.workload, problem.topology, problem.hardware
        memory = plan_memory(workload, ranks, plan, hardware.device)
        short = [rank for rank in memory if not rank.fits]
        worst = max(short, key=lambda r: r.missing_hbm_bytes + r.missing_ddr_bytes, default=None)
        return cls(
            plan,
            predict(workload, ranks, hardware, plan).iteration_ms,
            "" if worst is None else missing([worst]),
            not find_mean_problems(plan, workload),
        )

    def ties(self, best_ms: float) -> bool:
        """Tell if this plan can be used and the best plan found gains nothing over it."""
        return self.sound and not self.misfit and self.iteration_ms <= best_ms * (1 + TOLERANCE)


def tell_column_states(plan: ShardingPlan, theirs: TorchRecsPlan | None, problem: Problem) -> None:
    """Name the tables whose columns a plan cuts otherwise than TorchRec's, where their optimizer
    has one state a row: each shard then has a state of its own."""
    tables = zip(plan.tables.items(), problem.workload.tables, strict=True)
    names = [
        f"'{key}'"
        for (key, placed), table in tables
        if any(row for _, row in STATES[table.optimizer])
        and _columns(placed) != (_columns(theirs.plan.tables[key]) if theirs else {0})
    ]
    if names:
        logger.warning(
            "%s cut by columns differently than in TorchRec's plan: a row-wise optimizer keeps one "
            "state per row of each shard, so training differs a little: %s; to keep them whole, "
            "leave column types out of their constraints' sharding_types",
            "1 table is" if len(names) == 1 else f"{plural(len(names), 'table')} are",
            listed(names),
        )


def _columns(table: TablePlan) -> set[int]:
    """Return the first columns of the shards of a table."""
    return {shard.offset[1] for shard in table.shards}


def tell_replicable(plan: ShardingPlan, problem: Problem, keys: Collection[str]) -> None:
    """Say what replicating tables would gain that keep their own optimizer in a plan, and what
    allows it.

    Args:
        keys: of tables that TorchRec could replicate; the script's dense optimizer steps those.
    """
    tables = dict(zip(plan.tables, problem.workload.tables, strict=True))
    sharded = [k for k in keys if plan.tables[k].sharding_type != ShardingType.DATA_PARALLEL]
    small = sorted(sharded, key=lambda key: tables[key].weight_bytes)
    replicas = {key: _replicated(tables[key], problem.topology) for key in small}
    scorer, order = problem.scorer, list(plan.tables)
    matched = match_plan(problem.workload, problem.topology, plan)
    numbers = [np.array([scorer.number(i, placed) for i, placed in enumerate(matched)])]
    for key in small:  # one more in each
        index = order.index(key)
        numbers.append(numbers[-1].copy())
        numbers[-1][index] = scorer.number(index, replicas[key])
    times = scorer.score_numbered(np.array(numbers)).tolist()
    least = min(range(len(times)), key=times.__getitem__)
    gain = 1 - times[least] / times[0]
    chosen = {key: replicas[key] for key in small[:least]}
    changed = replace(plan, tables={**plan.tables, **chosen})
    if gain <= NOTHING or not fits(
        plan_memory(problem.workload, problem.topology, changed, problem.hardware.device)
    ):
        return
    logger.warning(
        "replicated, %s (%s) would take the iteration from %s to %s (%s less), but the optimizer "
        "of the dense part would step them instead of their own; to allow it, give each "
        "ParameterConstraints(sharding_types=['data_parallel', 'table_wise', 'row_wise', "
        "'column_wise'])",
        plural(least, "table"),
        listed(f"'{key}'" for key in chosen),
        ms(times[0]),
        ms(times[least]),
        percent(gain),
    )


def _replicated(table: Table, topology: Topology) -> TablePlan:
    """A table on every rank."""
    size = table.num_embeddings, table.embedding_dim
    shards = tuple(Shard(rank, (0, 0), size) for rank in range(topology.world_size))
    return TablePlan(ShardingType.DATA_PARALLEL, ComputeKernel.DENSE, shards, table.module)
