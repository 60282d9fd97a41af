"""DreamShard's and AutoShard's greedy planners: whole tables, by a weighted sum of table costs.

Zha et al., "AutoShard" (KDD 2022) and "DreamShard" (NeurIPS 2022) compare with greedy placement by
size (rows x dim), dim, lookups (dim x pooling) and lookups x log10 rows, and learn a policy that
does better. The policy needs GPUs to learn from and is not built here. In its place all mixtures of
the four costs in steps of a quarter are tried, and the best plan under the objective itself
counts, where the papers' planners choose by a learned cost.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from lab.planners.columns import option_of_type, ranks_of, shards_of
from lab.planners.planner import PlannerInputs
from predictor.model.plan import ShardingType
from search.baselines.greedy import place_greedily
from search.baselines.starting_plans import GREEDY
from search.objective import Assignment
from search.stop import Stop

PARTS = 4
"""A weight is a multiple of one over this."""


class DreamShardGreedy:
    """See the module."""

    name = "dreamshard-greedy"

    def propose(self, inputs: PlannerInputs, seed: int, stop: Stop) -> Iterator[Assignment]:
        """A plan for every mixture under which the tables fit."""
        chosen = [option_of_type(options, ShardingType.TABLE_WISE) for options in inputs.options]
        whole = [option for option in chosen if option is not None]
        if len(whole) < len(chosen):
            return
        tables = inputs.problem.workload.tables
        costs = np.array([[weight(t) for t in tables] for weight in GREEDY.values()])
        costs /= costs.sum(axis=1, keepdims=True)
        room = inputs.objective.caps.T
        for mixture in _mixtures(len(costs)):
            if stop.reached():
                return
            shards, owner = shards_of(whole, [np.array([c]) for c in np.array(mixture) @ costs])
            (ranks,) = place_greedily(shards, room)
            if ranks is not None:
                yield tuple(zip(whole, ranks_of(owner, ranks, whole), strict=True))


def _mixtures(count: int) -> Iterator[tuple[int, ...]]:
    """Weights that sum to `PARTS`."""
    for weights in itertools.product(range(PARTS + 1), repeat=count):
        if sum(weights) == PARTS:
            yield weights
