"""What packing asks of options again and again, and no cut changes: memory and allowed ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from search.improve.shard_moves import Array
from search.objective import Objective
from search.space.option import Option
from search.surrogate import Surrogate

Ints = NDArray[np.intp]


@dataclass(frozen=True)
class PlacedOption:
    """Where an option may lie.

    Args:
        memory: bytes, ``[shards, hbm or ddr]``.
        allowed: ranks that a shard may lie on; None if no shard moves by itself.
        on_one_host: all shards must lie on ranks of one host.
    """

    memory: Array
    allowed: NDArray[np.bool_] | None
    on_one_host: bool


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
        self._one: dict[int, PlacedOption] = {}
        self._tables: dict[tuple[int, frozenset[int]], PlacedOptions | None] = {}
        self._whole: dict[int, dict[int, Option]] = {}

    def of(self, option: Option) -> PlacedOption:
        """Where an option may lie."""
        found = self._one.get(id(option))
        if found is None:
            memory = np.array([[m.hbm_bytes, m.ddr_bytes] for m in option.memory], dtype=np.float64)
            legal = self.objective.legal(option)
            single = all(unit and len(unit[0]) == 1 for unit in legal.units)
            allowed = None
            if single and len(legal.units[0]) > 1:
                allowed = np.zeros(self.world, dtype=bool)
                allowed[[a[0] for a in legal.units[0]]] = True
            one_host = legal.same_group and len(memory) > 1
            found = self._one[id(option)] = PlacedOption(memory, allowed, one_host)
        return found

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
            free = self.of(option).allowed is not None
            only = None if free else np.array([r for u in units for r in u[0]])
            alone = only is None or all(len(u) == 1 for u in units)
            most = self.local if self.of(option).on_one_host else self.world
            if alone and option.num_shards <= (most if only is None else len({*only})):
                options.append(option)
                fixed.append(only)
        if not options:
            return None
        memory = np.empty((len(options), self.world, 2))
        allowed = np.zeros((len(options), self.world), dtype=bool)
        for row, (option, only) in enumerate(zip(options, fixed, strict=True)):
            placed = self.of(option)
            memory[row] = placed.memory[0]
            if only is None:
                allowed[row] = placed.allowed
            else:
                memory[row, only], allowed[row, only] = placed.memory, True
        last = np.array([o.num_shards - 1 for o in options])
        on_one_host = np.array([self.of(o).on_one_host for o in options])
        return PlacedOptions(options, memory, allowed, last, fixed, on_one_host)

    def host_of(self, rank: int) -> NDArray[np.bool_]:
        """The ranks of a rank's host."""
        return np.asarray(np.arange(self.world) // self.local == rank // self.local)

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
