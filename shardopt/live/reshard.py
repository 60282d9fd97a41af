"""A plan that would pay for a running job, as `shardopt plan --from` finds it, and the move to it.

All that a move needs is checked before anything moves.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from predictor.errors import PlanError
from predictor.model.plan import ShardingPlan
from predictor.model.workload import Feature, Workload
from predictor.units import format_bytes
from search.in_use.price import Move, MovePrice, find_obstacles
from search.problem import PlanInUse, Problem, Result
from search.solve import solve
from search.stop import Stop
from shardopt.api.cache import digest
from shardopt.api.document import move_keys
from shardopt.api.json_object import Object, finite
from shardopt.config.distributions import measured_distribution
from shardopt.extras import needs_torchrec
from shardopt.npz import load_arrays
from shardopt.stats.result import FeatureStats, write_stats
from shardopt.torchrec.convert import sharding_spec
from shardopt.torchrec.private import dense_part_of, messages_through, permute_features
from shardopt.torchrec.running import agree, find_mismatches, find_pipelined, free_bytes, homes_of

with needs_torchrec():
    import torch.distributed as dist
    from torchrec.distributed.types import EmbeddingModuleShardingPlan

MOST_BYTES = 2**26


@dataclass(frozen=True)
class Proposal:
    """Proposal of another plan, and the move to it.

    Args:
        before, plan: the running plan and the proposed one; the same plan if staying is best.
        move: between them.
        obstacles: why it cannot be made in place; empty if it can.
        new_bytes: that every rank needs beside what it holds, while both modules are there.
        measured_ms: median step of the window behind it.
        stats_file: of the window's ids, which a model file can name.
    """

    before: ShardingPlan
    plan: ShardingPlan
    result: Result
    move: Move
    obstacles: tuple[str, ...]
    new_bytes: tuple[int, ...]
    measured_ms: float
    stats_file: str

    @property
    def recommended(self) -> bool:
        """There is a move, and it pays for itself within the horizon."""
        return bool(self.move.tables)

    @property
    def in_place(self) -> bool:
        """TorchRec can make it while the job runs."""
        return self.recommended and not self.obstacles

    @property
    def gain(self) -> float:
        """Share of the step time that it is predicted to save."""
        in_use = self.result.in_use
        return 0.0 if in_use is None else 1 - self.result.best.iteration_ms / in_use.iteration_ms

    def to_object(self) -> Object:
        """Return JSON: ``from`` and ``move`` of ``shardopt plan --json``, ``iteration_ms``,
        ``lower_bound_ms``, and ``measured_ms``, ``gain`` and ``obstacles``."""
        data: Object = finite(
            {
                "iteration_ms": self.result.best.iteration_ms,
                "lower_bound_ms": self.result.lower_bound_ms,
                **move_keys(self.result, self.move, "the running plan"),
                "measured_ms": self.measured_ms,
                "gain": self.gain,
                "obstacles": list(self.obstacles),
            }
        )
        return data


def find_proposal(
    problem: Problem, in_use: PlanInUse, stop: Stop, *, measured_ms: float, stats_file: str
) -> Proposal:
    """The plan that costs least over the horizon, moves included.

    Args:
        problem: of the window's data.
        in_use: what runs, under the workload's keys.
        measured_ms, stats_file: as `Proposal` has them.
    """
    result = solve(replace(problem, in_use=in_use), stop, 0, top_k=1)
    price, after = MovePrice(problem, in_use.plan, in_use.held), result.best.plan
    move = price.of(after)
    return Proposal(
        in_use.plan,
        after,
        result,
        move,
        tuple(find_obstacles(price.tables, in_use.plan, after, move.tables)),
        tuple(int(size) for size in price.rebuilt_bytes(after)),
        measured_ms,
        stats_file,
    )


def observed_workload(
    workload: Workload, statistics: Iterable[FeatureStats], path: Path
) -> Workload:
    """The workload with the pooling factors and index distributions of a window.

    Args:
        statistics: features without ids, and those that nobody counted, stay as they are.
        path: the .npz file to write the window's statistics to.
    """
    counted = {measured.name: measured for measured in statistics if measured.seen is not None}
    write_stats(path, counted.values())
    arrays = load_arrays(path, MOST_BYTES)
    tables = []
    for table in workload.tables:
        features = [
            _observed(feature, counted[feature.name], arrays)
            if feature.name in counted
            else feature
            for feature in table.features
        ]
        tables.append(replace(table, features=tuple(features)))
    return replace(workload, tables=tuple(tables))


def _observed(feature: Feature, statistics: FeatureStats, arrays: Mapping[str, Any]) -> Feature:
    deviation, most = feature.pooling_factor_std, feature.pooling_factor_max
    if feature.num_poolings == 1:  # with several poolings a sample, only their sum was counted
        deviation = statistics.pooling_factor_std if statistics.varies else None
        most = statistics.pooling_factor_max if statistics.varies else None
    return replace(
        feature,
        pooling_factor=statistics.pooling_factor / feature.num_poolings,
        pooling_factor_std=deviation,
        pooling_factor_max=most,
        distribution=measured_distribution(arrays, feature.name),
    )


MOST_TAG = 0x7FFFFFFF
"""Tags of gloo's messages have 31 bits."""


