"""Packs shards under what sets the pace: tables change options and ranks, shards move and swap.

Plans near a given one are compared by the cuts of `search.improve.cycle_cuts`: each is a sum of
maxima over ranks. A maximum is flat almost everywhere, so it gets a target instead, nearer to the
mean, and what ranks exceed their targets by, squared, is driven out; maxima of other sections keep
theirs. After every round the plan is scored on the full timeline, and its own critical cycle joins
the cuts, until that no longer helps.

Why: docs/decisions/0023.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import numpy as np

from search.improve.cycle_cuts import CycleCut, critical_cut
from search.improve.packed import Array, Changes, Ints, Packed
from search.objective import Assignment, Objective
from search.surrogate import Surrogate

BUSIEST = 3
"""Ranks above a target that are relieved at a time."""
ENOUGH = 1e-12
"""Excess in ms^2 that is none."""
STALLED, PROGRESS = 8, 0.8
"""A descent ends when so many steps leave more than this part of the excess."""
TIGHTER = (0.5, 0.8)
"""Of the distance of the slowest rank to the mean, what the next target leaves."""
NEAR = 2e-3
"""Of the mean: nearer to it a slowest rank need not come."""
GAIN = 1e-6
"""A smaller relative gain is none."""
ROUNDS = 4
"""Rounds that share the budget, at least: each new cut is worth more than a longer descent."""
PATIENCE = 3
"""Rounds in a row that do not help before packing ends."""


class Packer:
    """Packs plans of one problem."""

    def __init__(self, objective: Objective, surrogate: Surrogate) -> None:
        self.objective = objective
        self.surrogate = surrogate
        for options in objective.space.options:  # cuts are over all lookup groups: make them known
            for option in options:
                surrogate.shard_loads(option)
        tied = {table for group in objective.space.co_locate for table in group}
        limited = objective.space.in_use is not None and objective.space.in_use.is_limited
        self.bound = set(range(len(objective.space.options))) if limited else tied

    def pack(
        self,
        start: Assignment,
        steps: int,
        stop: Callable[[float], bool] = lambda best: False,
    ) -> tuple[Assignment, float]:
        """The best plan found and its predicted time in ms.

        Args:
            start: fits, and so does the result.
            steps: budget of joint changes.
            stop: asked after every round with the best time so far.
        """
        best, best_ms = start, float(self.objective.score([start])[0])
        each = -(-steps // ROUNDS)
        cuts: list[CycleCut] = []
        current, failed = start, 0
        while steps > 0 and failed < PATIENCE and not stop(best_ms):
            cut = critical_cut(self.objective, current)
            if cut is None or not len(cut.sections):
                break
            cuts = [*(c for c in cuts if c.groups == cut.groups), cut]
            state = _Descent(self.objective, self.surrogate, self.bound, cuts, best)
            state.tighten(min(steps, each), partial(stop, best_ms))
            steps -= state.steps + 1
            current = state.assignment
            ms = float(self.objective.score([current])[0])
            failed = 0 if ms < best_ms * (1 - GAIN) else failed + 1
            if ms < best_ms:
                best, best_ms = current, ms
        return best, best_ms


class _Descent(Packed):
    """Drives ranks below their targets."""

    def tighten(self, budget: int, stop: Callable[[], bool]) -> None:
        """To lower maxima, column after column, those first that stand out most."""
        self.steps, self.budget = 0, budget
        for share in TIGHTER:
            apart = (self.loads.max(axis=0) - self.loads.mean(axis=0)) * self.scale
            for column in np.argsort(-apart, kind="stable").tolist():
                while self.steps < budget and not stop() and self._tightened(column, share):
                    pass

    def _value(self) -> float:
        """The largest cut in ms."""
        slowest = self.loads.max(axis=0) * self.scale
        return float((self.member @ slowest + self.constants + self.even_ms).max())

    def _tightened(self, column: int, share: float) -> bool:
        """The slowest rank of a column comes nearer to the mean, and the largest cut is lower."""
        most, mean = self.loads.max(axis=0), self.loads.mean(axis=0)
        if most[column] - mean[column] < NEAR:
            return False
        targets = most * (1 + 1e-9)
        targets[column] = mean[column] + share * (most[column] - mean[column])
        before, value = self.chosen.copy(), self._value()
        self.descend(targets)
        if self._value() < value * (1 - GAIN):
            return True
        self.chosen = before
        self.count()
        return False

    def descend(self, targets: Array) -> None:
        """To where no change of what lies on a rank above a target helps, or none is above.

        Args:
            targets: of every column, in units of its mean.
        """
        self.targets, self.even_target = targets, self.even_ms.copy()
        room, failed = self.objective.caps.T, 0
        then = np.inf
        for step in count():
            if self.steps >= self.budget:
                return
            self.steps += 1
            excess = self.excess(self.loads)
            total = excess.sum()
            now = float(self.estimate(total, self.even_ms))
            if now <= ENOUGH:
                return
            if step % STALLED == 0:
                if now > PROGRESS * then:
                    return
                then = now
            order = np.argsort(-excess, kind="stable")
            busy = order[: np.count_nonzero(excess)]
            found = self._improvements(
                busy[failed : failed + BUSIEST], excess, total, room, now * (1 - GAIN)
            )
            if not found:
                failed += BUSIEST
                if failed >= len(busy):
                    return
                continue
            failed = 0
            before = self.chosen.copy()
            self.apply(found)
            if len(found) > 1 and self._now() >= now * (1 - GAIN):
                self.chosen = before
                self.apply(found[:1])

    def _now(self) -> float:
        return float(self.estimate(self.excess(self.loads).sum(), self.even_ms))

    def _improvements(
        self, slowest: Ints, excess: Array, total: Array, room: Array, below: float
    ) -> list[Changes]:
        """The best change of every table on a slowest rank; best first, no two touch one rank."""
        mine = np.flatnonzero(np.isin(self.ranks, slowest))
        found: dict[int, tuple[float, Changes]] = {}
        if len(mine):
            families = (self._moves, self._swaps, self._trades)
            values = np.concatenate([f(mine, excess, total, room) for f in families], axis=1)
            best = values.argmin(axis=1)
            for row, target in enumerate(best.tolist()):
                value = float(values[row, target])
                if value < below:
                    self._keep(found, value, self._exchanged(int(mine[row]), target))
        for table in self._owners(slowest):
            self._keep(found, *self._other_way(table, excess, total, room))
        changes: list[Changes] = []
        touched: set[int] = set()
        for value, change in sorted(found.values(), key=lambda pair: pair[0]):
            if value >= below:
                break
            where = set().union(
                *({*self.chosen[t][1].tolist(), *r} for t, (_, r) in change.items())
            )
            if len(changes) and (not touched.isdisjoint(where)):
                continue
            touched |= where
            changes.append(change)
        return changes

    def _owners(self, slowest: Ints) -> list[int]:
        """Free tables with a shard on one of these ranks alone."""
        there = np.zeros(self.world, dtype=bool)
        there[slowest] = True
        return [int(t) for t in np.unique(self.owner[there[self.ranks]])]

    @staticmethod
    def _keep(found: dict[int, tuple[float, Changes]], value: float, change: Changes) -> None:
        table = min(change, default=-1)
        if table >= 0 and (table not in found or value < found[table][0]):
            found[table] = value, change

    def _exchanged(self, one: int, target: int) -> Changes:
        """A shard's move to a rank, its swap with a shard, or its trade with one."""
        if target >= self.world + len(self.ranks):
            return self._traded(one, target - self.world - len(self.ranks))
        if target < self.world:
            pairs = [(one, target)]
        else:
            two = target - self.world
            pairs = [(one, int(self.ranks[two])), (two, int(self.ranks[one]))]
        changes: dict[int, list[int]] = {}
        for shard, rank in pairs:
            table = int(self.owner[shard])
            ranks = changes.setdefault(table, self.chosen[table][1].tolist())
            ranks[int(self.position[shard])] = rank
        return {t: (self.chosen[t][0].option, tuple(ranks)) for t, ranks in changes.items()}

    def _traded(self, one: int, two: int) -> Changes:
        a, b = (int(self.owner[shard]) for shard in (one, two))
        changes: Changes = {}
        for table, other in ((a, b), (b, a)):
            group = self.surrogate.shard_loads(self.chosen[other][0].option)[0]
            way = self.whole[table][group]
            changes[table] = way.option, tuple(self.chosen[other][1].tolist())
        return changes

    def _moves(self, mine: Ints, excess: Array, total: Array, room: Array) -> Array:
        """Estimate after each move, ``[len(mine), ranks]``; infinite where it is none."""
        here, work = self.ranks[mine], self.work[mine]
        left = total - excess[here] + self.excess(self.loads[here] - work)
        after = left[:, None] - excess + self.excess(self.loads + work[:, None])
        found = self.estimate(after, self.even_ms)
        found[np.arange(len(mine)), here] = np.inf
        over = (self.used + self.memory[mine][:, None] > room).any(axis=-1)
        found[over | ~self.allowed[mine]] = np.inf
        return found

    def _swaps(self, mine: Ints, excess: Array, total: Array, room: Array) -> Array:
        """Estimate after each swap with any shard, ``[len(mine), shards]``."""
        ranks, loads, used = self.ranks, self.loads, self.used
        here = ranks[mine]
        change = self.work - self.work[mine][:, None]
        after = self.excess(loads[here][:, None] + change) + self.excess(loads[ranks] - change)
        after += total - excess[here][:, None] - excess[ranks]
        found = self.estimate(after, self.even_ms)
        moved = self.memory - self.memory[mine][:, None]
        over = (used[here][:, None] + moved > room[here][:, None]).any(axis=-1)
        over |= (used[ranks] - moved > room[ranks]).any(axis=-1)
        over |= here[:, None] == ranks
        over |= ~self.allowed[mine][:, ranks] | ~self.allowed[:, here].T
        found[over] = np.inf
        return found

    def _trades(self, mine: Ints, excess: Array, total: Array, room: Array) -> Array:
        """Estimate after two whole tables trade exchange and rank, ``[len(mine), shards]``."""
        ranks, loads, used = self.ranks, self.loads, self.used
        here = ranks[mine]
        # what comes to the places of mine, and to those of the others
        come = self.trade[:, self.group[mine]].swapaxes(0, 1) - self.work[mine][:, None]
        go = self.trade[mine][:, self.group] - self.work
        same = (here[:, None] == ranks)[..., None]
        after = self.excess(loads[here][:, None] + come + np.where(same, go, 0.0))
        after += np.where(same[..., 0], 0.0, self.excess(loads[ranks] + go) - excess[ranks])
        after += total - excess[here][:, None]
        even = self.trade_even[mine][:, self.group] - self.own_even
        even += self.trade_even[:, self.group[mine]].swapaxes(0, 1) - self.own_even[mine][:, None]
        found = self.estimate(after, self.even_ms + even)
        to_here = self.trade_memory[:, self.group[mine]].swapaxes(0, 1) - self.memory[mine][:, None]
        to_there = self.trade_memory[mine][:, self.group] - self.memory
        both = np.where(same, to_here + to_there, 0.0)
        over = (used[here][:, None] + np.where(same, both, to_here) > room[here][:, None]).any(-1)
        over |= (used[ranks] + np.where(same, both, to_there) > room[ranks]).any(axis=-1)
        over |= ~self.allowed[mine][:, ranks] | ~self.allowed[:, here].T
        over |= self.group[mine][:, None] == self.group
        found[over | np.isnan(found)] = np.inf
        return found

    def _other_way(
        self, table: int, excess: Array, total: Array, room: Array
    ) -> tuple[float, Changes]:
        """The best of the table's options on the ranks that it fits best, and its estimate.

        Column shards of a table are alike, so that one order of the ranks serves all of them.
        """
        ways = self.ways(table)
        if ways is None:
            return np.inf, {}
        way, ranks = self.chosen[table]
        rest, used = self.loads.copy(), self.used.copy()
        np.subtract.at(rest, ranks, way.work)
        np.subtract.at(used, ranks, way.memory)
        base = excess.copy()
        base[ranks] = self.excess(rest[ranks])
        cost = self.excess(rest + ways.work) - base
        cost[~ways.allowed | (used + ways.memory > room).any(axis=2)] = np.inf
        order = np.argsort(cost, axis=1, kind="stable")
        raised = np.cumsum(np.take_along_axis(cost, order, axis=1), axis=1)[ways.last]
        values = self.estimate(base.sum() + raised, self.even_ms - way.even + ways.even)
        for row in np.argsort(values, kind="stable").tolist():
            option, placed = ways.options[row], order[row, : ways.last[1][row] + 1]
            if ways.fixed[row] is not None:
                placed = ways.fixed[row]
            if not (option is way.option and set(placed.tolist()) == set(ranks.tolist())):
                return float(values[row]), {table: (option, tuple(placed.tolist()))}
        return np.inf, {}
