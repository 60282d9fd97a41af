"""TorchRec's default planner as a baseline: its options, its costs, its proposals, its placement.

Re-derived from `EmbeddingShardingPlanner.plan` (planner/planners.py), the proposers in
planner/proposers.py (`GridSearchProposer`, `GreedyProposer` twice, `UniformProposer`) and
`NoopPerfModel` (planner/perf_models.py: the largest sum of shard costs on a rank). A test holds it
against the real planner.

TorchRec places every proposal, thousands of them. Here a proposal whose bound already says that
it cannot win, or cannot fit, is not placed; the proposers ignore feedback, so this changes nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from predictor.errors import InfeasibleError
from predictor.model.memory.ranks import MemoryRules, shard_memory
from predictor.model.plan import TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from search.baselines.greedy import NoRoomError
from search.baselines.torchrec_cost import Bandwidths, CostModel
from search.baselines.torchrec_partition import CostedOption, partition
from search.space.enumerate import enumerate_space
from search.space.option import Option, place

MAX_GRID = 10_000
"""TorchRec's `MAX_PROPOSALS` of the grid search."""
SLACK = 1e-9
"""Relative error that the bound of a proposal may have from summing in another order."""


@dataclass(frozen=True)
class TorchRecPlan:
    """What TorchRec's planner would answer.

    Args:
        tables: in the workload's order.
        options: the chosen option of every table.
        rating_ms: under TorchRec's own cost model; no iteration time.
        proposals: how many plans were proposed; ``placed`` had to be placed.
        cut_short: not all proposals were looked at.
    """

    tables: tuple[TablePlan, ...]
    options: tuple[Option, ...]
    rating_ms: float
    proposals: int
    placed: int
    cut_short: bool = False


