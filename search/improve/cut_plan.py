"""A plan as `search.improve.cycle_cuts` sees it: what its tables put on the ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search.improve.cycle_cuts import CycleCut
from search.improve.shard_moves import Array, Occupancy, RankCost, Shards
from search.objective import Assignment, Objective
from search.space.option import Choice, Option
from search.surrogate import Surrogate

Ints = NDArray[np.intp]
Changes = dict[int, Choice]

_SHARDS = ("owner", "position", "ranks", "work", "memory")
_TABLES = ("chosen", "even_of", "place_of", "alone", "allowed")
_KEPT = (*_SHARDS, *_TABLES, "now", "even_ms", "shards", "group", "own_even")
"""What changes with the plan."""


@dataclass(frozen=True)
class CutOption:
    """An option as the cuts see it.

    Args:
        work: of every shard, ``[shards, columns]``.
        even: what it adds to the cuts wherever it lies, ``[cuts]`` in ms.
        memory: ``[shards, hbm or ddr]``.
        allowed: ranks that a shard may lie on; None if there is one placement only.
    """

    option: Option
    work: Array
    even: Array
    memory: Array
    allowed: NDArray[np.bool_] | None


@dataclass(frozen=True)
class CutOptions:
    """The options of a table that use no other exchanges, stacked.

    Args:
        work: of a shard on each rank, ``[options, ranks, columns]``.
        even: as of `CutOption`, ``[options, cuts]``.
        memory: of a shard on each rank, ``[options, ranks, hbm or ddr]``.
        allowed: ranks that a shard may lie on, ``[options, ranks]``.
        last: where the last of an option's shards comes, if its ranks are sorted: rows, columns.
        fixed: the one placement of an option that has no other.
    """

    options: list[Option]
    work: Array
    even: Array
    memory: Array
    allowed: NDArray[np.bool_]
    last: tuple[Ints, Ints]
    fixed: list[Ints | None]


class CutPlan:
    """A plan and its loads; columns are the segments of all cuts, in units of their mean.

    Args:
        staying: tables that stay as they are.
    """

    def __init__(
        self,
        objective: Objective,
        surrogate: Surrogate,
        staying: Collection[int],
        cuts: Sequence[CycleCut],
        start: Assignment,
    ) -> None:
        self.objective, self.surrogate, self.staying = objective, surrogate, staying
        self.groups = cuts[-1].groups
        self.world = self.objective.problem.topology.world_size
        self._columns(cuts)
        self.known: dict[int, CutOption] = {}
        self.many: dict[int, CutOptions | None] = {}
        self.scale = np.ones(self.slopes.shape[0])
        self.chosen = [(self.see(option), np.array(ranks)) for option, ranks in start]
        self._count_whole_tables()
        self.count()
        self.scale = np.maximum(self.now.loads.mean(axis=0), 1e-12)
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
            legal = self.objective.legal(option)
            single = (
                all(unit and len(unit[0]) == 1 for unit in legal.units) and not legal.same_group
            )
            alternatives = legal.units[0]
            allowed = None
            if single and len(alternatives) > 1:
                allowed = np.zeros(self.world, dtype=bool)
                allowed[[a[0] for a in alternatives]] = True
            found = self.known[id(option)] = CutOption(
                option,
                loads @ self.slopes[:, group].T / self.scale,
                self.even[:, group] @ loads.sum(axis=0),
                np.array([[m.hbm_bytes, m.ddr_bytes] for m in option.memory], dtype=np.float64),
                allowed,
            )
        return found

    def options_of(self, table: int) -> CutOptions | None:
        """The options of a table with at most one shard a rank; None if it has none."""
        if table not in self.many:
            self.many[table] = self._options_of(table)
        return self.many[table]

    def _options_of(self, table: int) -> CutOptions | None:
        options: list[Option] = []
        fixed: list[Ints | None] = []
        many = []
        for option in self.objective.space.options[table]:
            if self.surrogate.shard_loads(option)[0] not in self.groups:
                continue
            seen, units = self.see(option), self.objective.legal(option).units
            only = None if seen.allowed is not None else np.array([r for u in units for r in u[0]])
            alone = only is None or all(len(u) == 1 for u in units)
            if not alone or option.num_shards > (self.world if only is None else len({*only})):
                continue
            many.append(self._on_ranks(seen, only))
            options.append(option)
            fixed.append(only)
        if not many:
            return None
        work, memory, allowed = (np.stack(parts) for parts in zip(*many, strict=True))
        rows = np.arange(len(options)), np.array([o.num_shards - 1 for o in options])
        even = np.stack([self.see(o).even for o in options])
        return CutOptions(options, work, even, memory, allowed, rows, fixed)

    def _on_ranks(
        self, seen: CutOption, only: Ints | None
    ) -> tuple[Array, Array, NDArray[np.bool_]]:
        """Work and memory of a shard on each rank, and the ranks that it may lie on."""
        work = np.repeat(seen.work[:1], self.world, axis=0)
        memory = np.repeat(seen.memory[:1], self.world, axis=0)
        if only is None:
            assert seen.allowed is not None
            return work, memory, seen.allowed
        work[only], memory[only] = seen.work, seen.memory
        allowed = np.zeros(self.world, dtype=bool)
        allowed[only] = True
        return work, memory, allowed

    def count(self) -> None:
        """Loads, bytes and even parts of the plan as it is now, and the shards that may move."""
        sizes = [len(where) for _, where in self.chosen]
        self.owner = np.repeat(np.arange(len(sizes)), sizes)
        self.position = np.concatenate([np.arange(n) for n in sizes])
        self.ranks = np.concatenate([ranks for _, ranks in self.chosen])
        self.work = np.concatenate([seen.work for seen, _ in self.chosen])
        self.memory = np.concatenate([seen.memory for seen, _ in self.chosen])
        self.even_of = np.stack([seen.even for seen, _ in self.chosen])
        self.place_of = np.array([self.place[self.group_of(seen)] for seen, _ in self.chosen])
        self.alone = np.array(sizes) == 1
        none = np.zeros(self.world, dtype=bool)
        self.allowed = np.array(
            [
                none if s.allowed is None or t in self.staying else s.allowed
                for t, (s, _) in enumerate(self.chosen)
            ]
        )
        self._sum()

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
                (self.memory, [seen.memory for seen, _ in mine]),
            )
        )
        self.even_of, self.place_of = self.even_of.copy(), self.place_of.copy()
        self.alone, self.allowed = self.alone.copy(), self.allowed.copy()
        for table, (seen, ranks) in zip(tables, mine, strict=True):
            self.even_of[table] = seen.even
            self.place_of[table] = self.place[self.group_of(seen)]
            self.alone[table] = len(ranks) == 1
            stays = seen.allowed is None or table in self.staying
            self.allowed[table] = False if stays else seen.allowed
        self._sum()

    def _sum(self) -> None:
        """What follows from the arrays of all shards."""
        loads, used = (
            np.stack(
                [np.bincount(self.ranks, one, self.world) for one in many.T],
                axis=1,
                dtype=np.float64,
            )
            for many in (self.work, self.memory)
        )
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
        self.group, self.own_even = self.place_of[owner], self.even_of[owner]

    def group_of(self, seen: CutOption) -> int:
        """Lookup group of an option."""
        return self.surrogate.shard_loads(seen.option)[0]

    def _count_whole_tables(self) -> None:
        """Of every table and group, what it would be as one shard; not a number where it cannot.

        Only trades with tables that are whole themselves make sense: others have nothing here.
        """
        self.place = {group: i for i, group in enumerate(sorted(self.groups))}
        self.whole: list[dict[int, CutOption]] = []
        shape = len(self.chosen), len(self.place)
        self.trades = np.full((shape[1], len(self.scale), shape[0]), np.nan)
        self.trades_even = np.full((*shape, len(self.constants)), np.nan)
        self.trades_memory = np.full((*shape, 2), np.nan)
        for table, options in enumerate(self.objective.space.options):
            found: dict[int, CutOption] = {}
            for option in options:
                group = self.surrogate.shard_loads(option)[0]
                if option.num_shards == 1 and group in self.place and group not in found:
                    seen = found[group] = self.see(option)
                    self.trades[self.place[group], :, table] = seen.work[0]
                    self.trades_even[table, self.place[group]] = seen.even
                    self.trades_memory[table, self.place[group]] = seen.memory[0]
            self.whole.append(found)

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
        over = np.maximum(loads - self.targets, 0.0) * self.scale
        over *= over
        return np.asarray(over.sum(axis=-1))

    def add_even(self, total: Array, even_ms: Array) -> Array:
        """The cost of summed squares with the excess of the even parts ``[..., cuts]``."""
        over = np.maximum(even_ms - self.even_target, 0.0)
        return np.asarray(total + self.world * (over * over).sum(axis=-1))
