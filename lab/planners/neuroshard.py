"""NeuroShard: beam search over column splits, a greedy grid over columns a rank inside.

After Zha et al., "Pre-train and Search: Efficient Embedding Table Sharding with Pre-trained Neural
Cost Models" (MLSys 2023). Outer loop: from each of the ``BEAM`` best sets of splits, halve each of
the ``CANDIDATES`` largest and of the costliest shards; at most ``MOST_SPLITS`` times. Inner loop:
place shards greedily by computation cost, a rank holding at most a multiple of the mean columns;
``LIMITS`` multiples are tried, and the cheapest placement is the set's.

Differences: phase times of `search.surrogate` stand for the three networks, which were trained on
hardware that is not here, so this planner knows the objective better than the original would. All
shards of a table are halved together, as TorchRec splits a table into columns of one width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lab.planners.columns import list_halvings, ranks_of, shards_of
from lab.planners.planner import PlannerInputs
from search.baselines.greedy import place_greedily
from search.objective import Assignment
from search.space.option import Option
from search.stop import Stop
from search.surrogate import BACKWARD, FORWARD

BEAM = 3
CANDIDATES = 10
MOST_SPLITS = 10
LIMITS = np.linspace(1.0, 1.5, 11)

Splits = tuple[int, ...]
"""How often each table was halved."""


@dataclass(frozen=True)
class _Found:
    cost: float
    plan: Assignment | None


class NeuroShard:
    """See the module."""

    name = "neuroshard"

    def propose(self, inputs: PlannerInputs, seed: int, stop: Stop) -> Iterator[Assignment]:
        """The cheapest plan so far, whenever there is a cheaper one."""
        steps = [list_halvings(options) for options in inputs.options]
        if not all(steps):
            return
        whole: Splits = (0,) * len(steps)
        best = _placed(inputs, _chosen(steps, whole))
        if best.plan is not None:
            yield best.plan
        beam = [(best.cost, whole)]
        for _ in range(MOST_SPLITS):
            tried: dict[Splits, float] = {}
            for _, splits in beam:
                for table in _candidates(inputs, _chosen(steps, splits)):
                    more = (*splits[:table], splits[table] + 1, *splits[table + 1 :])
                    if more in tried or more[table] >= len(steps[table]):
                        continue
                    found = _placed(inputs, _chosen(steps, more))
                    tried[more] = found.cost
                    if found.plan is not None and found.cost < best.cost:
                        best = found
                        yield found.plan
                    if stop.reached():
                        return
            beam = sorted((cost, splits) for splits, cost in tried.items())[:BEAM]


def _chosen(steps: list[list[Option]], splits: Splits) -> list[Option]:
    return [options[at] for options, at in zip(steps, splits, strict=True)]


def _candidates(inputs: PlannerInputs, chosen: list[Option]) -> list[int]:
    """Tables of the largest and of the costliest shards."""
    size = np.array([max(m.hbm_bytes for m in o.memory) for o in chosen])
    cost = np.array([inputs.surrogate.phases(o)[0, [FORWARD, BACKWARD]].sum() for o in chosen])
    both = (np.argsort(-values, kind="stable")[:CANDIDATES] for values in (size, cost))
    return sorted({int(table) for tables in both for table in tables})


def _placed(inputs: PlannerInputs, chosen: list[Option]) -> _Found:
    """The cheapest of the greedy placements: costliest rank's computation and communication."""
    phases = [inputs.surrogate.phases(option) for option in chosen]
    computation = [p[:, [FORWARD, BACKWARD]].sum(axis=1) for p in phases]
    shards, owner = shards_of(chosen, computation)
    world = inputs.problem.topology.world_size
    mean = float(shards.dims.sum()) / world
    tries = place_greedily(shards, inputs.objective.caps.T, (LIMITS * mean).tolist())
    everything = np.concatenate([p.sum(axis=1) for p in phases])
    best = _Found(np.inf, None)
    for ranks in tries:
        if ranks is None:
            continue
        cost = float(np.bincount(ranks, everything, world).max())
        if cost < best.cost:
            places = ranks_of(owner, ranks, chosen)
            best = _Found(cost, tuple(zip(chosen, places, strict=True)))
    return best
