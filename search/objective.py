"""Assignments of tables to options and ranks, their memory, and their predicted time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import chain, starmap
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from predictor.cost.errors import CostErrors
from predictor.model.memory.caches import CachedShard, cached_shards, sharing_bytes
from predictor.model.plan import ComputeKernel, ShardingPlan, TablePlan
from search.problem import Problem
from search.side_by_side import side_by_side
from search.space.option import AllowedPlacements, Choice, Option, Space, place

Array = NDArray[np.float64]
T = TypeVar("T")
AMPLE = 0.8
"""Share of a rank's limit up to which shards, with their data in flight, leave room for the rest of
its peak: of random plans of the models in configs/models, on five kinds and numbers of GPUs, no
peak was higher than the shards by more than 0.12 of the limit. A plan that is returned is simulated
in any case (`search.peak`)."""
MOST_REMEMBERED = 1 << 21
"""Ranks whose bytes are remembered for a choice of a table, over all choices."""
Ranks = tuple[int, ...]
Assignment = tuple[Choice, ...]
"""One plan: a choice for every table, in the workload's order."""
Rate = Callable[[Sequence[Assignment]], Array]
"""Plans -> a measure of each, ``[plans]``; less is better."""
TimesOfPlans = Callable[[Sequence[Assignment]], Array]
"""Plans -> times in ms under draws of the costs' errors, ``[plans, draws]``."""


def apply(base: Assignment, change: Mapping[int, Choice]) -> Assignment:
    """The assignment with some tables changed."""
    return tuple(change.get(table, choice) for table, choice in enumerate(base))


