"""One way to shard one table: sizes, kernel, memory, and where its shards may lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import Any

from predictor.errors import PlanError
from predictor.model.memory.caches import DEFAULT_CACHE_LOAD_FACTOR
from predictor.model.memory.ranks import UVM_KERNELS, ShardMemory
from predictor.model.plan import ComputeKernel, Shard, ShardingType, TablePlan
from predictor.model.topology import Topology

Size = tuple[int, int]


class Partition(StrEnum):
    """Binding of shards to ranks, by the values of TorchRec's `PartitionByType`."""

    DEVICE = "device"
    HOST = "host"
    UNIFORM = "uniform"
    MULTI_HOST = "multi_host"


PARTITION = {
    ShardingType.DATA_PARALLEL: Partition.UNIFORM,
    ShardingType.TABLE_WISE: Partition.DEVICE,
    ShardingType.COLUMN_WISE: Partition.DEVICE,
    ShardingType.ROW_WISE: Partition.UNIFORM,
    ShardingType.TABLE_ROW_WISE: Partition.HOST,
    ShardingType.TABLE_COLUMN_WISE: Partition.HOST,
    ShardingType.GRID_SHARD: Partition.MULTI_HOST,
}
"""TorchRec's `get_partition_by_type` (planner/enumerators.py)."""


@dataclass(frozen=True)
class AllowedPlacements:
    """Placements that an option allows.

    Args:
        units: runs of consecutive shards that are placed together. ``units[u]`` lists the
            alternatives of run ``u``; an alternative gives the rank of every shard of the run.
            One alternative is chosen for every run.
        same_group: all runs must lie in one intra group (TWCW).
    """

    units: tuple[tuple[tuple[int, ...], ...], ...]
    same_group: bool = False

    @property
    def is_empty(self) -> bool:
        """True if some run of shards has no legal rank."""
        return not all(self.units)


@dataclass(frozen=True, eq=False)
class Option:
    """One way to shard one table. A space holds each option once, so identity is equality.

    Args:
        table: index of the table in the workload.
        sizes: ``[rows, columns]`` of every shard.
        offsets: first row and column of every shard.
        cache_load_factor: set where the table's constraint sets it; the runtime's default if None.
        ranks: ranks that the table's constraint allows; all if None.
        key_value_params: sizes of a key-value table's caches, for its plan.
        pinned: the one placement of a table that the plan in use splits as no other option does.
        memory: what every shard needs on its rank.
        added_by_shardopt: TorchRec's enumerator does not offer it.
    """

    table: int
    sharding_type: ShardingType
    compute_kernel: ComputeKernel
    sizes: tuple[Size, ...]
    offsets: tuple[Size, ...]
    module: str = "ebc"
    cache_load_factor: float | None = None
    enforce_hbm: bool | None = None
    key_value_params: Mapping[str, int] | None = None
    ranks: tuple[int, ...] | None = None
    pinned: tuple[int, ...] | None = None
    memory: tuple[ShardMemory, ...] = ()
    added_by_shardopt: bool = False

    @property
    def by_row(self) -> bool:
        """True if rows are split and the partial sums are added up."""
        return self.sharding_type in (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)

    @property
    def partition(self) -> Partition:
        """Binding of its shards to ranks."""
        return PARTITION[self.sharding_type]

    @property
    def exchange(self) -> tuple[str, str]:
        """Module and sharding type: tables alike in both exchange ids and outputs together."""
        return self.module, self.sharding_type

    @property
    def num_shards(self) -> int:
        """Number of shards, empty ones included."""
        return len(self.sizes)

    @property
    def pieces(self) -> int:
        """Number of pieces that the table is cut into; a copy on every rank is no piece."""
        return 1 if self.sharding_type is ShardingType.DATA_PARALLEL else self.num_shards

    @property
    def column_width(self) -> int:
        """Columns of a shard."""
        return self.sizes[0][1]

    @property
    def bytes_of(self) -> tuple[list[int], list[int]]:
        """Bytes of HBM and of host memory that every shard takes."""
        return [m.hbm_bytes for m in self.memory], [m.ddr_bytes for m in self.memory]

    @cached_property
    def way(self) -> tuple[object, ...]:
        """Key that is unique among the options of the table."""
        parameters = {"enforce_hbm": self.enforce_hbm}
        host = _host_memory(self.compute_kernel, self.cache_load_factor, parameters)
        return self.sharding_type, self.compute_kernel, self.sizes, self.offsets, *host

    @property
    def label(self) -> str:
        """Short name, such as ``CW32/fused``."""
        split = (
            ShardingType.COLUMN_WISE,
            ShardingType.TABLE_COLUMN_WISE,
            ShardingType.GRID_SHARD,
        )
        width = str(self.column_width) if self.sharding_type in split else ""
        cached = self.compute_kernel.has_load_factor
        usual = self.cache_load_factor in (None, DEFAULT_CACHE_LOAD_FACTOR)
        share = f"@{self.cache_load_factor:g}" if cached and not usual else ""
        return f"{self.sharding_type.short}{width}/{self.compute_kernel}{share}"

    def legal_ranks(self, topology: Topology) -> AllowedPlacements:
        """Return the legal ranks of the shards by partition, constraint ``ranks`` and groups.

        After the partitioner of TorchRec (planner/partitioners.py, `GreedyPerfPartitioner`):
        `_device_partition`, `_cohost_partition`, `_uniform_partition`, `_multi_hosts_partition`.
        Like there, the column blocks of a GRID may share a host.
        """
        if self.pinned is not None:
            return AllowedPlacements(((self.pinned,),))
        allowed = _allowed(topology.world_size, self.ranks)
        if self.partition is Partition.UNIFORM:
            complete = len(allowed) == topology.world_size == self.num_shards
            return AllowedPlacements(((allowed,) if complete else (),))
        if self.partition is Partition.MULTI_HOST:
            blocks = self.num_shards // topology.intra_group_size
            return AllowedPlacements((_groups(topology.intra_group_size, allowed),) * blocks)
        if self.sharding_type is ShardingType.TABLE_ROW_WISE:
            return AllowedPlacements((_groups(topology.intra_group_size, allowed),))
        return AllowedPlacements(
            (_one_by_one(allowed),) * self.num_shards, self.partition is Partition.HOST
        )

    def is_legal(self, ranks: Sequence[int], topology: Topology) -> bool:
        """Return True if these ranks, one per shard, are a legal placement."""
        legal = self.legal_ranks(topology)
        if len(ranks) != self.num_shards or legal.is_empty:
            return False
        start = 0
        for alternatives in legal.units:
            length = len(alternatives[0])
            if tuple(ranks[start : start + length]) not in alternatives:
                return False
            start += length
        return not legal.same_group or len({topology.group_of(r) for r in ranks}) == 1


