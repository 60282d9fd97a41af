"""Separable approximation of the predicted time, for placement.

An iteration is a sequence of phases that end on the slowest rank: lookups forward, lookups
backward, ids and outputs of every exchange. Shards add to the phases of their ranks; the surrogate
is the sum of the phase maxima. It ranks candidates; the full timeline decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from predictor.cost.loads import COLUMNS, LONGEST, Kinds, Load
from predictor.iteration.torchrec.sparse import OUTPUT_BYTES, Exchange
from predictor.model.plan import ComputeKernel, ShardingType, TablePlan
from predictor.model.workload import INDEX_BYTES
from search.objective import Assignment, Objective
from search.space.option import Choice, Option, sample

Array = NDArray[np.float64]

FORWARD, BACKWARD, IDS, OUTPUTS = range(4)
PHASES = 4


class Surrogate:
    """Phase times of shards in ms, linear in their loads."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.problem = objective.problem
        # of the kinds of an option's shards: a row split over all ranks has as many shards
        self._group_of = cache(self._group_of_kinds)
        self._loads_of = cache(self._loads_of_kinds)
        self._phases_of = cache(self._phases_of_kinds)
        self._rates: dict[int, tuple[float, float]] = {}
        self._summed: tuple[Assignment, Array, Array] = (), np.empty(0), np.empty(0)

    def phases(self, option: Option) -> Array:
        """Phase times of every shard, ``[shards, PHASES]`` in ms."""
        return self._phases_of(option)[self._group_of(option)[2]]

    def group(self, option: Option) -> int:
        """Return the lookup group of an option in the scorer."""
        return self._group_of(option)[0]

    def kinds(self, option: Option) -> tuple[Array, Kinds]:
        """Return the loads of the kinds of shards of an option, ``[kinds, COLUMNS]``, and the kind
        of every shard, ``[shards]``."""
        return self._loads_of(option), self._group_of(option)[2]

    def shard_loads(self, option: Option) -> tuple[int, Array]:
        """Lookup group of an option and the load of every shard, ``[shards, COLUMNS]``."""
        loads, kinds = self.kinds(option)
        return self.group(option), loads[kinds]

    def _phases_of_kinds(self, option: Option) -> Array:
        """Return the phase times of every kind of shard, ``[kinds, PHASES]`` in ms."""
        group, loads = self.group(option), self._loads_of(option)
        phases = np.zeros((len(loads), PHASES))
        phases[:, FORWARD] = loads[:, Load.FORWARD_MS]
        phases[:, BACKWARD] = loads[:, Load.BACKWARD_MS]
        if option.sharding_type is not ShardingType.DATA_PARALLEL:
            costs = self.objective.scorer.costs
            phases[:, BACKWARD] += costs.optimizer_ms(loads[:, Load.GRADIENTS])
            if group not in self._rates:
                self._rates[group] = self._measure_rates(group)
            ids_rate, output_rate = self._rates[group]
            phases[:, IDS] = ids_rate * INDEX_BYTES * loads[:, Load.IDS]
            phases[:, OUTPUTS] = output_rate * OUTPUT_BYTES * loads[:, Load.OUTPUTS]
        return phases

    def _group_of_kinds(self, option: Option) -> tuple[int, TablePlan, Kinds]:
        """Return the lookup group of an option, a plan of one shard of each kind, and the kind of
        every shard, ``[shards]``."""
        scorer = self.objective.scorer
        first, kinds = scorer.shards.alike(option.table, option.sizes, option.offsets)
        plan = sample(option, first)
        return scorer.group_index(option.table, plan), plan, kinds

    def _loads_of_kinds(self, option: Option) -> Array:
        """Return the loads of the kinds of shards of an option, ``[kinds, COLUMNS]``."""
        return self.objective.scorer.shards.of_table(option.table, self._group_of(option)[1])[1]

    def loads_on_ranks(self, choices: Sequence[Choice]) -> Array:
        """Summed loads of tables, ``[groups, ranks, COLUMNS]``; of the longest latencies the
        largest. Tables that share a cache count as if each had one of its own."""
        groups = [np.full(option.num_shards, self.group(option)) for option, _ in choices]
        world = self.problem.topology.world_size
        on_ranks = np.zeros((len(self.objective.scorer.groups), world, COLUMNS))
        if choices:
            ranks = np.fromiter(chain.from_iterable(r for _, r in choices), dtype=np.intp)
            at = np.concatenate(groups), ranks
            loads = np.concatenate([self.shard_loads(option)[1] for option, _ in choices])
            np.add.at(on_ranks, at, loads)
            on_ranks[..., LONGEST] = 0.0
            np.maximum.at(on_ranks[..., LONGEST], at, loads[:, LONGEST])
        return on_ranks

    def totals(self, assignment: Assignment) -> Array:
        """Return the loads of a plan, ``[groups, ranks, COLUMNS]``."""
        caching = ComputeKernel.FUSED_UVM_CACHING
        if any(option.compute_kernel is caching for option, _ in assignment):
            return self.objective.scorer.totals(self.objective.table_plans(assignment))
        return self.loads_on_ranks(assignment)

    def standing(self, choices: Sequence[Choice]) -> tuple[Array, Array]:
        """Return the loads of tables on the ranks.

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
        """Return `standing` without some tables; the sum over all tables is cached."""
        if self._summed[0] is not assignment:
            self._summed = assignment, *self.standing(assignment)
        _, loads, used = self._summed
        away, freed = self.standing([assignment[table] for table in tables])
        return loads - away, used - freed

    def _measure_rates(self, group: int) -> tuple[float, float]:
        """ms per byte of ids and of outputs, both ways, at the size that an average rank would have
        if all tables were in a lookup group."""
        workload, scorer = self.problem.workload, self.objective.scorer
        total = np.zeros(COLUMNS)
        for table in workload.tables:
            total[Load.IDS] += table.lookups_per_sample
            total[Load.BAGS] += sum(f.num_poolings for f in table.features)
            total[Load.OUTPUTS] += table.outputs_per_sample * table.embedding_dim
        total *= workload.batch_size
        loads = np.zeros((2, 1, self.problem.topology.world_size, COLUMNS))
        loads[1] = total
        both = Exchange(scorer.costs, [scorer.groups[group]], [0], loads)

        def more(cost_ms: Array) -> float:
            empty, full = cost_ms.reshape(2, -1).max(axis=1).tolist()
            return float(full - empty)

        transfers = (t for way in (False, True) for t in both.outputs(backward=way))
        outputs = sum(more(transfer.cost_ms) for transfer in transfers)
        return (
            more(both.ids_ms()) / (INDEX_BYTES * total[Load.IDS]),
            outputs / (OUTPUT_BYTES * total[Load.OUTPUTS]),
        )
