"""Packs shards under the critical cycle: tables change options and ranks, shards move and swap.

Plans near the current one are compared by the cuts of `search.improve.cycle_cuts`: each is a sum of
maxima over ranks. A maximum is flat almost everywhere, so it gets a target instead, nearer to the
mean, and what ranks exceed their targets by, squared, is driven out; maxima of other segments keep
theirs. After every round the plan is scored on the full timeline, and its own critical cycle joins
the cuts, until that no longer helps. Before the targets come norms (`search.improve.packing`):
they let one segment become longer where another becomes shorter by more.

The cuts of a plan with norms over the ranks in place of maxima, and what a change adds to them.

A maximum over the ranks says nothing of a change that leaves the slowest rank as it is, and targets
for every maximum (`search.improve.packing`) allow no segment to become longer where others become
shorter by more. The norm of a high power over the ranks does both. Near a plan it changes as the
sum over ranks of these powers does, weighed by its slope, so that a change costs no more to score
than with targets.

Why: docs/decisions/0028-plans-from-the-bound.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from search.improve.cut_plan import Changes, CutOptions, CutPlan, Ints, OptionPlaces, PlacedOptions
from search.improve.cycle_cuts import CycleCut, critical_cut
from search.improve.shard_moves import Array, Neighbourhood, pick_apart
from search.objective import Assignment, Objective
from search.surrogate import Surrogate

SQUARES = 5
"""Of the loads: the 32nd power, whose root is the norm."""
SMOOTHED = 30
"""Steps of a round that lower norms."""
MOST_FAILED = 30
"""Ranks of which nothing lowers a norm, after which that ends."""
STALLED_GAIN = 1e-4
"""Relative gain of as many steps as `STALLED` below which it does too."""
GAIN = 1e-6
"""Relative gain below which a change does not count."""
RELIEVED = 3
"""Ranks that are relieved in one step."""
STALLED = 8
"""Steps that must gain something, or a descent ends."""
TELLING = 3
"""Columns that are looked at before all are."""
NEAR_MS = 0.01
"""Cuts that are shorter than the longest by more than a few times this hardly count."""


class CutNorms(CutPlan):
    """A plan whose excess is over targets, or where `aim` was called, in norms."""

    squares = 0
    """The power of the norms is 2 to this; 0 for targets."""
    steps = 0
    """That were made."""

    def find_improvements(self, slowest: Ints, below: float) -> list[Changes]:
        """Changes of what lies on these ranks that cost less; best first, no two touch one rank."""
        raise NotImplementedError

    def smooth(self, budget: int, stop: Callable[[], bool]) -> None:
        """Lower the largest cut with norms in place of maxima."""
        self.squares, failed, then = SQUARES, 0, np.inf
        # what a plan has next to nothing of may overflow, and is then infinitely long
        with np.errstate(over="ignore", invalid="ignore"):
            for self.steps in range(1, budget + 1):
                if failed >= MOST_FAILED or stop():
                    break
                now = self.aim()
                if self.steps % STALLED == 1:
                    if now > then * (1 - STALLED_GAIN):
                        break
                    then = now
                failed = 0 if self._lower(now, failed) else failed + RELIEVED
        self.squares = 0

    def _lower(self, now: float, skipped: int) -> bool:
        """Change what lies on the ranks that the norms count most; whether they fell."""
        counted = self.excess(self.now.loads)
        busy = np.argsort(-counted, kind="stable")[skipped : skipped + RELIEVED]
        before = float(self.add_even(counted.sum(), self.even_ms))
        found = self.find_improvements(busy, before - GAIN * now)
        kept = self.keep()
        for some in (found, found[:1]):
            if some:
                self.apply(some)
                if self.aim() < now * (1 - GAIN):
                    return True
                self.go_back(kept)
                self.aim()
        return False

    def aim(self) -> float:
        """The largest cut in ms with norms in place of maxima; from here on changes are weighed by
        what they add to it."""
        power = float(2**self.squares)
        sums = np.maximum(self._powers(self.now.loads).sum(axis=0), 1e-300)
        norms = sums ** (1 / power) * self.scale
        cuts = self.member @ norms + self.constants + self.even_ms
        longest = float(cuts.max())
        shares = np.exp((cuts - longest) / NEAR_MS)
        self.shares = shares / shares.sum()
        self.weights = self.shares @ self.member * norms / (power * sums)
        return longest + NEAR_MS * float(np.log(shares.sum()))

    def _powers(self, loads: Array) -> Array:
        """Products are an order of magnitude faster than a power."""
        loads = loads * loads
        for _ in range(self.squares - 1):
            loads *= loads
        return loads

    def excess(self, loads: Array) -> Array:
        """As of `CutPlan`; with norms the weighed powers, in ms."""
        if not self.squares:
            return super().excess(loads)
        return np.asarray(self._powers(loads) @ self.weights)

    def telling(self) -> list[int]:
        """Columns that rule most changes out: that exceed their targets now; with norms those in
        which some rank counts most."""
        if not self.squares:
            return list(np.flatnonzero((self.now.loads > self.targets).any(axis=0)))
        most = (self._powers(self.now.loads) * self.weights).max(axis=0)
        return list(np.argsort(-most, kind="stable")[:TELLING])

    def excess_in(self, column: int, loads: Array) -> Array:
        """What loads of one column ``[...]`` add to `excess`."""
        if self.squares:
            return np.asarray(self._powers(loads) * self.weights[column])
        over = np.maximum(loads - self.targets[column], 0.0) * self.scale[column]
        over *= over
        return np.asarray(over)

    @property
    def even_excess(self) -> float:
        """By how much less the even parts may exceed their targets; with norms they may not."""
        return 0.0 if self.squares else float(self.add_even(np.zeros(()), self.even_ms))

    def add_even(self, total: Array, even_ms: Array) -> Array:
        """As of `CutPlan`; with norms in ms."""
        if not self.squares:
            return super().add_even(total, even_ms)
        return np.asarray(total + even_ms @ self.shares)


ENOUGH = 1e-12
"""Excess in ms^2 below which targets count as met."""
PROGRESS = 0.8
"""A descent ends when `STALLED` steps leave more than this share of the excess."""
TIGHTER = (0.5, 0.8)
"""A target lies at these shares of the distance from the mean to the slowest rank, in turn."""
NEAR = 2e-3
"""Relative distance to the mean at which the slowest rank is close enough."""
ROUNDS = 4
"""Rounds that share the budget, at least: each new cut is worth more than a longer descent."""
PATIENCE = 3
"""Rounds in a row that do not help before packing ends."""
SEED = 0
"""Of the shards that are divided between two ranks where these have many."""
AT_ONCE = 1 << 16
"""Numbers of work that options of several tables are compared with at once: what caches hold."""

Pairs = tuple[Ints, Ints]
"""Rows of the shards on the slowest ranks, and shards to exchange places with."""


class Packer:
    """Packs plans of one problem."""

    def __init__(self, objective: Objective, surrogate: Surrogate) -> None:
        self.objective = objective
        self.surrogate = surrogate
        for options in objective.space.options:  # cuts are over all lookup groups: make them known
            for option in options:
                surrogate.shard_loads(option)
        self.places = OptionPlaces(objective, surrogate)
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
            state = _Descent(self.objective, self.surrogate, self.places, self.staying, cuts, first)
            state.smooth(min(SMOOTHED, steps), partial(stop, best_ms))
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


class _Descent(CutNorms):
    """Lowers the norms of the segments, then drives ranks below their targets."""

    def tighten(self, budget: int, stop: Callable[[], bool]) -> None:
        """Lower the maxima column by column, those farthest above their mean first."""
        self.budget, self.stop = self.steps + budget, stop
        self.random = np.random.default_rng(SEED)
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
            found = self.find_improvements(busy[failed : failed + RELIEVED], now * (1 - GAIN))
            if not found:
                failed += RELIEVED
                if failed < len(busy):
                    continue
                found = self._divide_again(int(order[0]), now * (1 - GAIN))
                if not found:
                    return
            failed = 0
            before = self.keep()
            self.apply(found)
            if len(found) > 1 and self._excess_ms2() >= now * (1 - GAIN):
                self.go_back(before)
                self.apply(found[:1])

    def _excess_ms2(self) -> float:
        """What the plan exceeds the targets by."""
        return float(self.add_even(self.excess(self.now.loads).sum(), self.even_ms))

    def find_improvements(self, slowest: Ints, below: float) -> list[Changes]:
        """The best change of every table on a slowest rank; best first, no two touch one rank."""
        mine = np.flatnonzero(np.isin(self.shards.ranks, slowest))
        near = Neighbourhood(self.shards, self.now, self.cost, mine)
        found: dict[int, tuple[float, Changes]] = {}
        if len(mine):
            values = np.concatenate([near.moves(), self._swaps(near), self._trades(near)], axis=1)
            best = values.argmin(axis=1)
            for row, target in enumerate(best.tolist()):
                value = float(values[row, target])
                if value < below:
                    self._keep(found, value, self._changes_of(near, int(mine[row]), target))
        for value, change in self._other_options(self._owners(slowest), near):
            self._keep(found, value, change)
        return pick_apart(
            (
                (value, change, self._touched(change))
                for value, change in sorted(found.values(), key=lambda pair: pair[0])
            ),
            below,
        )

    def _divide_again(self, slowest: int, below: float) -> list[Changes]:
        """The shards of a rank and of an idle one divided between them, where memory is scarce."""
        near = Neighbourhood(self.shards, self.now, self.cost, np.zeros(0, dtype=np.intp))
        value, moved = near.divisions(slowest, self.random) if near.scarce else (np.inf, {})
        return [self.moved(moved)] if value < below else []

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
        return self.moved(near.placements(one, target))

    def _trade_of(self, one: int, two: int) -> Changes:
        a, b = (int(self.shards.table[shard]) for shard in (one, two))
        changes: Changes = {}
        for table, other in ((a, b), (b, a)):
            group = self.surrogate.shard_loads(self.chosen[other][0].option)[0]
            option = self.places.whole(group)[table]
            changes[table] = option, tuple(self.chosen[other][1].tolist())
        return changes

    def _swaps(self, near: Neighbourhood) -> Array:
        """Cost after each swap with a shard, ``[mine, shards]``; infinite where it is not allowed
        or does not help."""
        shards, work = self.shards, self.by_column
        apart = near.here[:, None] != shards.ranks
        pairs = self._worth(near, apart, lambda c: work[c] - work[c, near.mine, None])
        mine, other = near.mine[pairs[0]], pairs[1]
        come = work[:, other] - work[:, mine]
        bytes_come = shards.memory[other] - shards.memory[mine]
        values = self._exchanged(near, pairs, (come, -come), (bytes_come, -bytes_come))
        return self._spread(near, pairs, self.add_even(values, self.even_ms))

    def _trades(self, near: Neighbourhood) -> Array:
        """Cost after two whole tables trade exchange and rank, ``[mine, shards]``; infinite where
        it is not allowed or does not help."""
        shards, group, work = self.shards, self.group, self.by_column
        table, here = shards.table, group[near.mine]
        whole = self.alone[table]
        able = whole[near.mine, None] & whole & (here[:, None] != group)
        able &= self.tradable[here][:, table] & self.tradable[:, table[near.mine]][group].T
        pairs = self._worth(
            near, able, lambda c: self.trades[c, here][:, table] - work[c, near.mine, None]
        )
        mine, other = near.mine[pairs[0]], pairs[1]
        to_here, to_there, one, two = group[mine], group[other], table[mine], table[other]
        come = self.trades[:, to_here, two] - work[:, mine]
        go = self.trades[:, to_there, one] - work[:, other]
        bytes_come = self.trades_memory[two, to_here] - shards.memory[mine]
        bytes_go = self.trades_memory[one, to_there] - shards.memory[other]
        values = self._exchanged(near, pairs, (come, go), (bytes_come, bytes_go))
        even = self.trades_even[two, to_here] - self.own_even[other]
        even += self.trades_even[one, to_there] - self.own_even[mine]
        return self._spread(near, pairs, self.add_even(values, self.even_ms + even))

    def _worth(
        self, near: Neighbourhood, able: NDArray[np.bool_], more: Callable[[int], Array]
    ) -> Pairs:
        """Of a row of mine and a shard, the pairs whose exchange of places may help.

        It does not where the rank of mine alone then exceeds its targets by no less than all that
        the exchange can change does now. A few columns show that.

        Args:
            able: pairs that can be exchanged, ``[mine, shards]``.
            more: what comes to the rank of mine in a column, likewise.
        """
        loads, here = self.now.loads, near.here
        after = np.zeros(able.shape)
        for column in self.telling():
            after += self.excess_in(column, more(column) + loads[here, None, column])
        now = near.parts[here, None] + near.parts[self.shards.ranks]
        now += self.even_excess
        able = able & (after < now)
        rows, others = np.nonzero(able)
        return rows, others

    def _exchanged(
        self,
        near: Neighbourhood,
        pairs: Pairs,
        more: tuple[Array, Array],
        bytes_more: tuple[Array, Array],
    ) -> Array:
        """Squared excess after pairs exchange places, ``[pairs]``; infinite where not allowed.

        Args:
            more: what comes to the rank of mine and to that of the other, ``[columns, pairs]``.
            bytes_more: likewise, ``[pairs, hbm or ddr]``.
        """
        (rows, others), (come, go), (bytes_come, bytes_go) = pairs, more, bytes_more
        here, there = near.here[rows], self.shards.ranks[others]
        loads = np.ascontiguousarray(self.now.loads.T)
        same = here == there
        come[:, same] += go[:, same]
        after = self.excess((come + loads[:, here]).T)
        rest = self.excess((go + loads[:, there]).T) - near.parts[there]
        rest[same] = 0.0
        after += rest
        after += near.sum - near.parts[here]
        left = self.now.room - self.now.used
        bytes_come[same] += bytes_go[same]
        bytes_go[same] = bytes_come[same]
        over = (bytes_come > left[here]).any(axis=1) | (bytes_go > left[there]).any(axis=1)
        allowed = self.shards.allowed
        over |= ~allowed[near.mine[rows], there] | ~allowed[others, here]
        after[over] = np.inf
        return after

    def _spread(self, near: Neighbourhood, pairs: Pairs, values: Array) -> Array:
        """Values of pairs as ``[mine, shards]``, infinite elsewhere."""
        found = np.full((len(near.mine), len(self.shards.ranks)), np.inf)
        found[pairs] = values
        return found

    def _other_options(
        self, tables: Sequence[int], near: Neighbourhood
    ) -> Iterator[tuple[float, Changes]]:
        """The best other option of each table on the ranks that it fits best, and its cost.

        Column shards of a table are alike, so that one order of the ranks serves all of them.
        """
        known = [(t, options) for t in tables if (options := self.options_of(t)) is not None]
        size, some = 0, 0
        for end, (_, options) in enumerate(known, 1):
            size += options.work.size
            if size > AT_ONCE or end == len(known):
                yield from self._best_options(known[some:end], near)
                size, some = 0, end

    def _best_options(
        self, known: Sequence[tuple[int, CutOptions]], near: Neighbourhood
    ) -> Iterator[tuple[float, Changes]]:
        """As `_other_options`, of some tables together."""
        chosen = [self.chosen[table] for table, _ in known]
        of, ranks = (
            np.repeat(np.arange(len(known)), [len(ranks) for _, ranks in chosen]),
            np.concatenate([ranks for _, ranks in chosen]),
        )
        rest, used = (np.repeat(v[None], len(known), 0) for v in (self.now.loads, self.now.used))
        np.subtract.at(rest, (of, ranks), np.concatenate([seen.work for seen, _ in chosen]))
        np.subtract.at(
            used, (of, ranks), np.concatenate([seen.placed.memory for seen, _ in chosen])
        )
        base = np.repeat(near.parts[None], len(known), 0)
        base[of, ranks] = self.excess(rest[of, ranks])
        placed = [options.placed for _, options in known]
        sizes = [len(one.options) for one in placed]
        row = np.repeat(np.arange(len(known)), sizes)
        work = np.concatenate([options.work for _, options in known])
        work += rest[row]
        cost = self.excess(work) - base[row]
        memory = np.concatenate([one.memory for one in placed])
        memory += used[row]
        over = (memory > self.now.room).any(axis=2)
        cost[~np.concatenate([one.allowed for one in placed]) | over] = np.inf
        last = np.arange(len(row)), np.concatenate([one.last for one in placed])
        together = np.concatenate([one.on_one_host for one in placed])
        cost[together] = self.places.on_best_host(cost[together], last[1][together])
        raised = np.cumsum(np.sort(cost, axis=1), axis=1)[last]
        even = np.concatenate([options.even for _, options in known])
        even += self.even_ms - np.stack([seen.even for seen, _ in chosen])[row]
        values = self.add_even(base.sum(axis=1)[row] + raised, even)
        ends = np.cumsum(sizes)[:-1]
        parts = zip(known, np.split(values, ends), np.split(cost, ends), strict=True)
        for (table, options), found, costs in parts:
            yield self._first_other(table, options.placed, found, costs)

    def _first_other(
        self, table: int, placed: PlacedOptions, values: Array, cost: Array
    ) -> tuple[float, Changes]:
        """The best of a table's options that is not what it has now, where it lies best."""
        seen, ranks = self.chosen[table]
        for row in np.argsort(values, kind="stable").tolist():
            option, there = placed.options[row], placed.fixed[row]
            if there is None:
                there = np.argsort(cost[row], kind="stable")[: placed.last[row] + 1]
            if not (option is seen.option and set(there.tolist()) == set(ranks.tolist())):
                return float(values[row]), {table: (option, tuple(there.tolist()))}
        return np.inf, {}
