"""Random plans for as long as another search took: what time alone is worth."""

from __future__ import annotations

import random
from collections.abc import Iterator

from lab.planners.planner import PlannerInputs
from predictor.model.plan import ShardingType
from search.objective import Assignment
from search.partitioner import GreedyPartitioner
from search.space.option import Option
from search.stop import Stop

GREEDY_SHARE = 0.5
"""Of the plans are placed greedily; the others' shards lie anywhere."""


class RandomPlans:
    """Random options of few sharding types, on random or on greedily chosen ranks."""

    name = "random"

    def propose(self, inputs: PlannerInputs, seed: int, stop: Stop) -> Iterator[Assignment]:
        """Plans until ``stop`` is reached; it must have a time limit."""
        rng = random.Random(seed)
        placer = GreedyPartitioner(inputs.objective, inputs.surrogate)
        while not stop.reached():
            options = _options(inputs, rng)
            if rng.random() < GREEDY_SHARE:
                plan = placer.place_all(options)
            else:
                plan = _anywhere(inputs, options, rng)
            if plan is not None:
                yield plan


def _options(inputs: PlannerInputs, rng: random.Random) -> list[Option]:
    """An option a table; of uniform draws over all options none would be any good, so that the
    sharding types are drawn first."""
    kinds = list(ShardingType)
    allowed = set(rng.sample(kinds, rng.randint(1, len(kinds))))
    return [
        rng.choice([o for o in options if o.sharding_type in allowed] or list(options))
        for options in inputs.options
    ]


def _anywhere(
    inputs: PlannerInputs, options: list[Option], rng: random.Random
) -> Assignment | None:
    plan = []
    for option in options:
        legal = inputs.objective.legal(option)
        if legal.same_group:
            size = inputs.problem.topology.intra_group_size
            first = rng.randrange(inputs.problem.topology.groups) * size
            ranks = tuple(rng.randrange(first, first + size) for _ in legal.units)
            if not option.is_legal(ranks, inputs.problem.topology):
                return None
        else:
            ranks = tuple(r for unit in legal.units for r in rng.choice(unit))
        plan.append((option, ranks))
    return tuple(plan)
