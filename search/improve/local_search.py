"""Improves assignments on the true objective: the full timeline, many neighbours at a time.

Moves: one unit of a table to another rank, two tables swap ranks, one table changes its option,
tables of one exchange join another of their module (`search.improve.merges`).

Descent takes the best neighbours together as far as that helps; at a local optimum a few tables are
shaken (iterated local search, Lourenço et al. 2003) until the budget of evaluations is spent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

import numpy as np

from predictor.model.plan import ShardingType
from search.improve.merges import Change, ExchangeMerges
from search.objective import Assignment, Objective, Ranks, apply
from search.partitioner import GreedyPartitioner
from search.space.option import Choice, Option
from search.surrogate import Surrogate

NEIGHBOURS = 512
"""Neighbours scored before the best of them is taken."""
JOINED = 16
"""Changes of different tables that are tried together."""
SHAKEN = 3
"""Tables changed at random to leave a local optimum."""
PATIENCE = 0.1
"""Share of the budget in which a descent must gain, or it ends."""
LEAST_PATIENCE = 500
"""Plans that it may score without a gain, however small the budget."""
GAIN = 0.002
"""What it must gain in that: less is within what ties."""
KNOWN = 20
"""Shaken plans in a row that were starts before, after which there is nothing left to try."""
SWAPPED = 64
"""Other tables that one is offered to swap with."""


class LocalSearch:
    """Descent with restarts from shaken optima.

    Attributes:
        visited: plans that it went through.
    """

    def __init__(self, objective: Objective, surrogate: Surrogate, seed: int) -> None:
        self.objective = objective
        self.surrogate = surrogate
        self.topology = objective.problem.topology
        self.in_use = objective.space.in_use
        self.placer = GreedyPartitioner(objective, surrogate)
        self.random = random.Random(seed)
        self.visited: dict[Assignment, float] = {}
        self.merges = ExchangeMerges(objective, surrogate)

    def improve(
        self,
        start: Assignment,
        evaluations: int,
        stop: Callable[[float], bool] = lambda best: False,
    ) -> tuple[Assignment, float]:
        """The best assignment found and its predicted time in ms.

        Args:
            start: an assignment that fits.
            evaluations: budget of plans to score.
            stop: asked after every descent step with the best time so far.
        """
        best, best_ms = start, float(self.objective.score([start])[0])
        limit = self.objective.evaluations + evaluations
        current, current_ms = best, best_ms
        starts, known = {start}, 0
        gained_ms, gained_at = best_ms, self.objective.evaluations
        patience = max(LEAST_PATIENCE, PATIENCE * evaluations)
        while self.objective.evaluations < limit and known < KNOWN and not stop(best_ms):
            if best_ms < gained_ms * (1 - GAIN):
                gained_ms, gained_at = best_ms, self.objective.evaluations
            if self.objective.evaluations - gained_at > patience:
                break
            step = self._descend(current, current_ms, limit, stop)
            if step is not None:
                current, current_ms = step
                self.visited[current] = current_ms
            if current_ms < best_ms:
                best, best_ms = current, current_ms
            if step is None:
                current = self._shake(best)
                known = known + 1 if current in starts else 0
                starts.add(current)
                current_ms = float(self.objective.score([current])[0])
        return best, best_ms

    def _descend(
        self, base: Assignment, base_ms: float, limit: int, stop: Callable[[float], bool]
    ) -> tuple[Assignment, float] | None:
        """A better assignment among the neighbours, which are scored in random order, by parts."""
        neighbours = self.neighbours(base)
        while part := list(islice(neighbours, NEIGHBOURS)):
            times = self.objective.score_neighbours(base, part)
            order = np.argsort(times, kind="stable")
            better = [part[i] for i in order if times[i] < base_ms * (1 - 1e-9)]
            joint = [*self._join(base, better), *better[1:JOINED]] if better else []
            times = self.objective.score_neighbours(base, joint)
            for best in np.argsort(times, kind="stable").tolist():
                found = apply(base, joint[best])
                if times[best] < base_ms and self.objective.fits(found):
                    return found, float(times[best])
            if self.objective.evaluations >= limit or stop(base_ms):
                break
        return None

    def _join(self, base: Assignment, better: Sequence[Change]) -> list[Change]:
        """The best change, the best two of different tables, the best three, ... as they fit."""
        used = self.objective.memory(base)
        joint = [better[0]]
        for change in better[1:]:
            both = {**joint[-1], **change}
            apart = len(both) == len(joint[-1]) + len(change)
            if apart and self._fits(base, used, both):
                joint.append(both)
            if len(joint) == JOINED:
                break
        return joint

    def _shake(self, base: Assignment) -> Assignment:
        for _ in range(20):
            changed = base
            for table in self.random.sample(range(len(base)), min(SHAKEN, len(base))):
                choices = list(self._moves(changed, table)) + list(self._options(changed, table))
                if choices:
                    changed = apply(changed, {table: self.random.choice(choices)})
            if self.objective.fits(changed):
                return changed
        return base

    def neighbours(self, base: Assignment) -> Iterator[Change]:
        """What fits of all moves, table by table; made only as far as asked for."""
        used = self.objective.memory(base)
        order = self._order(base)
        changes = chain(
            self.merges.some(base, self.random),
            self._returns(base),
            chain.from_iterable(self._of_table(base, t, order) for t in order),
        )
        for proposed in changes:
            if self._fits(base, used, proposed):
                yield proposed

    def _returns(self, base: Assignment) -> Iterator[Change]:
        """Each moved table back where the plan in use has it."""
        if self.in_use is not None:
            for table in self.in_use.moved(base):
                before = self.in_use.choices[table]
                if before is not None:
                    yield {table: before}

    def _order(self, base: Assignment) -> list[int]:
        """Tables on a rank that is slowest in some phase come first; else at random."""
        loads, _ = self.surrogate.standing(base)
        slowest = {*loads.argmax(axis=0).tolist()}
        order = self.random.sample(range(len(base)), len(base))
        return sorted(order, key=lambda table: slowest.isdisjoint(base[table][1]))

    def _of_table(self, base: Assignment, table: int, order: Sequence[int]) -> list[Change]:
        """Every change of one table, and its swaps with the tables after it in the order."""
        alone = chain(self._moves(base, table), self._options(base, table))
        later = order[order.index(table) + 1 :]
        later = self.random.sample(later, min(SWAPPED, len(later)))
        changes = [*({table: choice} for choice in alone), *self._swaps(base, table, later)]
        self.random.shuffle(changes)
        return changes

    def _fits(self, base: Assignment, used: np.ndarray, change: Change) -> bool:
        if (self.objective.memory_after(base, used, change) > self.objective.caps).any():
            return False
        space = self.objective.space
        if not space.co_locate and not space.means and self.in_use is None:
            return True
        joint = apply(base, change)
        near = self.in_use is None or self.in_use.allows(joint)
        right = space.divides_right([option for option, _ in joint])
        return near and right and space.co_located([ranks for _, ranks in joint])

    def _moves(self, base: Assignment, table: int) -> Iterator[Choice]:
        """One unit of the table elsewhere; like units of a table are moved once."""
        option, ranks = base[table]
        legal = self.objective.legal(option)
        start, seen = 0, set()
        for alternatives in legal.units:
            width = len(alternatives[0])
            here = ranks[start : start + width]
            for there in alternatives if here not in seen else ():
                moved = (*ranks[:start], *there, *ranks[start + width :])
                if there != here and self._one_group(legal.same_group, moved):
                    yield option, moved
            seen.add(here)
            start += width

    def _one_group(self, same_group: bool, ranks: Ranks) -> bool:
        return not same_group or len({self.topology.group_of(r) for r in ranks}) == 1

    def _options(self, base: Assignment, table: int) -> Iterator[Choice]:
        """Another option for the table, placed greedily around the others."""
        loads, used = self.surrogate.standing_without(base, [table])
        for option in self.objective.space.options[table]:
            # one column shard gains nothing alone; whole exchanges are merged instead
            alone = option.sharding_type is ShardingType.COLUMN_WISE and option.num_shards == 1
            if option is not base[table][0] and not alone:
                placed = self.placer.best_ranks(option, loads, used)
                if placed is not None:
                    yield option, placed

    def _swaps(self, base: Assignment, table: int, others: Sequence[int]) -> Iterator[Change]:
        """Two tables of one unit each exchange their places."""
        first, here = base[table]
        if not self._is_movable(first):
            return
        for other in others:
            second, there = base[other]
            alike = len(here) == len(there) and here != there and self._is_movable(second)
            legal = self.objective.is_legal
            if alike and legal(first, there) and legal(second, here):
                yield {table: (first, there), other: (second, here)}

    def _is_movable(self, option: Option) -> bool:
        legal = self.objective.legal(option)
        return len(legal.units) == 1 and len(legal.units[0]) > 1
