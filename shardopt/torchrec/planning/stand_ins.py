"""One search in place of TorchRec's proposer, partitioner and performance model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from shardopt.extras import needs_torchrec
from shardopt.torchrec.plan.options import group_by_table

with needs_torchrec():
    from torchrec.distributed.planner import EmbeddingShardingPlanner
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

Options = list[ShardingOption]


class Searcher(Protocol):
    """What searches, and what it says of the plan that it found last."""

    rating: float

    def search(self, left: TorchRecTopology) -> Options:
        """The best plan as one placed option per table."""
        ...


class MinimumProposer(Proposer):
    """Proposes once, the options of least memory: TorchRec explains from them why nothing fits."""

    space: Options
    """All options of the enumerator."""

    def load(self, search_space: Options, enumerator: Enumerator | None = None) -> None:
        self.space = search_space
        self._proposals = [[min(o, key=_bytes) for o in group_by_table(search_space).values()]]

    def propose(self) -> Options | None:
        return self._proposals.pop() if self._proposals else None

    def feedback(
        self,
        partitionable: bool,
        plan: Options | None = None,
        perf_rating: float | None = None,
        storage_constraint: TorchRecTopology | None = None,
    ) -> None:
        """There is nothing to learn."""


def _bytes(option: ShardingOption) -> int:
    return sum(shard.storage.hbm + shard.storage.ddr for shard in option.shards if shard.storage)


class SearchPartitioner(Partitioner):
    """Searches all that the enumerator offers, whatever is proposed."""

    def __init__(self, planner: Searcher) -> None:
        self._planner = planner

    def partition(self, proposal: Options, storage_constraint: TorchRecTopology) -> Options:
        return self._planner.search(storage_constraint)


class PredictedPerfModel(PerfModel):
    """The iteration time that the search predicted, or TorchRec's rating of what is left to it."""

    def __init__(self, planner: Searcher) -> None:
        self._planner = planner

    def rate(self, plan: Options) -> float:
        return self._planner.rating


def check_storage(options: Sequence[ShardingOption], left: TorchRecTopology) -> None:
    """Refuse a plan that does not fit by the user's own storage estimator."""
    taken: dict[int, Any] = {}
    for shard in (shard for option in options for shard in option.shards):
        before = taken.get(shard.rank)
        taken[shard.rank] = shard.storage if before is None else before + shard.storage
    for device in left.devices:
        if device.rank in taken and not taken[device.rank].fits_in(device.storage):
            raise PlannerError(
                error_type=PlannerErrorType.PARTITION,
                message=f"the storage estimator counts {taken[device.rank]} on rank {device.rank}, "
                f"which has only {device.storage} left, while shardopt counted less; use a larger "
                "storage_reservation",
            )


_Planner = TypeVar("_Planner", bound=EmbeddingShardingPlanner)


def with_their_annotations(ours: type[_Planner]) -> type[_Planner]:
    """TorchRec's test of its stable interface compares annotations as objects, not by meaning."""
    for name in ("__init__", "plan", "collective_plan"):
        theirs = inspect.unwrap(getattr(EmbeddingShardingPlanner, name)).__annotations__
        inspect.unwrap(getattr(ours, name)).__annotations__.update(theirs)
    return ours
