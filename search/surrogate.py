"""The separable part of the predicted time: what the exact solver can add up.

An iteration is seen as phases that end on the slowest rank: lookups forward, lookups backward, ids
and outputs of every exchange. Shards add to the phases of their ranks; the surrogate is the
weighted sum of the phase maxima, plus a fixed cost for every exchange in use. It ranks candidates;
the full timeline decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from predictor.cost.loads import COLUMNS, Load
from predictor.iteration.torchrec.sparse import OUTPUT_BYTES, Exchange
from predictor.model.plan import ShardingType
from predictor.model.workload import INDEX_BYTES
from predictor.units import us
from search.objective import Assignment, Objective
from search.space.option import Choice, Option, place

Array = NDArray[np.float64]

FORWARD, BACKWARD, IDS, OUTPUTS = range(4)
PHASES = 4


@dataclass(frozen=True)
class Weights:
    """How much a phase counts; 1 is its own time."""

    forward: float = 1.0
    backward: float = 1.0
    ids: float = 1.0
    outputs: float = 1.0

    @property
    def array(self) -> Array:
        """In the order of the phases."""
        return np.array([self.forward, self.backward, self.ids, self.outputs])


class Surrogate:
    """Phase times of shards in ms, linear in their loads."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.problem = objective.problem
        self.phases = lru_cache(maxsize=1 << 16)(self._phases)
        self.constant_ms = lru_cache(maxsize=1 << 16)(self._constant_ms)
        self.shard_loads = lru_cache(maxsize=1 << 16)(self._shard_loads)
        self._rates: dict[int, tuple[float, float]] = {}
        self._summed: tuple[Assignment, Array, Array] = (), np.empty(0), np.empty(0)

    def exchange(self, option: Option) -> tuple[str, str]:
        """Module and sharding type."""
        return option.module, option.sharding_type

    def _phases(self, option: Option) -> Array:
        """Phase times of every shard, ``[shards, PHASES]`` in ms."""
        _, loads = self.shard_loads(option)
        found = np.zeros((option.num_shards, PHASES))
        found[:, FORWARD] = loads[:, Load.FORWARD_MS]
        found[:, BACKWARD] = loads[:, Load.BACKWARD_MS]
        if option.sharding_type is not ShardingType.DATA_PARALLEL:
            ids_rate, output_rate = self._rates_of(option)
            found[:, IDS] = ids_rate * INDEX_BYTES * loads[:, Load.IDS]
            found[:, OUTPUTS] = output_rate * OUTPUT_BYTES * loads[:, Load.OUTPUTS]
        return found

    def _shard_loads(self, option: Option) -> tuple[int, Array]:
        """Lookup group of an option and the load of every shard, ``[shards, COLUMNS]``."""
        scorer = self.objective.scorer
        plan = place(option, self._somewhere(option))
        return scorer.group_index(option.table, plan), scorer.shards.of_table(option.table, plan)[1]

    def standing(self, choices: Sequence[Choice]) -> tuple[Array, Array]:
        """What tables put on the ranks.

        Returns:
            Phase times ``[ranks, PHASES]`` in ms and bytes ``[hbm or ddr, ranks]``.
        """
        loads = np.zeros((self.problem.topology.world_size, PHASES))
        if not choices:
            return loads, np.zeros_like(self.objective.caps)
        where = list(chain.from_iterable(ranks for _, ranks in choices))
        np.add.at(loads, where, np.concatenate([self.phases(option) for option, _ in choices]))
        return loads, self.objective.memory(choices)

    def standing_without(
        self, assignment: Assignment, tables: Sequence[int]
    ) -> tuple[Array, Array]:
        """As `standing`, of all tables but some; the sum over all is kept for the next time."""
        if self._summed[0] is not assignment:
            self._summed = assignment, *self.standing(assignment)
        _, loads, used = self._summed
        away, freed = self.standing([assignment[table] for table in tables])
        return loads - away, used - freed

    def _somewhere(self, option: Option) -> tuple[int, ...]:
        legal = option.legal_ranks(self.problem.topology)
        return tuple(r for unit in legal.units for r in unit[0])

    def _rates_of(self, option: Option) -> tuple[float, float]:
        """ms per byte of ids and of outputs, both ways, at the size an average rank would have."""
        group, _ = self.shard_loads(option)
        if group not in self._rates:
            self._rates[group] = self._measure_rates(option)
        return self._rates[group]

    def _measure_rates(self, option: Option) -> tuple[float, float]:
        world = self.problem.topology.world_size
        total = self._everything / world
        exchange = self._probe(option, np.zeros((world, COLUMNS)))
        full = self._probe(option, np.tile(total, (world, 1)))
        ids = float(np.max(full.ids_ms() - exchange.ids_ms()))
        outputs = sum(
            float(np.max(a.cost_ms - b.cost_ms))
            for way in (False, True)
            for a, b in zip(full.outputs(backward=way), exchange.outputs(backward=way), strict=True)
        )
        return (
            ids / (INDEX_BYTES * total[Load.IDS]),
            outputs / (OUTPUT_BYTES * total[Load.OUTPUTS]),
        )

    def _probe(self, option: Option, loads: Array) -> Exchange:
        scorer = self.objective.scorer
        group = scorer.groups[self.shard_loads(option)[0]]
        return Exchange(scorer.costs, [group], [0], loads[None, None])

    @cached_property
    def _everything(self) -> Array:
        """Ids and outputs of all tables over all ranks, ``[COLUMNS]``."""
        workload, world = self.problem.workload, self.problem.topology.world_size
        samples = workload.batch_size * world
        total = np.zeros(COLUMNS)
        for table in workload.tables:
            total[Load.IDS] += samples * table.lookups_per_sample
            total[Load.BAGS] += samples * sum(f.num_poolings for f in table.features)
            total[Load.OUTPUTS] += samples * table.outputs_per_sample * table.embedding_dim
        return total

    def _constant_ms(self, option: Option) -> float:
        """What a data-parallel table costs besides its lookups: gradients and optimizer."""
        if option.sharding_type is not ShardingType.DATA_PARALLEL:
            return 0.0
        load = np.zeros((self.problem.topology.world_size, COLUMNS))
        rows, dim = option.sizes[0]
        load[:, Load.GRADIENTS] = rows * dim
        exchange = self._probe(option, load)
        empty = self._probe(option, np.zeros_like(load))
        memory = self.problem.hardware.memory
        moved = 3 * OUTPUT_BYTES * rows * dim / memory.hbm
        return float(np.max(exchange.gradient_sync_ms() - empty.gradient_sync_ms())) + moved

    def fixed_ms(self, option: Option) -> float:
        """What the exchange of an option costs as soon as any table uses it."""
        host = self.problem.hardware.overheads
        if option.sharding_type is ShardingType.DATA_PARALLEL:
            return us(30 * host.op_us)
        zero = np.zeros((self.problem.topology.world_size, COLUMNS))
        exchange = self._probe(option, zero)
        latency = float(np.max(exchange.splits_ms() + exchange.ids_ms()))
        for way in (False, True):
            latency += sum(float(np.max(t.cost_ms)) for t in exchange.outputs(backward=way))
        return latency + us(host.sync_us + 30 * host.op_us)
