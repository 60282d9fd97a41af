"""Among plans that cannot be told apart, the simplest and best balanced one.

Of the plans that are predicted to be at most so much slower than the fastest one, the expected time
is compared: the mean over draws of the costs' errors, which is the less, the more slack the other
ranks have beside the slowest. Plans whose expected time is above the least by at most `ALIKE`, and
by less than the standard deviation of the difference, cannot be told apart. (All see the same
errors.) Of these the order is: fewest exchanges, fewest shards, fewest bytes that the busiest rank
moves beside its lookups.

Why: docs/decisions/0040.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from predictor.cost.errors import CostErrors, known_errors
from predictor.cost.loads import Load
from predictor.model.reservation import INDEX_BYTES
from search.candidate import Candidate, signature
from search.improve.local_search import LocalSearch
from search.objective import Assignment, Objective, apply

TOLERANCE = 0.005
"""How much slower than the fastest plan the chosen one may be predicted to be."""
ALIKE = 0.001
"""Share of the iteration time by which expected times of plans that are alike may differ."""
DRAWS, SEED = 64, 2
POOL = 96
"""Plans compared under draws, at most."""
LARGE = 1_000_000
"""Plans x tables x ranks x draws compared at most, where a plan takes long to score."""
CHANGES = 8
"""Changes of a plan that are scored, for every plan of a pool."""
ROUNDS = 2
"""Times that the changes of the chosen plan are looked at again."""
WORD_BYTES = 4
FOUND_BY = "simplest of equals"


def prefer_simple(
    search: LocalSearch, ranked: Sequence[Candidate], limit_ms: float
) -> list[Candidate]:
    """The preferred plan, then those of the others that are not faster.

    Args:
        search: has visited plans, and knows the neighbours of any.
        ranked: best first.
        limit_ms: no slower plan is preferred.
    """
    chosen = _Preference(search, limit_ms).choose(ranked[0])
    name = signature(chosen.assignment)
    slower = [c for c in ranked if c.iteration_ms >= chosen.iteration_ms]
    return [chosen, *(c for c in slower if signature(c.assignment) != name)]


@dataclass(frozen=True)
class _Preference:
    """Chooses among the plans that a search knows of."""

    search: LocalSearch
    limit_ms: float

    def choose(self, fastest: Candidate) -> Candidate:
        """The preferred plan; the fastest one where no other is preferable."""
        known = [fastest]
        for plan, ms in self.search.visited.items():
            known.append(Candidate(plan, ms, FOUND_BY))
        chosen = fastest
        for _ in range(ROUNDS):
            known += self._changed(chosen)
            better = self._best(fastest, chosen, known)
            if better is chosen:
                break
            chosen, known = better, []
        return chosen

    @property
    def objective(self) -> Objective:
        """What scores plans."""
        return self.search.objective

    @property
    def _most(self) -> int:
        size = len(self.objective.space.options) * self.search.topology.world_size * DRAWS
        return max(2, min(POOL, LARGE // size))

    def _changed(self, base: Candidate) -> list[Candidate]:
        """Neighbours of a plan."""
        changes = list(islice(self.search.neighbours(base.assignment), CHANGES * self._most))
        times = self.objective.score_neighbours(base.assignment, changes).tolist()
        return [
            Candidate(apply(base.assignment, change), ms, FOUND_BY)
            for change, ms in zip(changes, times, strict=True)
            if ms <= self.limit_ms
        ]

    def _best(self, fastest: Candidate, chosen: Candidate, known: Sequence[Candidate]) -> Candidate:
        """The preferred one of some plans, the fastest and the one chosen before among them."""
        pool = self._pool(fastest, chosen, known)
        if len(pool) == 1:
            return chosen
        plans = [c.assignment for c in pool]
        problem = self.objective.problem
        sizes = known_errors(problem.hardware, problem.topology)
        times = self.objective.score_draws(plans, CostErrors(sizes, DRAWS, SEED))
        slower = times - times[times.mean(axis=1).argmin()]
        apart = np.minimum(slower.std(axis=1), ALIKE * fastest.iteration_ms)
        alike = np.flatnonzero(slower.mean(axis=1) <= apart).tolist()
        least = min(simplicity(plans[i]) for i in alike)
        equal = [i for i in alike if simplicity(plans[i]) == least]
        return pool[min(equal, key=lambda i: (moved_bytes(self.objective, plans[i]), i))]

    def _pool(
        self, fastest: Candidate, chosen: Candidate, known: Sequence[Candidate]
    ) -> list[Candidate]:
        """The fastest plans within the limit, and the simplest, in equal parts."""
        near = [c for c in known if c.iteration_ms <= self.limit_ms]
        near.sort(key=lambda c: c.iteration_ms)
        simple = sorted(near, key=lambda c: simplicity(c.assignment))
        pool = {signature(c.assignment): c for c in (fastest, chosen)}
        for pair in zip(near, simple, strict=True):
            for candidate in pair:
                pool.setdefault(signature(candidate.assignment), candidate)
            if len(pool) >= self._most:
                break
        return [*pool.values()]


def simplicity(assignment: Assignment) -> tuple[int, int]:
    """Exchanges and shards of a plan; less is simpler."""
    exchanges = {(option.module, option.sharding_type) for option, _ in assignment}
    return len(exchanges), sum(option.num_shards for option, _ in assignment)


def moved_bytes(objective: Objective, assignment: Assignment) -> float:
    """Ids, lengths and outputs of the rank that has most of them."""
    scorer = objective.scorer
    total = np.sum(
        [scorer.table(i, plan)[1] for i, plan in enumerate(objective.table_plans(assignment))],
        axis=0,
    )
    words = total[:, Load.BAGS] + total[:, Load.OUTPUTS]
    return float((INDEX_BYTES * total[:, Load.IDS] + WORD_BYTES * words).max())
