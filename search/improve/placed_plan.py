"""A plan by what its shards put on the ranks, lowered change by change.

What is lowered is the largest of several sums of maxima over the ranks (`Columns`).
A maximum is flat almost everywhere: it says nothing of a change that leaves the slowest rank as it
is. So norms of a high power over the ranks stand in for maxima. Near a plan they change as the sum
over ranks of these powers does, weighed by its slope, so that a change costs no more to score than
the ranks that it touches. Where nothing helps, a higher power comes nearer to the maximum.

Why: docs/decisions/0028-plans-from-the-bound.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from search.improve.shard_moves import Array, Ints, Neighbourhood, Occupancy, Shards, pick_apart
from search.objective import Assignment, Objective
from search.space.option import Choice, Option

Changes = dict[int, Choice]

MOST_FAILED = 30
"""Ranks of which nothing lowers a norm, after which that ends."""
RELIEVED = 3
"""Ranks that are relieved in one step."""
STALLED, STALLED_GAIN = 8, 1e-4
"""Steps that must gain at least this share, or a descent ends."""
GAIN = 1e-6
"""Relative gain below which a change does not count."""
NEAR_MS = 0.01
"""Sums that are shorter than the longest by more than a few times this hardly count."""
AT_ONCE = 1 << 16
"""Numbers of work that options of several tables are compared with at once: what caches hold."""
SEED = 0
"""Of the shards that are divided between two ranks where these have many."""


@dataclass(frozen=True)
class Columns:
    """What is lowered: the largest of several sums of maxima over the ranks.

    Args:
        work: what every shard of an option adds to its rank, ``[shards, columns]`` in ms.
        even: what an option adds to every sum wherever it lies, ``[sums]`` in ms.
        member: how often a sum has the maximum of a column, ``[sums, columns]``.
        constants: of the sums in ms.
        knows: whether it can say that of an option; None where options stay.
    """

    work: Callable[[Option], Array]
    even: Callable[[Option], Array]
    member: Array
    constants: Array
    knows: Callable[[Option], bool] | None = None


@dataclass(frozen=True)
class _Seen:
    """An option in the terms of the columns, these in units of their mean.

    Args:
        work: of every shard, ``[shards, columns]``.
        even: ``[sums]`` in ms.
        memory: bytes, ``[shards, hbm or ddr]``.
    """

    option: Option
    work: Array
    even: Array
    memory: Array


@dataclass(frozen=True)
class _Others:
    """The options of a table with at most one shard a rank, stacked.

    Args:
        work: of a shard on each rank, ``[options, ranks, columns]``.
        even: ``[options, sums]``.
        memory: of a shard on each rank, ``[options, ranks, hbm or ddr]``.
        allowed: ranks that a shard may lie on, ``[options, ranks]``.
        last: number of the last shard, ``[options]``.
        fixed: the one placement of an option that has no other.
        on_one_host: options whose shards must lie on ranks of one host, ``[options]``.
    """

    options: list[Option]
    work: Array
    even: Array
    memory: Array
    allowed: NDArray[np.bool_]
    last: Ints
    fixed: list[Ints | None]
    on_one_host: NDArray[np.bool_]


Chosen = list[tuple[_Seen, Ints]]


class PlacedPlan:
    """A plan and its loads.

    Args:
        staying: tables that stay as they are.

    Attributes:
        squares: the power of the norms is 2 to this.
        steps: that were made.
    """

    def __init__(
        self,
        objective: Objective,
        columns: Columns,
        start: Assignment,
        staying: Collection[int],
    ) -> None:
        self.objective, self.columns, self.staying = objective, columns, staying
        self.world = objective.problem.topology.world_size
        self.local = objective.problem.topology.intra_group_size
        self.squares, self.steps = 4, 0
        self.random = np.random.default_rng(SEED)
        self.scale = np.ones(columns.member.shape[1])
        self._place(start)
        self.scale = np.maximum(self.now.loads.mean(axis=0), 1e-12)
        self._place(start)

    def _place(self, plan: Assignment) -> None:
        self.known: dict[Option, _Seen] = {}
        self.others: dict[int, _Others | None] = {}
        self.put([(self._see(option), np.array(ranks)) for option, ranks in plan])

    @property
    def assignment(self) -> Assignment:
        """The plan as it is now."""
        return tuple((seen.option, tuple(ranks.tolist())) for seen, ranks in self.chosen)

    @property
    def slowest_ms(self) -> float:
        """The largest sum of maxima."""
        slowest = self.now.loads.max(axis=0) * self.scale
        sums = self.columns.member @ slowest + self.columns.constants + self.even_ms
        return float(sums.max())

    def _see(self, option: Option) -> _Seen:
        if option not in self.known:
            work, even = self.columns.work(option) / self.scale, self.columns.even(option)
            self.known[option] = _Seen(option, work, even, self.objective.placed(option).memory)
        return self.known[option]

    def _count(self) -> None:
        """Loads, bytes and even parts of the plan as it is now, and the shards that may move."""
        sizes = [len(ranks) for _, ranks in self.chosen]
        owner = np.repeat(np.arange(len(sizes)), sizes)
        ranks = np.concatenate([ranks for _, ranks in self.chosen])
        work = np.concatenate([seen.work for seen, _ in self.chosen])
        memory = np.concatenate([seen.memory for seen, _ in self.chosen])
        loads, used = self._on_ranks(ranks, work), self.objective.memory(self.assignment).T
        self.now = Occupancy(loads, used, self.objective.caps.T)
        self.even_ms = np.sum([seen.even for seen, _ in self.chosen], axis=0)
        nowhere = np.zeros(self.world, dtype=bool)
        allowed = np.stack(
            [
                nowhere if t in self.staying else self.objective.movable(seen.option, where[0])
                for t, (seen, where) in enumerate(self.chosen)
            ]
        )
        keep = np.asarray(allowed.any(axis=1))[owner]
        table, position = owner[keep], np.concatenate([np.arange(n) for n in sizes])[keep]
        self.shards = Shards(table, position, ranks[keep], work[keep], memory[keep], allowed[table])

    def _on_ranks(self, ranks: Ints, many: Array) -> Array:
        """What shards on these ranks put there, ``[ranks, columns]`` of ``[shards, columns]``."""
        return np.stack([np.bincount(ranks, one, self.world) for one in many.T], axis=1)

    def apply(self, changes: Sequence[Changes]) -> None:
        """Make these changes."""
        chosen = self.chosen.copy()
        for change in changes:
            for table, (option, ranks) in change.items():
                chosen[table] = self._see(option), np.array(ranks)
        self.put(chosen)

    def put(self, chosen: Chosen) -> None:
        """The plan as it was chosen before."""
        self.chosen = chosen
        self._count()

    def lower(
        self, budget: int, squares: Sequence[int], stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Lower the largest sum with norms in place of maxima.

        Args:
            squares: powers that take turns where nothing helps, as numbers of squares.
        """
        # what a plan has next to nothing of may overflow, and is then infinitely long
        with np.errstate(over="ignore", invalid="ignore"):
            for self.squares in squares:
                self._descend(budget, stop)

    def _descend(self, budget: int, stop: Callable[[], bool]) -> None:
        failed, then = 0, np.inf
        for step in range(budget - self.steps):
            if failed >= min(MOST_FAILED, self.world) or stop():
                break
            now = self.aim()
            if step % STALLED == 0:
                if now > then * (1 - STALLED_GAIN):
                    break
                then = now
            self.steps += 1
            failed = 0 if self._relieve(now, failed) else failed + RELIEVED

    def _relieve(self, now: float, skipped: int) -> bool:
        """Change what lies on the ranks that the norms count most; whether they fell."""
        counted = self.counted(self.now.loads)
        busy = np.argsort(-counted, kind="stable")[skipped : skipped + RELIEVED]
        below = float(counted.sum() + self.even_ms @ self.shares) - GAIN * now
        found = self.improvements(busy, below)
        before = self.chosen
        for some in (found, found[:1]):
            if some:
                self.apply(some)
                if self.aim() < now * (1 - GAIN):
                    return True
                self.put(before)
                self.aim()
        return False

    def aim(self) -> float:
        """The largest sum in ms with norms in place of maxima; from here on changes are weighed by
        what they add to it."""
        power, member = float(2**self.squares), self.columns.member
        powers = np.maximum(self._powers(self.now.loads).sum(axis=0), 1e-300)
        norms = powers ** (1 / power) * self.scale
        sums = member @ norms + self.columns.constants + self.even_ms
        longest = float(sums.max())
        shares = np.exp((sums - longest) / NEAR_MS)
        self.shares = shares / shares.sum()
        self.weights = self.shares @ member * norms / (power * powers)
        return longest + NEAR_MS * float(np.log(shares.sum()))

    def _powers(self, loads: Array) -> Array:
        """Products are an order of magnitude faster than a power."""
        loads = loads * loads
        for _ in range(self.squares - 1):
            loads *= loads
        return loads

    def counted(self, loads: Array) -> Array:
        """What ranks with loads ``[..., columns]`` add to the norms, ``[...]`` in ms."""
        return np.asarray(self._powers(loads) @ self.weights)

    def improvements(self, slowest: Ints, below: float) -> list[Changes]:
        """The best change of every table on a slowest rank that costs less than ``below``; best
        first, no two touch one rank."""
        mine = np.flatnonzero(np.isin(self.shards.ranks, slowest))
        near = Neighbourhood(self.shards, self.now, self.counted, mine)
        even = float(self.even_ms @ self.shares)
        found: dict[int, tuple[float, Changes]] = {}

        def keep(value: float, change: Changes) -> None:
            table = min(change, default=-1)
            if value < below and table >= 0 and (table not in found or value < found[table][0]):
                found[table] = value, change

        if len(mine):
            values = np.concatenate([near.moves(), near.swaps()], axis=1) + even
            for row, target in enumerate(values.argmin(axis=1).tolist()):
                value = float(values[row, target])
                if value < below:
                    keep(value, self.moved(near.placements(int(mine[row]), target)))
        if self.columns.knows is not None:
            for value, change in self.other_options(np.unique(self.shards.table[mine]), near):
                keep(value, change)
        if not found and near.scarce and len(slowest):
            value, placed = near.divisions(int(slowest[0]), self.random)
            keep(value + even, self.moved(placed))
        best = sorted(found.values(), key=lambda pair: pair[0])
        return pick_apart(((value, c, self._touched(c)) for value, c in best), below)

    def moved(self, placements: Mapping[int, int]) -> Changes:
        """The tables of these shards with the shards on other ranks."""
        changes: dict[int, list[int]] = {}
        for shard, rank in placements.items():
            table = int(self.shards.table[shard])
            ranks = changes.setdefault(table, self.chosen[table][1].tolist())
            ranks[int(self.shards.position[shard])] = rank
        return {t: (self.chosen[t][0].option, tuple(ranks)) for t, ranks in changes.items()}

    def _touched(self, changes: Changes) -> set[int]:
        """Ranks that the tables leave or come to."""
        return set().union(
            *({*self.chosen[t][1].tolist(), *ranks} for t, (_, ranks) in changes.items())
        )

    def other_options(self, tables: Ints, near: Neighbourhood) -> Iterator[tuple[float, Changes]]:
        """The best other option of each table on the ranks that it fits best, and its cost.

        Column shards of a table are alike, so that one order of the ranks serves all of them.
        """
        known = [(t, some) for t in tables.tolist() if (some := self._others_of(t)) is not None]
        size, begin = 0, 0
        for end, (_, options) in enumerate(known, 1):
            size += options.work.size
            if size > AT_ONCE or end == len(known):
                yield from self._best_options(known[begin:end], near)
                size, begin = 0, end

    def _others_of(self, table: int) -> _Others | None:
        """The options of a table; None if it has none."""
        if table not in self.others:
            found = [*self._placeable(table)]
            self.others[table] = self._stacked(found) if found else None
        return self.others[table]

    def _placeable(self, table: int) -> Iterator[tuple[Option, Ints | None]]:
        """Options in the lookup groups that the columns know, with the one placement of those that
        have no other; those with two shards on a rank are left out."""
        for option in self.objective.space.options[table]:
            placed, units = self.objective.placed(option), self.objective.legal(option).units
            if self.columns.knows is None or not self.columns.knows(option):
                continue
            if placed.allowed is not None:
                if option.num_shards <= (self.local if placed.on_one_host else self.world):
                    yield option, None
            elif all(len(unit) == 1 for unit in units):
                ranks = np.array([rank for unit in units for rank in unit[0]])
                if len({*ranks.tolist()}) == option.num_shards:
                    yield option, ranks

    def _stacked(self, found: Sequence[tuple[Option, Ints | None]]) -> _Others:
        seen = [self._see(option) for option, _ in found]
        placed = [self.objective.placed(option) for option, _ in found]
        work = np.repeat(np.stack([one.work[0] for one in seen])[:, None], self.world, axis=1)
        memory = np.repeat(np.stack([one.memory[0] for one in seen])[:, None], self.world, axis=1)
        allowed = np.zeros(work.shape[:2], dtype=bool)
        for row, (one, where, (_, only)) in enumerate(zip(seen, placed, found, strict=True)):
            if only is None:
                allowed[row] = where.allowed
            else:
                work[row, only], memory[row, only], allowed[row, only] = one.work, one.memory, True
        return _Others(
            [option for option, _ in found],
            work,
            np.stack([one.even for one in seen]),
            memory,
            allowed,
            np.array([option.num_shards - 1 for option, _ in found]),
            [only for _, only in found],
            np.array([where.on_one_host for where in placed]),
        )

    def _best_options(
        self, known: Sequence[tuple[int, _Others]], near: Neighbourhood
    ) -> Iterator[tuple[float, Changes]]:
        """As `other_options`, of some tables together."""
        chosen = [self.chosen[table] for table, _ in known]
        of = np.repeat(np.arange(len(known)), [len(ranks) for _, ranks in chosen])
        ranks = np.concatenate([ranks for _, ranks in chosen])
        rest, used = (np.repeat(v[None], len(known), 0) for v in (self.now.loads, self.now.used))
        np.subtract.at(rest, (of, ranks), np.concatenate([seen.work for seen, _ in chosen]))
        np.subtract.at(used, (of, ranks), np.concatenate([seen.memory for seen, _ in chosen]))
        base = np.repeat(near.parts[None], len(known), 0)
        base[of, ranks] = self.counted(rest[of, ranks])
        many = [options for _, options in known]
        sizes = [len(one.options) for one in many]
        row = np.repeat(np.arange(len(known)), sizes)
        work = np.concatenate([one.work for one in many]) + rest[row]
        cost = self.counted(work) - base[row]
        memory = np.concatenate([one.memory for one in many]) + used[row]
        over = (memory > self.now.room).any(axis=2)
        cost[~np.concatenate([one.allowed for one in many]) | over] = np.inf
        last = np.arange(len(row)), np.concatenate([one.last for one in many])
        together = np.concatenate([one.on_one_host for one in many])
        cost[together] = self._on_best_host(cost[together], last[1][together])
        raised = np.cumsum(np.sort(cost, axis=1), axis=1)[last]
        even = np.concatenate([one.even for one in many])
        even += self.even_ms - np.stack([seen.even for seen, _ in chosen])[row]
        values = base.sum(axis=1)[row] + raised + even @ self.shares
        ends = np.cumsum(sizes)[:-1]
        parts = zip(known, np.split(values, ends), np.split(cost, ends), strict=True)
        for (table, options), found, costs in parts:
            yield self._first_other(table, options, found, costs)

    def _first_other(
        self, table: int, others: _Others, values: Array, cost: Array
    ) -> tuple[float, Changes]:
        """The best of a table's options that is not what it has now, where it lies best."""
        seen, ranks = self.chosen[table]
        for row in np.argsort(values, kind="stable").tolist():
            option, there = others.options[row], others.fixed[row]
            if there is None:
                there = np.argsort(cost[row], kind="stable")[: others.last[row] + 1]
            if not (option is seen.option and set(there.tolist()) == set(ranks.tolist())):
                return float(values[row]), {table: (option, tuple(there.tolist()))}
        return np.inf, {}

    def _on_best_host(self, cost: Array, last: Ints) -> Array:
        """What a shard costs on each rank, infinite on all hosts but the one where the shards of
        an option together cost least.

        Args:
            cost: of a shard on each rank, ``[options, ranks]``.
            last: number of the last shard, ``[options]``.
        """
        hosts = cost.reshape(len(cost), self.world // self.local, self.local)
        each = np.cumsum(np.sort(hosts, axis=2), axis=2)[np.arange(len(cost)), :, last]
        others = np.ones(each.shape, dtype=bool)
        others[np.arange(len(cost)), each.argmin(axis=1)] = False
        return np.where(others[..., None], np.inf, hosts).reshape(cost.shape)
