"""Costs of every shard under cycle cuts as an array ``[shards, columns]``.

A cut is a constant, an even part, and a sum over segments of the maximum over the ranks
(`search.model.cut_model.CycleCut`). Each distinct segment is a column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from predictor.cost.loads import COLUMNS
from search.model.cycle_cut import CycleCut
from search.objective import Assignment, Objective
from search.space.option import ChoicesInUse, Option

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
LoadsOf = Callable[[Option], tuple[int, Array]]
"""Lookup group of an option and the load of every shard, ``[shards, COLUMNS]``."""

ALIKE = 1e-2
"""Relative difference up to which two segments are one column."""


class ShardCosts(NamedTuple):
    """Costs of shards under some cuts, for compiled code.

    Args:
        work: cost of a distinct shard in each column of its rank, ``[distinct, columns]`` in ms.
        even: cost of an option in each cut, on any ranks, ``[options, cuts]`` in ms.
        floors: cost of a rank with any shard of a group, ``[columns, groups]`` in ms.
        member: number of segments of a cut in a column, ``[cuts, columns]``.
        constants: constants of the cuts, ``[cuts]`` in ms.
    """

    work: Array
    even: Array
    floors: Array
    member: Array
    constants: Array


class ShardSpace(NamedTuple):
    """Options and where their units, shards that are placed together, may lie, for compiled code.

    Args:
        first_option: first option of every table, and the end, ``[tables + 1]``.
        first_unit: where the units of a table are kept, and the end, ``[tables + 1]``.
        free: tables that may change.
        first_shard, units, group, together: first shard of an option, how many units it has, its
            lookup group, whether all must lie on one host, ``[options]``.
        pool: which alternatives its units have, ``[options]``.
        first_rank, alternatives, width: of a pool: where its ranks begin, how many alternatives
            there are, and shards of a unit, ``[pools]``.
        ranks: of all alternatives, one after the other.
        at_rank: alternative that begins at a rank, -1 if none, ``[pools, ranks]``.
        distinct: which of the distinct shards each one equals, ``[shards]``; those of a row-wise
            table are alike, and there are thousands on many ranks.
        memory: bytes of a distinct shard, ``[distinct, hbm or ddr]``.
        caps: ``[ranks, hbm or ddr]``.
        local: ranks of a host.
        unit: bytes; where there is less memory, what exceeds it is measured by that.
        home: option that the plan in use has of a table, -1 if it may not stay, -2 if any place is
            as good, ``[tables]``.
        home_where: alternatives of its units, as ``where`` of a plan.
        arriving: bytes that reach other ranks where a table moves to an option, ``[options]``.
        max_moves, max_bytes: what may move; no bytes are counted where that is negative.
    """

    first_option: Ints
    first_unit: Ints
    free: Ints
    first_shard: Ints
    units: Ints
    group: Ints
    together: NDArray[np.bool_]
    pool: Ints
    first_rank: Ints
    alternatives: Ints
    width: Ints
    ranks: Ints
    at_rank: Ints
    distinct: Ints
    memory: Array
    caps: Array
    local: int
    unit: float
    home: Ints
    home_where: Ints
    arriving: Array
    max_moves: int
    max_bytes: float


class ShardModel:
    """Options of every table as arrays.

    Args:
        objective: objective with the memory limits of shards.
        options: options of every table; each has a legal placement.
        loads_of: returns the loads of an option.
        free: tables that may change.
    """

    def __init__(
        self,
        objective: Objective,
        options: Sequence[Sequence[Option]],
        loads_of: LoadsOf,
        free: Sequence[int],
    ) -> None:
        self.options = [option for table in options for option in table]
        self.number = {id(option): i for i, option in enumerate(self.options)}
        self.world = objective.problem.topology.world_size
        grouped_loads = [loads_of(option) for option in self.options]
        self.group = np.array([group for group, _ in grouped_loads])
        loads = np.concatenate([loads for _, loads in grouped_loads])
        counts = np.array([len(loads) for _, loads in grouped_loads])
        self.first_shard = np.concatenate([[0], np.cumsum(counts)])
        memory = np.concatenate([objective.shard_memory(option) for option in self.options])
        group = np.repeat(self.group, counts)
        shards, distinct = _distinct(np.concatenate([loads, memory, group[:, None]], axis=1))
        self.loads, self.group_of_shard = loads[shards], group[shards]
        self.groups = len(objective.scorer.groups)
        legal = [objective.legal(option) for option in self.options]
        self.pools: dict[tuple[tuple[int, ...], ...], int] = {}
        pool = [self.pools.setdefault(placements.units[0], len(self.pools)) for placements in legal]
        self.alternatives = [*self.pools]
        self.index = [{ranks: i for i, ranks in enumerate(pool)} for pool in self.alternatives]
        units = np.array([len(placements.units) for placements in legal])
        sizes = [len(table) for table in options]
        first = np.concatenate([[0], np.cumsum(sizes)])
        most = np.maximum.reduceat(units, first[:-1])
        width = np.array([len(ranks[0]) for ranks in self.alternatives])
        many = np.array([len(ranks) for ranks in self.alternatives])
        at_rank = np.full((len(many), self.world), -1)
        for row, pool_ranks in enumerate(self.alternatives):
            at_rank[row, [ranks[0] for ranks in pool_ranks]] = np.arange(len(pool_ranks))
        first_unit = np.concatenate([[0], np.cumsum(most)])
        tables = len(options)
        self.space = ShardSpace(
            first_option=first,
            first_unit=first_unit,
            free=np.array(free, dtype=np.int64),
            first_shard=self.first_shard[:-1],
            units=units,
            group=self.group,
            together=np.array([p.same_group and len(p.units) > 1 for p in legal]),
            pool=np.array(pool),
            first_rank=np.concatenate([[0], np.cumsum(many * width)[:-1]]),
            alternatives=many,
            width=width,
            ranks=np.array([r for pool in self.alternatives for ranks in pool for r in ranks]),
            at_rank=at_rank,
            distinct=distinct,
            # numba compiles the kernel anew for arrays of another order
            memory=np.ascontiguousarray(memory[shards]),
            caps=np.ascontiguousarray(objective.caps.T),
            local=objective.problem.topology.intra_group_size,
            unit=max(1.0, 0.01 * float(objective.caps.max())),
            home=np.full(tables, -2),
            home_where=np.zeros(first_unit[-1], dtype=np.int64),
            arriving=np.zeros(len(self.options)),
            max_moves=tables,
            max_bytes=-1.0,
        )
        in_use = objective.space.in_use
        if in_use is not None and in_use.is_limited:
            self.space = self._near(in_use)

    def _near(self, in_use: ChoicesInUse) -> ShardSpace:
        """Return the space with the places of the plan in use and the limits on moves."""
        space = self.space
        home = np.full(len(in_use.choices), -1)
        home_where = space.home_where.copy()
        for table, choice in enumerate(in_use.choices):
            if table in in_use.new:
                home[table] = -2
            elif choice is not None and id(choice[0]) in self.number:
                home[table] = self.number[id(choice[0])]
                units = self._units(int(home[table]), choice[1])
                at = int(space.first_unit[table])
                home_where[at : at + len(units)] = units
        # a table that moves brings at most what it brings to ranks that hold nothing of it
        arriving = [
            max(in_use.arriving_bytes(o.table, (o, ranks)) for ranks in self._ends(i))
            for i, o in enumerate(self.options)
        ]
        return space._replace(
            home=home,
            home_where=home_where,
            arriving=np.array(arriving, dtype=np.float64),
            max_moves=in_use.max_moves,
            max_bytes=-1.0 if in_use.max_bytes is None else float(in_use.max_bytes),
        )

    def _ends(self, option: int) -> list[tuple[int, ...]]:
        """Return the ranks of an option with all units on the first or the last alternative."""
        units = self.alternatives[self.space.pool[option]]
        count = int(self.space.units[option])
        return [
            tuple(rank for ranks in places for rank in ranks)
            for places in ([units[0]] * count, [units[-1]] * count)
        ]

    def _units(self, option: int, ranks: Sequence[int]) -> list[int]:
        """Return the alternative of each unit of an option on these ranks."""
        pool = int(self.space.pool[option])
        width, index = int(self.space.width[pool]), self.index[pool]
        return [
            index[tuple(ranks[unit * width : (unit + 1) * width])]
            for unit in range(int(self.space.units[option]))
        ]

    def numbers(self, plan: Assignment) -> tuple[Ints, Ints]:
        """Return the option of every table and the alternative of every unit of a plan."""
        space = self.space
        chosen = np.array([self.number[id(option)] for option, _ in plan])
        where = np.zeros(space.first_unit[-1], dtype=np.int64)
        for (_, ranks), option, at in zip(plan, chosen, space.first_unit.tolist(), strict=False):
            units = self._units(int(option), ranks)
            where[at : at + len(units)] = units
        return chosen, where

    def plan(self, chosen: Ints, where: Ints) -> Assignment:
        """Return the plan of these options and alternatives."""
        space, plan = self.space, []
        for option, at in zip(chosen.tolist(), space.first_unit.tolist(), strict=False):
            units = self.alternatives[space.pool[option]]
            numbers = where[at : at + space.units[option]].tolist()
            ranks = tuple(rank for number in numbers for rank in units[number])
            plan.append((self.options[option], ranks))
        return tuple(plan)

    def costs(self, cuts: Sequence[CycleCut]) -> ShardCosts:
        """Return the costs of all shards under some cuts."""
        size, count = self.groups * (COLUMNS + 1), sum(len(cut.segments) for cut in cuts)
        distinct, columns = np.zeros((max(1, count), size)), 0
        member = np.zeros((len(cuts), max(1, count)))
        for row, cut in enumerate(cuts):
            flat = cut.segments.reshape(-1, size - self.groups)
            for segment in np.concatenate([flat, cut.floors.reshape(-1, self.groups)], axis=1):
                near = np.abs(distinct[:columns] - segment) <= ALIKE * np.abs(segment)
                same = np.flatnonzero(near.all(axis=1))
                distinct[columns] = segment
                member[row, same[0] if len(same) else columns] += 1.0
                columns += not len(same)
        slopes, floors = np.split(distinct[: max(1, columns)], [size - self.groups], axis=1)
        of_groups = slopes.reshape(-1, self.groups, COLUMNS)
        even_of = np.array([cut.even for cut in cuts]) / self.world
        work = np.empty((len(self.loads), len(slopes)))
        evens = np.empty((len(self.loads), len(cuts)))
        for group in np.unique(self.group).tolist():
            mine = self.group_of_shard == group
            work[mine] = self.loads[mine] @ of_groups[:, group].T
            evens[mine] = self.loads[mine] @ even_of[:, group].T
        return ShardCosts(
            work=np.maximum(work, 0.0),
            even=np.add.reduceat(evens[self.space.distinct], self.first_shard[:-1], axis=0),
            floors=np.ascontiguousarray(floors),
            member=np.ascontiguousarray(member[:, : len(slopes)]),
            constants=np.array([cut.constant for cut in cuts]),
        )


def _distinct(rows: Array) -> tuple[Ints, Ints]:
    """Return where each of the distinct rows first occurs, and which of them every row equals."""
    rows = np.ascontiguousarray(rows)
    keys = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return first[order], np.argsort(order)[which]
