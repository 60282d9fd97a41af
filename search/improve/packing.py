"""Packs shards under the critical cycle: tables change options and ranks, shards move and swap.

Plans near the current one are compared by the cuts of `search.improve.cycle_cuts`: each is a sum of
maxima over ranks. A maximum is flat almost everywhere, so it gets a target instead, nearer to the
mean, and what ranks exceed their targets by, squared, is driven out; maxima of other segments keep
theirs. After every round the plan is scored on the full timeline, and its own critical cycle joins
the cuts, until that no longer helps.

Why: docs/decisions/0023.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from search.improve.cut_plan import Changes, CutPlan, Ints
from search.improve.cycle_cuts import CycleCut, critical_cut
from search.improve.shard_moves import Array, Neighbourhood, pick_apart
from search.objective import Assignment, Objective
from search.surrogate import Surrogate

RELIEVED = 3
"""Ranks above a target that are relieved in one step."""
ENOUGH = 1e-12
"""Excess in ms^2 below which targets count as met."""
STALLED, PROGRESS = 8, 0.8
"""A descent ends when this many steps leave more than this share of the excess."""
TIGHTER = (0.5, 0.8)
"""A target lies at these shares of the distance from the mean to the slowest rank, in turn."""
NEAR = 2e-3
"""Relative distance to the mean at which the slowest rank is close enough."""
GAIN = 1e-6
"""Relative gain below which a change does not count."""
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
        self.staying = set(range(len(objective.space.options))) if limited else tied

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
            if cut is None or not len(cut.segments):
                break
            cuts = [*(c for c in cuts if c.groups == cut.groups), cut]
            # a trade may have emptied an exchange of the best plan, of which the cuts say nothing
            first = best if self._groups_of(best) <= cut.groups else current
            state = _Descent(self.objective, self.surrogate, self.staying, cuts, first)
            state.tighten(min(steps, each), partial(stop, best_ms))
            steps -= state.steps + 1
            current = state.assignment
            ms = float(self.objective.score([current])[0])
            failed = 0 if ms < best_ms * (1 - GAIN) else failed + 1
            if ms < best_ms:
                best, best_ms = current, ms
        return best, best_ms

    def _groups_of(self, plan: Assignment) -> set[int]:
        """Lookup groups that a plan uses."""
        return {self.surrogate.shard_loads(option)[0] for option, _ in plan}


class _Descent(CutPlan):
    """Drives ranks below their targets."""

    def tighten(self, budget: int, stop: Callable[[], bool]) -> None:
        """Lower the maxima column by column, those farthest above their mean first."""
        self.steps, self.budget, self.stop = 0, budget, stop
        for share in TIGHTER:
            apart = (self.now.loads.max(axis=0) - self.now.loads.mean(axis=0)) * self.scale
            for column in np.argsort(-apart, kind="stable").tolist():
                while self.steps < budget and not stop() and self._tighten_column(column, share):
                    pass

    def _value(self) -> float:
        """The largest cut in ms."""
        slowest = self.now.loads.max(axis=0) * self.scale
        return float((self.member @ slowest + self.constants + self.even_ms).max())

    def _tighten_column(self, column: int, share: float) -> bool:
        """Bring the slowest rank of a column nearer to the mean; whether the largest cut fell."""
        most, mean = self.now.loads.max(axis=0), self.now.loads.mean(axis=0)
        if most[column] - mean[column] < NEAR:
            return False
        targets = most * (1 + 1e-9)
        targets[column] = mean[column] + share * (most[column] - mean[column])
        before, value = self.keep(), self._value()
        self.descend(targets)
        if self._value() < value * (1 - GAIN):
            return True
        self.go_back(before)
        return False

    def descend(self, targets: Array) -> None:
        """Change what lies on ranks above their targets until that no longer helps.

        Args:
            targets: of every column, in units of its mean.
        """
        self.targets, self.even_target = targets, self.even_ms.copy()
        failed, then = 0, np.inf
        for step in count():
            if self.steps >= self.budget or self.stop():
                return
            self.steps += 1
            excess, now = self.excess(self.now.loads), self._excess_ms2()
            if now <= ENOUGH:
                return
            if step % STALLED == 0:
                if now > PROGRESS * then:
                    return
                then = now
            order = np.argsort(-excess, kind="stable")
            busy = order[: np.count_nonzero(excess)]
            found = self._find_improvements(busy[failed : failed + RELIEVED], now * (1 - GAIN))
            if not found:
                failed += RELIEVED
                if failed >= len(busy):
                    return
                continue
            failed = 0
            before = self.keep()
            self.apply(found)
            if len(found) > 1 and self._excess_ms2() >= now * (1 - GAIN):
                self.go_back(before)
                self.apply(found[:1])

    def _excess_ms2(self) -> float:
        """What the plan exceeds the targets by."""
        return float(self.add_even(self.excess(self.now.loads).sum(), self.even_ms))

    def _find_improvements(self, slowest: Ints, below: float) -> list[Changes]:
        """The best change of every table on a slowest rank; best first, no two touch one rank."""
        mine = np.flatnonzero(np.isin(self.shards.ranks, slowest))
        near = Neighbourhood(self.shards, self.now, self.cost, mine)
        found: dict[int, tuple[float, Changes]] = {}
        if len(mine):
            values = np.concatenate([near.moves(), near.swaps(), self._trades(near)], axis=1)
            best = values.argmin(axis=1)
            for row, target in enumerate(best.tolist()):
                value = float(values[row, target])
                if value < below:
                    self._keep(found, value, self._changes_of(near, int(mine[row]), target))
        for table in self._owners(slowest):
            self._keep(found, *self._other_option(table, near))
        return pick_apart(
            (
                (value, change, self._touched(change))
                for value, change in sorted(found.values(), key=lambda pair: pair[0])
            ),
            below,
        )

    def _touched(self, changes: Changes) -> set[int]:
        """Ranks that the tables leave or come to."""
        return set().union(
            *({*self.chosen[t][1].tolist(), *ranks} for t, (_, ranks) in changes.items())
        )

    def _owners(self, slowest: Ints) -> list[int]:
        """Free tables with a shard on one of these ranks alone."""
        there = np.zeros(self.world, dtype=bool)
        there[slowest] = True
        return [int(t) for t in np.unique(self.shards.table[there[self.shards.ranks]])]

    @staticmethod
    def _keep(found: dict[int, tuple[float, Changes]], value: float, change: Changes) -> None:
        table = min(change, default=-1)
        if table >= 0 and (table not in found or value < found[table][0]):
            found[table] = value, change

    def _changes_of(self, near: Neighbourhood, one: int, target: int) -> Changes:
        """A shard's move to a rank, its swap with a shard, or its trade with one."""
        shards = self.shards
        if target >= self.world + len(shards.ranks):
            return self._trade_of(one, target - self.world - len(shards.ranks))
        changes: dict[int, list[int]] = {}
        for shard, rank in near.placements(one, target).items():
            table = int(shards.table[shard])
            ranks = changes.setdefault(table, self.chosen[table][1].tolist())
            ranks[int(shards.position[shard])] = rank
        return {t: (self.chosen[t][0].option, tuple(ranks)) for t, ranks in changes.items()}

    def _trade_of(self, one: int, two: int) -> Changes:
        a, b = (int(self.shards.table[shard]) for shard in (one, two))
        changes: Changes = {}
        for table, other in ((a, b), (b, a)):
            group = self.surrogate.shard_loads(self.chosen[other][0].option)[0]
            option = self.whole[table][group].option
            changes[table] = option, tuple(self.chosen[other][1].tolist())
        return changes

    def _trades(self, near: Neighbourhood) -> Array:
        """Cost after two whole tables trade exchange and rank, ``[mine, shards]``."""
        shards, loads = self.shards, self.now.loads
        mine, here, ranks, group = near.mine, near.here, shards.ranks, self.group
        # of every shard's table, what it would be in another exchange, [groups, columns, shards]
        trade = self.trades[..., shards.table]
        trade[..., ~self.alone[shards.table]] = np.nan
        # what comes to the places of mine, and to those of the others, [mine, columns, shards]
        come = trade[group[mine]] - shards.work[mine][..., None]
        go = trade[..., mine].transpose(2, 1, 0)[..., group] - shards.work.T
        same = here[:, None] == ranks
        there = self.excess((loads[ranks].T + go).swapaxes(1, 2)) - near.parts[ranks]
        there[same] = 0.0
        go[np.broadcast_to(~same[:, None], go.shape)] = 0.0
        come += go
        come += loads[here][..., None]
        after = self.excess(come.swapaxes(1, 2)) + there
        after += near.sum - near.parts[here][:, None]
        trade_even = self.trades_even[shards.table]
        even = trade_even[mine][:, group] - self.own_even
        even += trade_even[:, group[mine]].swapaxes(0, 1) - self.own_even[mine][:, None]
        found = self.add_even(after, self.even_ms + even)
        over = self._without_room(near, same) | (group[mine][:, None] == group)
        found[over | np.isnan(found)] = np.inf
        return found

    def _without_room(self, near: Neighbourhood, same: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Trades that memory or constraints on ranks rule out, ``[mine, shards]``."""
        shards, mine, here, group = self.shards, near.mine, near.here, self.group
        over = near.forbidden()
        for kind in range(shards.memory.shape[1]):
            trade, memory = self.trades_memory[shards.table, :, kind], shards.memory[:, kind]
            left = self.now.room[:, kind] - self.now.used[:, kind]
            to_here = trade[:, group[mine]].T - memory[mine, None]
            to_there = trade[mine][:, group] - memory
            both = np.where(same, to_here + to_there, 0.0)
            over |= np.where(same, both, to_here) > left[here, None]
            over |= np.where(same, both, to_there) > left[shards.ranks]
        return over

    def _other_option(self, table: int, near: Neighbourhood) -> tuple[float, Changes]:
        """The best of the table's options on the ranks that it fits best, and its cost.

        Column shards of a table are alike, so that one order of the ranks serves all of them.
        """
        options = self.options_of(table)
        if options is None:
            return np.inf, {}
        seen, ranks = self.chosen[table]
        rest, used = self.now.loads.copy(), self.now.used.copy()
        np.subtract.at(rest, ranks, seen.work)
        np.subtract.at(used, ranks, seen.memory)
        base = near.parts.copy()
        base[ranks] = self.excess(rest[ranks])
        cost = self.excess(rest + options.work) - base
        over = (used + options.memory > self.now.room).any(axis=2)
        cost[~options.allowed | over] = np.inf
        order = np.argsort(cost, axis=1, kind="stable")
        raised = np.cumsum(np.take_along_axis(cost, order, axis=1), axis=1)[options.last]
        values = self.add_even(base.sum() + raised, self.even_ms - seen.even + options.even)
        for row in np.argsort(values, kind="stable").tolist():
            option, placed = options.options[row], order[row, : options.last[1][row] + 1]
            if options.fixed[row] is not None:
                placed = options.fixed[row]
            if not (option is seen.option and set(placed.tolist()) == set(ranks.tolist())):
                return float(values[row]), {table: (option, tuple(placed.tolist()))}
        return np.inf, {}
