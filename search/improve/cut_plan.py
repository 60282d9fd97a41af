"""A plan as `search.improve.cycle_cuts` sees it: what its tables put on the ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search.improve.cycle_cuts import CycleCut
from search.improve.shard_moves import Array, Occupancy, RankCost, Shards
from search.objective import Assignment, Objective, PlacedOption
from search.space.option import Choice, Option
from search.surrogate import Surrogate

Ints = NDArray[np.intp]


@dataclass(frozen=True)
class PlacedOptions:
    """The options of a table with at most one shard a rank, stacked.

    Args:
        memory: of a shard on each rank, ``[options, ranks, hbm or ddr]``.
        allowed: ranks that a shard may lie on, ``[options, ranks]``.
        last: number of the last shard, ``[options]``.
        fixed: the one placement of an option that has no other.
        on_one_host: options whose shards must lie on ranks of one host, ``[options]``.
    """

    options: list[Option]
    memory: Array
    allowed: NDArray[np.bool_]
    last: Ints
    fixed: list[Ints | None]
    on_one_host: NDArray[np.bool_]


class OptionPlaces:
    """Remembers where options of one space may lie."""

    def __init__(self, objective: Objective, surrogate: Surrogate) -> None:
        self.objective, self.surrogate = objective, surrogate
        self.world = objective.problem.topology.world_size
        self.local = objective.problem.topology.intra_group_size
        self._tables: dict[tuple[int, frozenset[int]], PlacedOptions | None] = {}
        self._whole: dict[int, dict[int, Option]] = {}

    def of_table(self, table: int, groups: frozenset[int]) -> PlacedOptions | None:
        """The options of a table in these lookup groups; None if it has none."""
        key = table, groups
        if key not in self._tables:
            self._tables[key] = self._stack(table, groups)
        return self._tables[key]

    def _stack(self, table: int, groups: frozenset[int]) -> PlacedOptions | None:
        options: list[Option] = []
        fixed: list[Ints | None] = []
        for option in self.objective.space.options[table]:
            if self.surrogate.shard_loads(option)[0] not in groups:
                continue
            units = self.objective.legal(option).units
            free = self.objective.placed(option).allowed is not None
            only = None if free else np.array([r for u in units for r in u[0]])
            alone = only is None or all(len(u) == 1 for u in units)
            most = self.local if self.objective.placed(option).on_one_host else self.world
            if alone and option.num_shards <= (most if only is None else len({*only})):
                options.append(option)
                fixed.append(only)
        if not options:
            return None
        memory = np.empty((len(options), self.world, 2))
        allowed = np.zeros((len(options), self.world), dtype=bool)
        for row, (option, only) in enumerate(zip(options, fixed, strict=True)):
            placed = self.objective.placed(option)
            memory[row] = placed.memory[0]
            if only is None:
                allowed[row] = placed.allowed
            else:
                memory[row, only], allowed[row, only] = placed.memory, True
        last = np.array([o.num_shards - 1 for o in options])
        on_one_host = np.array([self.objective.placed(o).on_one_host for o in options])
        return PlacedOptions(options, memory, allowed, last, fixed, on_one_host)

    def on_best_host(self, cost: Array, last: Ints) -> Array:
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

    def whole(self, group: int) -> dict[int, Option]:
        """The first option of every table that is one shard in a lookup group, by its table."""
        if group not in self._whole:
            found: dict[int, Option] = {}
            for table, options in enumerate(self.objective.space.options):
                for option in options:
                    if option.num_shards == 1 and self.surrogate.shard_loads(option)[0] == group:
                        found.setdefault(table, option)
            self._whole[group] = found
        return self._whole[group]


Changes = dict[int, Choice]

_SHARDS = ("owner", "position", "ranks", "work", "memory")
_TABLES = ("chosen", "even_of", "place_of", "alone", "allowed")
_KEPT = (*_SHARDS, *_TABLES, "now", "even_ms", "shards", "by_column", "group", "own_even")
"""What changes with the plan."""


@dataclass(frozen=True)
class CutOption:
    """An option as the cuts see it.

    Args:
        work: of every shard, ``[shards, columns]``.
        even: what it adds to the cuts wherever it lies, ``[cuts]`` in ms.
        placed: where it may lie, whatever the cuts are.
    """

    option: Option
    work: Array
    even: Array
    placed: PlacedOption


@dataclass(frozen=True)
class CutOptions:
    """The options of a table that use no other exchanges, stacked.

    Args:
        placed: what no cut changes of them.
        work: of a shard on each rank, ``[options, ranks, columns]``.
        even: as of `CutOption`, ``[options, cuts]``.
    """

    placed: PlacedOptions
    work: Array
    even: Array


class CutPlan:
    """A plan and its loads; columns are the segments of all cuts, in units of their mean.

    Args:
        places: where options may lie.
        staying: tables that stay as they are.
    """

    def __init__(
        self,
        objective: Objective,
        surrogate: Surrogate,
        places: OptionPlaces,
        staying: Collection[int],
        cuts: Sequence[CycleCut],
        start: Assignment,
    ) -> None:
        self.objective, self.surrogate, self.staying = objective, surrogate, staying
        self.places = places
        self.groups = cuts[-1].groups
        self.world = self.objective.problem.topology.world_size
        self._columns(cuts)
        self.known: dict[int, CutOption] = {}
        self.many: dict[int, CutOptions | None] = {}
        self.scale = np.ones(self.slopes.shape[0])
        mean = self._sum_on_ranks(
            np.concatenate([ranks for _, ranks in start]),
            np.concatenate([self.see(option).work for option, _ in start]),
        ).mean(axis=0)
        self.scale = np.maximum(mean, 1e-12)
        self.known.clear()
        self._count_whole_tables()
        self.chosen = [(self.see(option), np.array(ranks)) for option, ranks in start]
        self.count()

    def _columns(self, cuts: Sequence[CycleCut]) -> None:
        """Segments that several cuts share are one column."""
        slopes: list[Array] = []
        self.member = np.zeros((len(cuts), sum(len(c.segments) for c in cuts)))
        for row, cut in enumerate(cuts):
            for segment in cut.segments:
                same = [i for i, s in enumerate(slopes) if np.allclose(s, segment, 1e-2, 0.0)]
                if not same:
                    slopes.append(segment)
                self.member[row, same[0] if same else len(slopes) - 1] += 1.0
        self.slopes = np.array(slopes)
        self.member = self.member[:, : len(slopes)]
        self.targets = np.zeros(len(slopes))
        self.even_target = np.zeros(len(cuts))
        self.constants = np.array([cut.constant for cut in cuts])
        self.even = np.array([cut.even for cut in cuts]) / self.world

    @property
    def assignment(self) -> Assignment:
        """The plan as it is now."""
        return tuple((seen.option, tuple(ranks.tolist())) for seen, ranks in self.chosen)

    def see(self, option: Option) -> CutOption:
        """An option in the terms of the cuts."""
        found = self.known.get(id(option))
        if found is None:
            group, loads = self.surrogate.shard_loads(option)
            found = self.known[id(option)] = CutOption(
                option,
                loads @ self.slopes[:, group].T / self.scale,
                self.even[:, group] @ loads.sum(axis=0),
                self.objective.placed(option),
            )
        return found

    def options_of(self, table: int) -> CutOptions | None:
        """The options of a table with at most one shard a rank; None if it has none."""
        if table not in self.many:
            self.many[table] = self._options_of(table)
        return self.many[table]

    def _options_of(self, table: int) -> CutOptions | None:
        placed = self.places.of_table(table, self.groups)
        if placed is None:
            return None
        seen = [self.see(option) for option in placed.options]
        work = np.empty((len(seen), self.world, len(self.scale)))
        for row, (one, only) in enumerate(zip(seen, placed.fixed, strict=True)):
            work[row] = one.work[0]
            if only is not None:
                work[row, only] = one.work
        return CutOptions(placed, work, np.stack([one.even for one in seen]))

    def count(self) -> None:
        """Loads, bytes and even parts of the plan as it is now, and the shards that may move."""
        sizes = [len(where) for _, where in self.chosen]
        self.owner = np.repeat(np.arange(len(sizes)), sizes)
        self.position = np.concatenate([np.arange(n) for n in sizes])
        self.ranks = np.concatenate([ranks for _, ranks in self.chosen])
        self.work = np.concatenate([seen.work for seen, _ in self.chosen])
        self.memory = np.concatenate([seen.placed.memory for seen, _ in self.chosen])
        self.even_of = np.stack([seen.even for seen, _ in self.chosen])
        self.place_of = np.array([self.place[self.group_of(seen)] for seen, _ in self.chosen])
        self.alone = np.array(sizes) == 1
        self.allowed = np.array([self._allowed(t) for t in range(len(self.chosen))])
        self._sum()

    def _allowed(self, table: int) -> NDArray[np.bool_]:
        """Ranks to which single shards of a table may move."""
        seen, ranks = self.chosen[table]
        if table in self.staying:
            return np.zeros(self.world, dtype=bool)
        return self.objective.movable(seen.option, ranks.tolist())

    def _count_again(self, tables: Sequence[int]) -> None:
        """As `count`, where only these tables have changed. Arrays are replaced, not changed."""
        rest = ~np.isin(self.owner, tables)
        mine = [self.chosen[t] for t in tables]
        sizes = [len(ranks) for _, ranks in mine]
        owner = np.concatenate([self.owner[rest], np.repeat(tables, sizes)])
        order = np.argsort(owner, kind="stable")
        self.owner = owner[order]
        self.position, self.ranks, self.work, self.memory = (
            np.concatenate([old[rest], *new])[order]
            for old, new in (
                (self.position, [np.arange(n) for n in sizes]),
                (self.ranks, [ranks for _, ranks in mine]),
                (self.work, [seen.work for seen, _ in mine]),
                (self.memory, [seen.placed.memory for seen, _ in mine]),
            )
        )
        self.even_of, self.place_of = self.even_of.copy(), self.place_of.copy()
        self.alone, self.allowed = self.alone.copy(), self.allowed.copy()
        for table, (seen, ranks) in zip(tables, mine, strict=True):
            self.even_of[table] = seen.even
            self.place_of[table] = self.place[self.group_of(seen)]
            self.alone[table] = len(ranks) == 1
            self.allowed[table] = self._allowed(table)
        self._sum()

    def _sum(self) -> None:
        """What follows from the arrays of all shards."""
        loads, used = (self._sum_on_ranks(self.ranks, many) for many in (self.work, self.memory))
        self.now = Occupancy(loads, used, self.objective.caps.T)
        self.even_ms = self.even_of.sum(axis=0)
        keep = np.asarray(self.allowed.any(axis=1))[self.owner]
        owner = self.owner[keep]
        self.shards = Shards(
            owner,
            self.position[keep],
            self.ranks[keep],
            self.work[keep],
            self.memory[keep],
            self.allowed[owner],
        )
        self.by_column = np.ascontiguousarray(self.shards.work.T)
        self.group, self.own_even = self.place_of[owner], self.even_of[owner]

    def _sum_on_ranks(self, ranks: Ints, many: Array) -> Array:
        """What shards on these ranks put there, ``[ranks, columns]`` of ``[shards, columns]``."""
        sums = [np.bincount(ranks, one, self.world) for one in many.T]
        return np.stack(sums, axis=1, dtype=np.float64)

    def group_of(self, seen: CutOption) -> int:
        """Lookup group of an option."""
        return self.surrogate.shard_loads(seen.option)[0]

    def _count_whole_tables(self) -> None:
        """Of every table and group, what it would be as one shard; not a number where it cannot.

        Only trades with tables that are whole themselves make sense: others have nothing here.
        """
        self.place = {group: i for i, group in enumerate(sorted(self.groups))}
        tables = len(self.objective.space.options)
        self.trades = np.full((len(self.scale), len(self.place), tables), np.nan)
        self.trades_even = np.full((tables, len(self.place), len(self.constants)), np.nan)
        self.trades_memory = np.full((tables, len(self.place), 2), np.nan)
        for group, i in self.place.items():
            whole = self.places.whole(group)
            if whole:
                mine, options = list(whole), list(whole.values())
                loads = np.concatenate([self.surrogate.shard_loads(o)[1] for o in options])
                self.trades[:, i, mine] = self.slopes[:, group] @ loads.T / self.scale[:, None]
                self.trades_even[mine, i] = loads @ self.even[:, group].T
                self.trades_memory[mine, i] = [self.objective.placed(o).memory[0] for o in options]
        self.tradable = ~np.isnan(self.trades[0])

    def moved(self, placements: Mapping[int, int]) -> Changes:
        """The tables of these shards with the shards on other ranks."""
        changes: dict[int, list[int]] = {}
        for shard, rank in placements.items():
            table = int(self.shards.table[shard])
            ranks = changes.setdefault(table, self.chosen[table][1].tolist())
            ranks[int(self.shards.position[shard])] = rank
        return {t: (self.chosen[t][0].option, tuple(ranks)) for t, ranks in changes.items()}

    def apply(self, changes: Sequence[Changes]) -> None:
        """Make these changes."""
        changed = sorted(table for change in changes for table in change)
        self.chosen = self.chosen.copy()
        for change in changes:
            for table, (option, ranks) in change.items():
                self.chosen[table] = self.see(option), np.array(ranks)
        self._count_again(changed)

    def keep(self) -> dict[str, Any]:
        """The plan as it is now, for `go_back`."""
        return {name: getattr(self, name) for name in _KEPT}

    def go_back(self, kept: dict[str, Any]) -> None:
        """The plan as it was when `keep` was called."""
        for name, value in kept.items():
            setattr(self, name, value)

    @property
    def cost(self) -> RankCost:
        """What ranks exceed the targets by, squared and summed, in ms^2."""
        return RankCost(self.excess, lambda total: self.add_even(total, self.even_ms))

    def excess(self, loads: Array) -> Array:
        """Squares of what ranks exceed the targets by, ``[..., columns]`` to ``[...]``, in ms^2."""
        over = loads - self.targets
        np.maximum(over, 0.0, out=over)
        over *= self.scale
        over *= over
        return np.asarray(over.sum(axis=-1))

    def add_even(self, total: Array, even_ms: Array) -> Array:
        """The cost of summed squares with the excess of the even parts ``[..., cuts]``."""
        over = np.maximum(even_ms - self.even_target, 0.0)
        return np.asarray(total + self.world * (over * over).sum(axis=-1))