def _tag(*words: Any, **named: Any) -> int:
    """The same on all ranks.

    TorchRec tags messages with Python's hash of texts, which differs from process to process: under
    gloo, which matches tags, ranks would wait for ever.
    """
    text = repr((words, sorted(named.items())))
    return zlib.crc32(text.encode()) & MOST_TAG


_DONE = SimpleNamespace(wait=lambda: None)


class _Messages:
    """`torch.distributed`, but what a rank sends itself is copied, and what is sent lies in one
    piece.

    A column shard that stays where it is while others of its table move, and columns of it that do,
    are sent from a rank to itself, which gloo cannot; and columns of an optimizer state are sent as
    they lie, which no backend takes.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def batch_isend_irecv(self, ops: Sequence[Any]) -> list[Any]:
        """Send and receive; return one work for each op, in their order."""
        me = dist.get_rank()
        own = {op.tag: op.tensor for op in ops if op.peer == me and op.op is dist.isend}
        far = [op for op in ops if op.peer != me]
        for op in ops:
            if op.peer == me and op.op is dist.irecv:
                op.tensor.copy_(own[op.tag])
            elif op.op is dist.isend:
                op.tensor = op.tensor.contiguous()
        works = dist.batch_isend_irecv(far) if far else []
        each = iter(works if len(works) == len(far) else works * len(far))  # NCCL has one for all
        return [_DONE if op.peer == me else next(each) for op in ops]


def reshard(dmp: Any, proposal: Proposal) -> None:
    """Move a running model to a proposed plan, between two steps, on all ranks at once.

    Raises:
        PlanError: something forbids it, on whichever rank; names all of it. Nothing was moved.
    """
    agree(
        digest(proposal.before, proposal.plan),
        _problems(dmp, proposal),
        "the running job cannot take this proposal",
        "Nothing was moved. Where a checkpoint is all that helps, use save_for_plan and "
        "load_under_plan",
    )
    homes = homes_of(dmp, proposal.plan)
    changed: dict[str, EmbeddingModuleShardingPlan] = {}
    for key in proposal.move.tables:
        path, name = homes[key]
        table, sharding = proposal.plan.tables[key], copy.deepcopy(dmp.plan.plan[path][name])
        rows = table.shards[0].size[0]
        sharding.ranks = list(table.ranks)
        sharding.sharding_spec = sharding_spec(
            table, rows, dmp.device.type, proposal.plan.local_world_size
        )
        changed.setdefault(path, EmbeddingModuleShardingPlan())[name] = sharding
    with messages_through(_tag, _Messages()):
        for path, tables in changed.items():
            # set where the features come in the order of the tables, and never taken back: after a
            # move that changes this order, ids would be looked up in other tables, silently
            # (`_create_input_dist` and `update_shards` in torchrec/distributed/embeddingbag.py)
            permute_features(dmp.module.get_submodule(path))
            dmp.reshard({path: (0.0, tables)}, path or None)


def _problems(dmp: Any, proposal: Proposal) -> list[str]:
    """List what forbids the move on this rank, cheapest first."""
    if not hasattr(dmp, "reshard"):
        return [f"{type(dmp).__name__} has no reshard; it takes torchrec 1.8 or newer"]
    if not proposal.move.tables:
        return ["it moves no table"]
    try:
        problems = list(find_mismatches(dmp, proposal.before))
    except PlanError as error:
        return [str(error)]
    if problems:
        return [f"it is for another plan than the one that runs: {'; '.join(problems)}"]
    problems = [*proposal.obstacles, *find_pipelined(dmp)]
    if not hasattr(dense_part_of(dmp), "module"):
        problems.append("the dense part is not in DistributedDataParallel, which reshard expects")
    need, free = proposal.new_bytes[dist.get_rank()], free_bytes(dmp.device)
    if need > free:
        problems.append(
            f"the old and the new modules are there at once: rank {dist.get_rank()} needs "
            f"{format_bytes(need)} more and has {format_bytes(free)}"
        )
    return problems