def _host_memory(
    kernel: ComputeKernel, load_factor: float | None, parameters: Mapping[str, Any]
) -> tuple[float, bool]:
    """Return the key of an option with rows on the host: share on the device, weights in
    HBM."""
    return (
        (load_factor or DEFAULT_CACHE_LOAD_FACTOR) if kernel.has_load_factor else 0.0,
        kernel in UVM_KERNELS and bool(parameters.get("enforce_hbm")),
    )


@lru_cache(maxsize=64)
def _one_by_one(ranks: tuple[int, ...]) -> tuple[tuple[int], ...]:
    """Return every rank alone; cached, because thousands of options share it."""
    return tuple((rank,) for rank in ranks)


@lru_cache(maxsize=64)
def _allowed(world_size: int, ranks: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the ranks that a constraint allows, in order; all without one."""
    return tuple(range(world_size) if ranks is None else sorted(set(ranks)))


@lru_cache(maxsize=64)
def _groups(size: int, allowed: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every intra group of ``size`` ranks whose ranks are all allowed."""
    groups = (tuple(range(first, first + size)) for first in allowed if first % size == 0)
    return tuple(filter(frozenset(allowed).issuperset, groups))


def place(option: Option, ranks: Sequence[int]) -> TablePlan:
    """Return the table plan with shard ``i`` on ``ranks[i]``."""
    if len(ranks) != option.num_shards:
        raise PlanError(f"{len(ranks)} ranks for the {option.num_shards} shards of {option.label}")
    parameters: dict[str, Any] = {}
    if option.compute_kernel.has_load_factor and option.cache_load_factor:
        parameters["cache_params"] = {"load_factor": option.cache_load_factor}
    if option.enforce_hbm is not None:
        parameters["enforce_hbm"] = option.enforce_hbm
    if option.compute_kernel.is_stored and option.key_value_params:
        parameters["key_value_params"] = dict(option.key_value_params)
    shards = tuple(
        Shard(rank, offset, size)
        for rank, offset, size in zip(ranks, option.offsets, option.sizes, strict=True)
    )
    return TablePlan(option.sharding_type, option.compute_kernel, shards, option.module, parameters)


def sample(option: Option, shards: Sequence[int]) -> TablePlan:
    """Return a plan of some shards of an option alone, for what is the same on any rank."""
    sizes = tuple(option.sizes[i] for i in shards)
    offsets = tuple(option.offsets[i] for i in shards)
    return place(replace(option, sizes=sizes, offsets=offsets), [0] * len(shards))


Choice = tuple[Option, tuple[int, ...]]
"""Sharding of one table, and the rank of every shard."""


@dataclass(frozen=True)
class ChoicesInUse:
    """Choices of a plan in use for every table, and how many of them may change.

    Args:
        choices: per table; None where constraints forbid what the plan does, so that it must move.
        max_moves: tables that may change, >= 0.
        arriving_bytes: a table and its choice -> weights and optimizer state that reach ranks
            which do not hold them.
        max_bytes: of these over all tables; None for any number.
        new: tables that no rank holds yet, whose place is no move.
    """

    choices: tuple[Choice | None, ...]
    max_moves: int
    arriving_bytes: Callable[[int, Choice], float] = lambda table, choice: 0.0
    max_bytes: float | None = None
    new: frozenset[int] = frozenset()

    @property
    def is_limited(self) -> bool:
        """True if some table may have to stay."""
        return self.max_moves < len(self.choices) or self.max_bytes is not None

    def moved_bytes(self, assignment: Sequence[Choice]) -> float:
        """Return the bytes that reach ranks without them."""
        return sum(self.arriving_bytes(t, assignment[t]) for t in self.moved(assignment))

    def moved(self, assignment: Sequence[Choice]) -> list[int]:
        """Return the tables that have another option or other ranks than in use."""
        pairs = zip(assignment, self.choices, strict=True)
        return [
            table
            for table, (now, before) in enumerate(pairs)
            if now != before and table not in self.new
        ]

    def allows(self, assignment: Sequence[Choice]) -> bool:
        """Return True if it moves no more tables and bytes than allowed."""
        if not self.is_limited:
            return True
        if len(self.moved(assignment)) > self.max_moves:
            return False
        return self.max_bytes is None or self.moved_bytes(assignment) <= self.max_bytes


@dataclass(frozen=True)
class Space:
    """The search space.

    Args:
        keys: plan key of every table.
        options: options per table, in the workload's order.
        co_locate: tables (by index) that must share their set of ranks, group by group.
        in_use: choices of a plan in use, near which plans must stay; None if there is none.
        means: per module with several tables, those (by index) with pooling mean, and all of them:
            the rows of the first may be split where those of all are.
    """

    keys: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    co_locate: tuple[tuple[int, ...], ...] = ()
    in_use: ChoicesInUse | None = None
    means: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()

    @property
    def size(self) -> int:
        """Number of options over all tables."""
        return sum(map(len, self.options))

    @property
    def every_option(self) -> list[Option]:
        """Options of all tables, one after the other."""
        return [option for table in self.options for option in table]

    def option_of(self, table: int, plan: TablePlan) -> Option | None:
        """Return the option that a table plan places, or None."""
        key = (
            plan.sharding_type,
            plan.compute_kernel,
            tuple(s.size for s in plan.shards),
            tuple(s.offset for s in plan.shards),
            *_host_memory(plan.compute_kernel, plan.cache_load_factor, plan.parameters),
        )
        return next((o for o in self.options[table] if o.way == key), None)

    def divides_right(self, options: Sequence[Option]) -> bool:
        """Return True if TorchRec divides exactly the means by the lengths of their bags."""
        return not any(True for _ in self.wrong_means(options))

    def wrong_means(self, options: Sequence[Option]) -> Iterator[int]:
        """Yield mean-pooled tables that are split by rows while others of their module are not."""
        for means, tables in self.means:
            if not all(options[t].by_row for t in tables):
                yield from (t for t in means if options[t].by_row)

    def beside(self, options: Sequence[Option]) -> Space:
        """Return the plans that split rows in the same modules with means as these options do.

        Each of their tables can change its option alone.
        """
        reduced = list(self.options)
        for means, tables in self.means:
            split = all(options[t].by_row for t in tables)
            for t in tables if split else means:
                reduced[t] = tuple(o for o in reduced[t] if o.by_row is split)
        return replace(self, options=tuple(reduced)) if self.means else self

    def co_located(self, placement: list[tuple[int, ...]]) -> bool:
        """Return True if the tables of each `co_locate` group share ranks; ``placement[table]``."""
        return all(len({frozenset(placement[t]) for t in group}) == 1 for group in self.co_locate)