class Objective:
    """Predicted iteration time and memory of assignments; counts what it evaluates.

    What shards add to the peak of a rank at least (`ShardMemory`) adds up, and no plan fits where
    that exceeds the limits. Whether another one does, the simulated peak says (`fits`).

    Attributes:
        limits: bytes ``[hbm or ddr, ranks]`` that the shards of a plan that fits do not exceed.
        caps: bytes that shards are placed within, likewise.
        kind: memory that a rank's process peaks in: 0 for HBM, 1 for host memory.
        in_flight: shards count with what is in flight for them, which plans are placed by that
            take much of the memory (`beside`); a guide, no bound.
    """

    def __init__(self, problem: Problem, space: Space) -> None:
        self.problem = problem
        self.space = space
        self.scorer = problem.scorer
        self.caps = np.array(
            [problem.topology.hbm_cap_bytes, problem.topology.ddr_cap_bytes], dtype=np.float64
        )
        self.limits, self.in_flight = self.caps, False
        self.kind = int(problem.hardware.device == "cpu")
        self.evaluations = 0
        self.place = lru_cache(maxsize=1 << 16)(place)
        self.number = lru_cache(maxsize=1 << 18)(self._number)
        self.legal = lru_cache(maxsize=1 << 16)(self._legal)
        self.is_legal = lru_cache(maxsize=1 << 16)(self._is_legal)
        self.in_cache = lru_cache(maxsize=1 << 16)(self._in_cache)
        self.has_caches = problem.hardware.device != "cpu"
        self._remember_bytes()
        self.fits_at_peak = lru_cache(maxsize=1 << 14)(self._fits_at_peak)
        self.resident = lru_cache(maxsize=1 << 16)(self._resident)

    def _remember_bytes(self) -> None:
        few = max(1, MOST_REMEMBERED // self.caps.shape[1])
        self.footprint = lru_cache(maxsize=few)(self._footprint)
        self.shard_memory = lru_cache(maxsize=1 << 16)(self._shard_memory)

    def over(self, space: Space) -> Objective:
        """The same objective over another space of the problem."""
        other = copy(self)
        other.space = space
        return other

    def table_plans(self, assignment: Assignment) -> tuple[TablePlan, ...]:
        """The assignment as the predictor takes it."""
        return tuple(self.place(option, ranks) for option, ranks in assignment)

    def sharding_plan(self, assignment: Assignment) -> ShardingPlan:
        """The assignment as a plan."""
        topology = self.problem.topology
        tables = dict(zip(self.space.keys, self.table_plans(assignment), strict=True))
        return ShardingPlan(tables, topology.world_size, topology.local_world_size)

    def assignment_of(self, plan: ShardingPlan) -> Assignment | None:
        """Return the assignment that splits and places all tables as a plan does, even a plan of
        another setting; None if there is none or it does not fit."""
        topology = self.problem.topology
        if plan.world_size != topology.world_size:
            return None
        assignment = []
        for key, options in zip(self.space.keys, self.space.options, strict=True):
            table = plan.tables[key]
            sizes, offsets = zip(*((s.size, s.offset) for s in table.shards), strict=True)
            way = table.sharding_type, table.compute_kernel, sizes, offsets
            alike = (o for o in options if o.way[:4] == way and o.is_legal(table.ranks, topology))
            option = next(alike, None)
            if option is None:
                return None
            assignment.append((option, table.ranks))
        return tuple(assignment) if self.fits(tuple(assignment)) else None

    def score(self, assignments: Sequence[Assignment]) -> Array:
        """Predicted iteration time in ms of each."""
        self.evaluations += len(assignments)
        if not assignments:
            return np.zeros(0)
        return self.scorer.score_numbered(np.array([self.numbers(a) for a in assignments]))

    def score_neighbours(self, base: Assignment, changes: Sequence[Mapping[int, Choice]]) -> Array:
        """Predicted iteration time in ms of ``base`` with each of the changes."""
        self.evaluations += len(changes)
        return self.scorer.score_changed(
            np.array(self.numbers(base)),
            [{t: self.number(*choice) for t, choice in change.items()} for change in changes],
        )

    def side_by_side(self, pieces: Sequence[Callable[[], T]]) -> Iterator[T]:
        """Run `search.side_by_side.side_by_side` and count the evaluations of its pieces."""
        evaluations = self.evaluations
        counted = [partial(self._counted, piece) for piece in pieces]
        for result, spent in side_by_side(counted, self.space.every_option):
            evaluations += spent
            self.evaluations = evaluations
            yield result

    def _counted(self, piece: Callable[[], T]) -> tuple[T, int]:
        """The result of a piece, and what it evaluated."""
        before = self.evaluations
        return piece(), self.evaluations - before

    def numbers(self, assignment: Assignment) -> list[int]:
        """Return the scorer's numbers of an assignment's choices."""
        return [self.number(option, ranks) for option, ranks in assignment]

    def under(self, errors: CostErrors) -> TimesOfPlans:
        """Return a predictor of plans under draws of the costs' errors, for many calls: they share
        its compiled timelines."""
        scorer = self.problem.perturbed(self.scorer, errors)

        def times(assignments: Sequence[Assignment]) -> Array:
            if not assignments:
                return np.zeros((0, errors.draws))
            return scorer.score_numbered(np.array([self.numbers(a) for a in assignments]))

        return times

    def _number(self, option: Option, ranks: Ranks) -> int:
        """Return the scorer's number of a choice."""
        return self.scorer.number(option.table, self.place(option, ranks))

    def _legal(self, option: Option) -> AllowedPlacements:
        """Return the legal ranks of an option's shards."""
        return option.legal_ranks(self.problem.topology)

    def _is_legal(self, option: Option, ranks: Ranks) -> bool:
        """Return True if the shards of an option may lie on these ranks."""
        return option.is_legal(ranks, self.problem.topology)

    def _shard_memory(self, option: Option) -> Array:
        """Bytes of every shard, ``[shards, hbm or ddr]``."""
        return np.array(self.bytes_of(option), dtype=np.float64).T

    def _resident(self, option: Option) -> Array:
        """Bytes of every shard without ids, which come and go, ``[shards, hbm or ddr]``."""
        kept = np.array(option.bytes_of, dtype=np.float64)
        kept[self.kind] -= [m.io_bytes for m in option.memory]
        return kept.T

    def _footprint(self, option: Option, ranks: Ranks) -> Array:
        """Bytes ``[hbm or ddr, ranks]`` that one table takes."""
        used = np.zeros_like(self.caps)
        for kind, sizes in enumerate(self.bytes_of(option)):
            np.add.at(used[kind], list(ranks), sizes)
        return used

    def bytes_of(self, option: Option) -> tuple[list[int], list[int]]:
        """Bytes of HBM and of host memory that every shard of an option counts."""
        hbm, ddr = option.bytes_of
        if not self.in_flight:
            return hbm, ddr
        flight = [memory.flight_bytes for memory in option.memory]
        if self.problem.hardware.device == "cpu":
            return hbm, [a + b for a, b in zip(ddr, flight, strict=True)]
        return [a + b for a, b in zip(hbm, flight, strict=True)], ddr

    def _in_cache(self, option: Option, ranks: Ranks) -> tuple[CachedShard, ...]:
        """Shards of a table that have rows in a cache. Launches are numbered by lookup group,
        because numbers are quick to compare."""
        if not self.has_caches or option.compute_kernel is not ComputeKernel.FUSED_UVM_CACHING:
            return ()
        plan, workload = self.place(option, ranks), self.problem.workload
        group = self.scorer.group_index(option.table, plan)
        shards = cached_shards(workload.tables[option.table], plan, workload.train_pipeline)
        return tuple(replace(shard, launch=group) for shard in shards)

    def memory(self, choices: Sequence[Choice]) -> Array:
        """Bytes ``[hbm or ddr, ranks]`` that a plan, or some of its tables, take."""
        return self._summed(choices, self.shard_memory)

    def _summed(self, choices: Sequence[Choice], bytes_of: Callable[[Option], Array]) -> Array:
        """Sum bytes of shards and what their caches take beside, ``[hbm or ddr, ranks]``."""
        used = np.zeros_like(self.caps)
        if choices:
            ranks = np.fromiter(chain.from_iterable(r for _, r in choices), dtype=np.intp)
            sizes = np.concatenate([bytes_of(option) for option, _ in choices])
            for of_kind, taken in zip(used, sizes.T, strict=True):  # exact: whole numbers
                of_kind += np.bincount(ranks, taken, len(of_kind))
        cached = chain.from_iterable(starmap(self.in_cache, choices))
        for rank, more in sharing_bytes(cached).items():
            used[0, rank] += more
        return np.asarray(used)

    def memory_after(self, base: Assignment, used: Array, change: Mapping[int, Choice]) -> Array:
        """Bytes ``[hbm or ddr, ranks]`` that a plan takes with some tables changed.

        Args:
            used: what it takes before.
        """
        pairs = [(base[table], choice) for table, choice in change.items()]
        if any(self.in_cache(*choice) for pair in pairs for choice in pair):
            return self.memory(apply(base, change))
        added = (self.footprint(*after) - self.footprint(*before) for before, after in pairs)
        return np.asarray(used + sum(added))

    def fits(self, assignment: Assignment) -> bool:
        """Return True if every rank has the memory for its peak, moves are within their limit,
        co-located tables lie together, and TorchRec computes the means right."""
        together = self.space.co_located([ranks for _, ranks in assignment])
        near = self.space.in_use is None or self.space.in_use.allows(assignment)
        right = self.space.divides_right([option for option, _ in assignment])
        used = self.memory(assignment)
        if not (near and together and right) or (used > self.limits).any():
            return False
        if not self.problem.topology.limit_bytes:
            return True
        return self.fits_at_peak(assignment)

    @cached_property
    def typical(self) -> Objective:
        """The same objective, with shards that count their data in flight."""
        other = copy(self)
        other.in_flight = True
        other._remember_bytes()
        return other

    def _fits_at_peak(self, assignment: Assignment) -> bool:
        """Return True if the peaks of all ranks fit that may not, the fullest one first."""
        kind = self.kind
        shares = self.typical.memory(assignment)[kind] / np.maximum(self.limits[kind], 1.0)
        ranks = np.argsort(-shares, kind="stable")
        if not self.problem.thorough:
            ranks = ranks[shares[ranks] > AMPLE]
        if not len(ranks):
            return True
        plan, exact = self.sharding_plan(assignment), self.problem.thorough
        return self.problem.peaks.fit(plan, self._shards(assignment), ranks.tolist(), exact=exact)

    def _shards(self, assignment: Assignment) -> list[int]:
        """Return the resident bytes of each rank's shards."""
        bytes_of_ranks = self._summed(assignment, self.resident)[self.kind]
        return [*map(int, bytes_of_ranks.tolist())]

    def beside(self, assignment: Assignment) -> Objective:
        """Return the objective with caps corrected for plans like this one.

        Where the plan takes much of the memory, shards count their data in flight, too, and the
        caps are lowered by as much as the plan's simulated peak exceeds the sum over its shards. A
        plan that fits stays within the caps.
        """
        limits, kind = self.problem.topology.limit_bytes, self.kind
        if not limits:
            return self
        used = self.typical.memory(assignment)
        ranks = np.flatnonzero(used[kind] > AMPLE * self.limits[kind]).tolist()
        if not ranks:
            return self
        peaks = self.problem.peaks.peaks_of(
            self.sharding_plan(assignment), self._shards(assignment), ranks
        )
        free = [limits[rank] - peak.reserved_bytes for rank, peak in zip(ranks, peaks, strict=True)]
        other = copy(self.typical)
        other.caps = self.limits.copy()
        other.caps[kind] -= float(((self.limits[kind] - used[kind])[ranks] - free).max())
        if min(free) >= 0:
            other.caps[kind] = np.maximum(other.caps[kind], used[kind])
        return other

    def missing(self, assignment: Assignment) -> tuple[tuple[int, int], ...]:
        """Bytes ``(hbm, ddr)`` that every rank lacks at its peak."""
        ranks = self.problem.memory_of(self.sharding_plan(assignment))
        return tuple((rank.missing_hbm_bytes, rank.missing_ddr_bytes) for rank in ranks)
