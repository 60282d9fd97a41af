"""Tables that shardopt has no model for: TorchRec places them, by its own estimates.

Why: docs/decisions/0048.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardopt.extras import needs_torchrec
from shardopt.torchrec.module.read_module import fused_params_of
from shardopt.torchrec.module.read_table import why_not_predicted
from shardopt.torchrec.plan.options import TableKey, group_by_table

with needs_torchrec():
    from torchrec.distributed.planner import Topology as TorchRecTopology
    from torchrec.distributed.planner.types import (
        Enumerator,
        Partitioner,
        PerfModel,
        PlannerError,
        PlannerErrorType,
        Proposer,
        ShardingOption,
    )
    from torchrec.distributed.planner.utils import reset_shard_rank

Options = list[ShardingOption]


def reasons_to_leave(
    options: Sequence[ShardingOption], fused_params: Callable[[ShardingOption], Mapping[str, Any]]
) -> dict[TableKey, str]:
    """Tables that are left to TorchRec, and why.

    Args:
        options: of all tables.
        fused_params: those of the sharder of an option.
    """
    reasons = {
        key: why_not_predicted(of_table, fused_params(of_table[0]))
        for key, of_table in group_by_table(options).items()
    }
    return {key: reason for key, reason in reasons.items() if reason}


def reasons_of(
    options: Sequence[ShardingOption], topology: TorchRecTopology, sharders: Sequence[Any]
) -> dict[TableKey, str]:
    """Tables that are left to TorchRec on some ranks, and why."""
    by_type = {sharder.module_type: sharder for sharder in sharders}
    return all_left(options, topology) or reasons_to_leave(
        options, lambda o: fused_params_of(by_type.get(type(o.module[1])))
    )


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
            seen: dict[tuple[int, ...], tuple[Options | None, float | None]] = {}
            while proposal := proposer.propose():
                key = tuple(sorted(map(hash, proposal)))
                if key not in seen:
                    plan, rating, error = self._try(proposal, topology, error)
                    seen[key] = plan, rating
                    if plan is not None and rating < (best[1] if best else math.inf):
                        best = copy.deepcopy(plan), rating
                plan, known = seen[key][0], seen[key][1]
                proposer.feedback(
                    partitionable=plan is not None,
                    plan=proposal if plan is None else plan,
                    perf_rating=known if plan is not None else None,
                    storage_constraint=topology,
                )
                reset_shard_rank(proposal)
        if best is None:
            raise PlannerError(
                error_type=PlannerErrorType.PARTITION,
                message=f"no plan of TorchRec fits for what is left to it: {error}",
            )
        return best

    def _try(
        self, proposal: Options, topology: TorchRecTopology, before: PlannerError | None
    ) -> tuple[Options | None, float, PlannerError | None]:
        try:
            plan = self.partitioner.partition(proposal=proposal, storage_constraint=topology)
            return plan, self.performance_model.rate(plan=plan), before
        except PlannerError as error:
            return None, math.inf, error


def without(topology: TorchRecTopology, options: Options) -> TorchRecTopology:
    """The memory that placed options leave."""
    left = copy.deepcopy(topology)
    for shard in (shard for option in options for shard in option.shards):
        left.devices[shard.rank].storage -= shard.storage
    return left


def describe_reasons(reasons: Mapping[TableKey, str]) -> str:
    """``table 'a': why; tables 'b', 'c': why``."""
    tables: dict[str, list[str]] = {}
    for (path, name), reason in reasons.items():
        tables.setdefault(reason, []).append(f"'{path}.{name}'" if path else f"'{name}'")
    return "; ".join(
        f"table{'s' if len(names) > 1 else ''} {', '.join(names)}: {reason}"
        for reason, names in tables.items()
    )