def torchrec_plan(
    workload: Workload,
    topology: Topology,
    device: str = "cuda",
    bandwidths: Bandwidths | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> TorchRecPlan | None:
    """The plan of TorchRec's default planner, or None where it finds none.

    Memory is counted as TorchRec counts it, with its default pipeline type: the plan can be larger
    than the caps by shardopt's count. Constraints on ranks, which TorchRec does not know, are not
    honoured; both are for the caller to check.

    Args:
        topology: caps after the reservation.
        bandwidths: TorchRec's defaults if None.
        stop: asked, once a proposal fits, before every other one that has to be placed; the plan
            is then ``cut_short``, and may not be what TorchRec would answer.
    """
    order = _torchrec_order(workload)
    try:
        choices = _choices(workload, topology, device, bandwidths or Bandwidths())
    except InfeasibleError:
        return None  # a table that only our search has an option for
    best = best_proposal([choices[t] for t in order], topology, stop)
    if best.choices is None:
        return None
    chosen = dict(zip(order, zip(best.choices, best.ranks, strict=True), strict=True))
    in_order = [chosen[t] for t in range(len(workload.tables))]
    return TorchRecPlan(
        tuple(place(choice.option, ranks) for choice, ranks in in_order),
        tuple(choice.option for choice, _ in in_order),
        best.rating,
        best.proposals,
        best.placed,
        best.cut_short,
    )


def _torchrec_order(workload: Workload) -> list[int]:
    """The enumerator takes modules from a stack: the last one first."""
    modules = workload.modules[::-1]
    return sorted(
        range(len(workload.tables)), key=lambda t: modules.index(workload.tables[t].module)
    )


def _choices(
    workload: Workload, topology: Topology, device: str, bandwidths: Bandwidths
) -> list[list[CostedOption]]:
    """Every option with TorchRec's cost and storage."""
    base = replace(workload, train_pipeline="base")
    model = CostModel(base, topology, device, bandwidths)
    result = []
    for options in enumerate_space(base, topology, device, extended=False).options:
        table: list[CostedOption] = []
        for order, option in enumerate(options):
            memory = shard_memory(
                base.tables[option.table],
                base,
                topology,
                option.sharding_type,
                option.compute_kernel,
                option.sizes,
                option.cache_load_factor,
                device=device,
                rules=MemoryRules.TORCHREC,
            )
            hbm = tuple(m.hbm_bytes for m in memory)
            ddr = tuple(m.ddr_bytes for m in memory)
            table.append(CostedOption(option, model.shard_perf(option), hbm, ddr, order))
        result.append(table)
    return result


def best_proposal(
    tables: Sequence[list[CostedOption]],
    topology: Topology,
    stop: Callable[[], bool] = lambda: False,
) -> BestProposal:
    """What TorchRec's default proposers and its greedy partitioner make of costed options.

    Args:
        tables: the options of every table, both in the order of TorchRec's enumeration.
        topology, stop: as of `torchrec_plan`.
    """
    best = BestProposal(topology)
    made = list(tables)
    for proposal in itertools.chain(
        _grid(made), _greedy(made, depth=True), _greedy(made, depth=False), _uniform(made)
    ):
        if best.may_win(proposal):
            best.cut_short = best.choices is not None and stop()
            if best.cut_short:
                break
            best.place(proposal)
    return best


class BestProposal:
    """The best proposal so far, as `EmbeddingShardingPlanner.plan` keeps it; ``choices`` is None
    until one fits."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.rating = math.inf
        self.choices: list[CostedOption] | None = None
        self.ranks: list[tuple[int, ...]] = []
        self.proposals = 0
        self.placed = 0
        self.cut_short = False
        self._room = sum(topology.hbm_cap_bytes), sum(topology.ddr_cap_bytes)

    def may_win(self, proposal: _Proposal) -> bool:
        """Counts a proposal, and says whether its bounds leave it a chance."""
        self.proposals += 1
        hbm, ddr, bound = proposal.bounds(self.topology.world_size)
        fits = hbm <= self._room[0] and ddr <= self._room[1]
        return fits and bound * (1 - SLACK) <= self.rating

    def place(self, proposal: _Proposal) -> None:
        """Place and rate a proposal."""
        self.placed += 1
        choices = list(proposal.choices)
        try:
            ranks = partition(choices, self.topology)
        except NoRoomError:
            return
        rating = _rate(choices, ranks, self.topology.world_size)
        if rating < self.rating:
            self.rating, self.choices, self.ranks = rating, choices, ranks


def _rate(choices: Sequence[CostedOption], ranks: Sequence[tuple[int, ...]], world: int) -> float:
    """`NoopPerfModel.rate`: the largest sum of shard costs on a rank, in ms."""
    load = [0.0] * world
    for choice, where in zip(choices, ranks, strict=True):
        for rank in where:
            load[rank] += choice.total
    return max(load)


class _Proposal:
    """One choice a table; sums are kept as tables change."""

    def __init__(self, choices: Sequence[CostedOption]) -> None:
        self.choices = list(choices)
        self._hbm = sum(c.sum_hbm for c in choices)
        self._ddr = sum(c.sum_ddr for c in choices)
        self._total = np.array([c.total for c in choices])
        self._count = np.array([c.count for c in choices])
        self._uniform = np.array([c.uniform for c in choices])

    def change(self, table: int, choice: CostedOption) -> None:
        """Choose another option for a table."""
        old = self.choices[table]
        self.choices[table] = choice
        self._hbm += choice.sum_hbm - old.sum_hbm
        self._ddr += choice.sum_ddr - old.sum_ddr
        self._total[table] = choice.total
        self._count[table] = choice.count
        self._uniform[table] = choice.uniform

    def bounds(self, world: int) -> tuple[int, int, float]:
        """HBM and DDR it needs in bytes, and a lower bound on its rating in ms.

        No rank is below the mean, and some rank has the costliest shard besides what all have.
        """
        mean = float(self._total @ self._count) / world
        everywhere = float(self._total[self._uniform].sum())
        alone = self._total[~self._uniform]
        largest = float(alone.max()) if alone.size else 0.0
        return self._hbm, self._ddr, max(mean, everywhere + largest)


def _score(choice: CostedOption, depth: bool) -> float:
    """`_sharding_option_score`: cost of a shard, or of all (summed one by one, as there)."""
    return choice.total if depth else sum([choice.total] * choice.count)


def _grid(tables: list[list[CostedOption]]) -> Iterator[_Proposal]:
    """`GridSearchProposer`: all combinations, if there are few."""
    if math.prod(map(len, tables)) > MAX_GRID:
        return
    ranked = [sorted(table, key=lambda c: _score(c, True)) for table in tables]
    for combination in itertools.product(*ranked):
        yield _Proposal(combination)


def _greedy(tables: list[list[CostedOption]], *, depth: bool) -> Iterator[_Proposal]:
    """`GreedyProposer`: all tables at their cheapest; then, while any has another option, the one
    with the largest storage takes its next."""
    ranked = [sorted(table, key=lambda c: _score(c, depth)) for table in tables]
    proposal = _Proposal([table[0] for table in ranked])
    yield proposal
    heap = [_storage_key(table[0], t) for t, table in enumerate(ranked) if len(table) > 1]
    heapq.heapify(heap)
    at = [0] * len(ranked)
    while heap:
        table = heap[0][-1]
        at[table] += 1
        now = ranked[table][at[table]]
        proposal.change(table, now)
        if at[table] + 1 < len(ranked[table]):
            heapq.heapreplace(heap, _storage_key(now, table))
        else:
            heapq.heappop(heap)
        yield proposal


def _storage_key(choice: CostedOption, table: int) -> tuple[int, int, int, int, int]:
    """Largest storage first, then the first table."""
    return -max(choice.hbm), -choice.sum_hbm, -max(choice.ddr), -choice.sum_ddr, table


def _uniform(tables: list[list[CostedOption]]) -> Iterator[_Proposal]:
    """`UniformProposer`: one sharding type for all tables, each at its cheapest kernel."""
    kinds = dict.fromkeys(c.option.sharding_type for table in tables for c in table)
    for kind in kinds:
        of_kind = [[c for c in table if c.option.sharding_type is kind] for table in tables]
        if all(of_kind):
            yield _Proposal([min(table, key=lambda c: _score(c, True)) for table in of_kind])
