"""Price of changing a running job from one plan to another, as TorchRec reshards.

TorchRec moves table by table: weights, then optimizer state, each first between hosts and then
within them, from every rank that has a part of a shard to the rank that needs it; one batch of
sends and receives ends before the next begins (torchrec/distributed/sharding/dynamic_sharding.py,
`prepare_comm_ops` and `transfer_data`). A batch takes as long as its busiest rank sends or
receives. A module whose tables move is built anew, so that the shards that stay are copied once
within their rank's memory (`update_state_dictionaries`), and both copies exist for that time.

What it cannot move in place (`search.in_use.price`) crosses the same links through a checkpoint,
whose files are not priced.

Which moves TorchRec can make while a job runs, and why it cannot make the others.

`DistributedModelParallel.reshard` (torchrec 1.8 and 1.9, torchrec/distributed/embeddingbag.py
`update_shards`, torchrec/distributed/sharding/dynamic_sharding.py) was seen to fail, to hang or to
lose optimizer state for all that is named here (tests/distributed/test_live.py).

Why: docs/decisions/0031-plan-in-use.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from predictor.cost.collectives import latency_ms, transfer_ms
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.workload import Optimizer, Table
from search.in_use.moves import moved_tables, overlap, table_memory
from search.problem import Problem

IN_PLACE = (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE)
"""Sharding types that TorchRec can move (`prepare_comm_ops`)."""
STATELESS = (Optimizer.SGD, Optimizer.EXACT_SGD)
ROW_STATE = (Optimizer.ROWWISE_ADAGRAD,)
"""Optimizers with one state for each row and column shard."""
MOVED_STATE = (*STATELESS, *ROW_STATE, Optimizer.ADAGRAD, Optimizer.LARS_SGD)
"""Optimizers whose whole state moves: it takes `momentum1` and nothing else."""


def find_obstacles(
    tables: Mapping[str, Table], before: ShardingPlan, after: ShardingPlan, moved: Sequence[str]
) -> list[str]:
    """List why a move cannot be made in place, a phrase per table or module; empty if it can.

    Args:
        tables: of the model, under the keys of both plans.
        moved: keys of those that differ.
    """
    obstacles = []
    for key in moved:
        obstacles += [
            f"table '{key}' {why}"
            for why in _of_table(tables[key], before.tables[key], after.tables[key])
        ]
    for module in dict.fromkeys(tables[key].module for key in moved):
        mine = {key: table for key, table in tables.items() if table.module == module}
        obstacles += [f"module '{module}' {why}" for why in _of_module(mine, before)]
    return obstacles


def allowed_in_place(
    tables: Mapping[str, Table], plan: ShardingPlan
) -> Callable[[str, TablePlan], bool]:
    """Return True if TorchRec could change a table's sharding to another one in place, on whatever
    distinct ranks, as `PlanInUse.allows` takes it.

    Args:
        tables: of the model, under the keys of the plan.
        plan: what runs.
    """
    stuck: set[str] = set()
    for module in {table.module for table in tables.values()}:
        mine = {key: table for key, table in tables.items() if table.module == module}
        if any(_of_module(mine, plan)):
            stuck |= mine.keys()

    def allows(key: str, after: TablePlan) -> bool:
        return key not in stuck and not any(_of_table(tables[key], plan.tables[key], after))

    return allows


def _of_table(table: Table, before: TablePlan, after: TablePlan) -> Iterator[str]:
    was, now = before.sharding_type, after.sharding_type
    if was is not now or was not in IN_PLACE:
        yield f"goes from {was} to {now}; only table_wise and column_wise stay what they are"
    if not before.compute_kernel == after.compute_kernel == ComputeKernel.FUSED:
        yield f"has the kernel {before.compute_kernel}, then {after.compute_kernel}; only fused"
    if len(set(after.ranks)) < len(after.ranks):
        yield "has two shards on one rank afterwards, of which only one is filled"
    widths = sorted({shard.size[1] for shard in after.shards})
    if len(widths) > 1:
        yield f"has column shards of {widths} columns afterwards; TorchRec loads only equal ones"
    if table.optimizer not in MOVED_STATE:
        yield f"has {table.optimizer}, of whose states only the first is moved"
    cuts = [sorted(shard.offset[1] for shard in plan.shards) for plan in (before, after)]
    if table.optimizer in ROW_STATE and cuts[0] != cuts[1]:
        yield f"has {table.optimizer}, whose states do not follow other column cuts"


def _of_module(tables: Mapping[str, Table], before: ShardingPlan) -> Iterator[str]:
    if not all(table.is_pooled for table in tables.values()):
        yield "does not pool; only an EmbeddingBagCollection can be resharded"
    plans = [before.tables[key] for key in tables]
    if any(plan.sharding_type is ShardingType.DATA_PARALLEL for plan in plans):
        yield "has data_parallel tables, which TorchRec does not build anew"
    stateless = {table.optimizer in STATELESS for table in tables.values()}
    if len(stateless) > 1:
        yield "mixes optimizers with and without state, and would wait for states nobody sends"


INTER, INTRA = "between hosts", "within hosts"
LINKS = (INTER, INTRA)
PAIR = 2
"""Number of ranks of one transfer."""


@dataclass(frozen=True)
class Move:
    """Move from the plan in use to another one.

    Args:
        tables: keys of those that differ.
        link_bytes: ``between hosts`` and ``within hosts`` -> weights and fused optimizer state that
            reach a rank which did not hold them.
        seconds: that the job stands still.
        both_copies_bytes: of the rank that has most to hold while old and new modules exist.
        in_place: TorchRec can make this move while the job runs: it can reshard these types, and
            every rank has the memory for both copies.
    """

    tables: tuple[str, ...]
    link_bytes: Mapping[str, int]
    seconds: float
    both_copies_bytes: int
    in_place: bool

    @property
    def bytes(self) -> int:
        """Bytes over all links."""
        return sum(self.link_bytes.values())

    def pays_back_after(self, before_ms: float, after_ms: float) -> float | None:
        """Return the steps until the faster plan makes up for the move; None if it never does, or
        nothing moves."""
        if after_ms >= before_ms or not self.tables:
            return None
        return 1e3 * self.seconds / (before_ms - after_ms)


@dataclass
class _Traffic:
    """Bytes that ranks send and receive in one batch, by link."""

    sent: dict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))
    received: dict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))

    def busiest(self, link: str) -> float:
        """Return the bytes of the rank that sends or receives most over a link."""
        found = [*self.sent.items(), *self.received.items()]
        return max((size for (way, _), size in found if way == link), default=0.0)

    def total(self, link: str) -> float:
        """Return the bytes over a link."""
        return sum(size for (way, _), size in self.received.items() if way == link)


class MovePrice:
    """Pricing of moves from one plan to any other of the same model and ranks.

    Args:
        before: the plan in use, under the workload's keys.
        held: key -> the table's shards as they lie now, where they differ from the plan's: those of
            a table that had fewer rows, none of one that is new. None: those of the plan.
    """

    def __init__(
        self,
        problem: Problem,
        before: ShardingPlan,
        held: Mapping[str, Sequence[Shard]] | None = None,
    ) -> None:
        self.problem = problem
        self.before = before
        self.held = {key: table.shards for key, table in before.tables.items()} | dict(held or {})
        self.tables = dict(zip(problem.workload.keys, problem.workload.tables, strict=True))
        self.table_traffic = lru_cache(maxsize=1 << 14)(self._table_traffic)

    def of(self, after: ShardingPlan) -> Move:
        """Return the move to a plan."""
        moved = tuple(key for key in moved_tables(self.before, after) if self.held[key])
        cut_anew = [key for key, table in self.before.tables.items() if self._differs(key, table)]
        ms, link_bytes = 0.0, dict.fromkeys(LINKS, 0)
        for key in dict.fromkeys((*moved, *cut_anew)):
            weights, states = self.table_traffic(key, after.tables[key])
            for link in link_bytes:
                link_bytes[link] += round(weights.total(link) + states.total(link))
                ms += self._link_ms(weights.busiest(link), link)
                ms += self._link_ms(states.busiest(link), link)
        stay_ms, both = self._rebuild(after, moved)
        in_place = both <= min(self._caps) and not find_obstacles(
            self.tables, self.before, after, moved
        )
        return Move(moved, link_bytes, (ms + stay_ms) / 1e3, both, in_place)

    @property
    def _caps(self) -> tuple[int, ...]:
        """Bytes that each rank has for tables, on the device that holds them."""
        topology = self.problem.topology
        on_cpu = self.problem.hardware.device == "cpu"
        return topology.ddr_cap_bytes if on_cpu else topology.hbm_cap_bytes

    def arriving_bytes(self, key: str, plan: TablePlan) -> float:
        """Return the bytes that a table's sharding brings to ranks that did not hold them."""
        if plan == self.before.tables[key] and not self._differs(key, plan):
            return 0.0
        return sum(part.total(link) for part in self.table_traffic(key, plan) for link in LINKS)

    def _differs(self, key: str, plan: TablePlan) -> bool:
        """Return True if the table's shards do not lie as in a plan."""
        return tuple(self.held[key]) != plan.shards

    def _table_traffic(self, key: str, after: TablePlan) -> tuple[_Traffic, _Traffic]:
        """Return the traffic of the weights and of the optimizer state of one table."""
        table, before = self.tables[key], self.held[key]
        traffics = _Traffic(), _Traffic()
        for shard, memory in zip(
            after.shards, table_memory(table, self.problem, after), strict=True
        ):
            elements = shard.size[0] * shard.size[1]
            weights = shard.size[0] * table.row_bytes(shard.size[1])
            for old, part in self._sources(shard, before):
                share = part / elements
                for traffic, size in zip(traffics, (weights, memory.optimizer_bytes), strict=True):
                    link = self._link(old.rank, shard.rank)
                    traffic.sent[link, old.rank] += share * size
                    traffic.received[link, shard.rank] += share * size
        return traffics

    def _sources(self, shard: Shard, before: Sequence[Shard]) -> list[tuple[Shard, int]]:
        """Return the shards on other ranks that send a shard its elements, and how many each sends.

        Among replicas the rank's own comes first, then one of its host.
        """
        missing = shard.size[0] * shard.size[1]
        near = sorted(
            before,
            key=lambda old: (
                old.rank != shard.rank,
                self._link(old.rank, shard.rank) != INTRA,
                old.rank,
            ),
        )
        sources = []
        for old in near:
            part = min(missing, overlap(shard, old))
            missing -= part
            if part and old.rank != shard.rank:
                sources.append((old, part))
        return sources

    def _link(self, sender: int, receiver: int) -> str:
        # TorchRec's `_is_intra_comm` compares hosts; links within a domain are as fast
        topology = self.problem.topology
        return INTRA if topology.group_of(sender) == topology.group_of(receiver) else INTER

    def _link_ms(self, size_bytes: float, link: str) -> float:
        if not size_bytes:
            return 0.0
        links = self.problem.hardware.collectives
        curve = (links.intra if link == INTRA else links.inter).all_to_all
        return latency_ms(curve, PAIR) + float(transfer_ms(curve, np.asarray(size_bytes), PAIR))

    def rebuilt_bytes(self, after: ShardingPlan) -> np.ndarray:
        """Return the new weights and optimizer state beside the old ones on every rank, of modules
        that a move rebuilds, ``[world_size]``."""
        moved = moved_tables(self.before, after)
        modules = {self.tables[key].module for key in moved}
        keys = [key for key, table in self.tables.items() if table.module in modules]
        parts = [self._rank_bytes(key, after.tables[key]) for key in keys]
        return np.sum(parts, axis=0) if parts else np.zeros(self.problem.topology.world_size)

    def _rebuild(self, after: ShardingPlan, moved: Sequence[str]) -> tuple[float, int]:
        """Return the ms to copy shards that stay, and the bytes of the fullest rank while both the
        old and the new modules exist."""
        modules = {self.tables[key].module for key in moved}
        world = self.problem.topology.world_size
        copied, peak = np.zeros(world), np.zeros(world)
        for key, table in self.tables.items():
            old = self._rank_bytes(key, self.before.tables[key])
            new = self._rank_bytes(key, after.tables[key])
            rebuilt = table.module in modules
            peak += old + (new if rebuilt else 0.0)
            if rebuilt and key not in moved:
                copied += new
        return 2 * float(copied.max()) / self.problem.hardware.memory.hbm, round(peak.max())

    def _rank_bytes(self, key: str, plan: TablePlan) -> np.ndarray:
        """Return the bytes of weights and optimizer state of one table, ``[world_size]``."""
        rank_bytes = np.zeros(self.problem.topology.world_size)
        table = self.tables[key]
        memories = table_memory(table, self.problem, plan)
        for shard, memory in zip(plan.shards, memories, strict=True):
            weights = shard.size[0] * table.row_bytes(shard.size[1])
            rank_bytes[shard.rank] += weights + memory.optimizer_bytes
        return rank_bytes
