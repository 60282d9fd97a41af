"""Choice among plans that the predictor cannot tell apart: the one a practitioner would ship.

Plans tie if they are predicted to be at most so much slower than the fastest one (`tolerance_of`).
Where the host sets the pace thousands of plans do, and what their devices take alone must be within
as much of the least.

Of plans that tie, the one with the least memory on the fullest GPU comes first, then the one with
the fewest sharding types, then the fewest pieces that tables are cut into, then the one whose
emptiest GPU has most. Each rule keeps the plans that are alike by it, and the next one chooses
among these. The search for a fast plan knows few plans with little memory, so a local search looks
for them among those that tie, and another for a simpler plan within that memory.

Why: docs/decisions/0030-choosing-among-plans.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from predictor.cost.errors import OVERHEADS, GivenErrors
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.predict import predict
from search.candidate import Candidate, signature
from search.improve.local_search import LocalSearch
from search.objective import Assignment, Objective, RatedObjective, apply
from search.params import SearchParams
from search.problem import TieSummary
from search.space.option import Choice, Option
from search.surrogate import Surrogate

Array = NDArray[np.float64]

TOLERANCE, MOST_TOLERANCE = SearchParams.least_tie, SearchParams.most_tie
"""Least and most share by which plans tie; a gain must also exceed the first."""
NO_TIME = 1e-6
"""Factor on the host's times that leaves the time of the devices alone."""
NORM = 16
"""Order of the norm of the ranks' memory; it is smooth where the maximum is flat."""
LATE = 1e3
"""Score added to plans that do not tie, so that they rank behind all that do."""
PIECES = 1e6
"""Number above the pieces of any plan."""
UNSCORED = 8
"""Number of unscored changes that count as one evaluated plan: they bring no less memory."""
FOUND_AMONG_TIES = "chosen among ties"
DEVICE_TIME = "device time"
RULES = ("memory", "sharding types", "shards", "balance")


def tolerance_of(objective: Objective, fastest: Candidate, params: SearchParams) -> float:
    """Return by what fraction a tied plan may be slower than the fastest one."""
    problem = objective.problem
    plan = objective.sharding_plan(fastest.assignment)
    prediction = predict(problem.workload, problem.topology, problem.hardware, plan)
    error = prediction.interval_ms[1] / prediction.iteration_ms - 1
    return min(params.most_tie, max(params.least_tie, params.tie_of_error * error))


def prefer(
    objective: Objective,
    nominal: Objective,
    surrogate: Surrogate,
    ranked: Sequence[Candidate],
    limit: float,
    tolerance: float,
    params: SearchParams,
    descent: int,
    ended: Callable[..., bool] = lambda *_: False,
) -> tuple[list[Candidate], TieSummary]:
    """Return the preferred plan, then those of the others that are not better; and what tied.

    Args:
        objective: what the search minimises.
        nominal: predicts the times of plans.
        ranked: best first by what the search minimises, which candidates have for their time.
        limit: no plan beyond it ties, by what the search minimises.
        tolerance: by which share the devices' time may be longer than the least, where the host
            sets the pace.
        descent: plans to score by each of the local searches.
        ended: whether the time for that is up.
    """
    preference = _Preference(objective, nominal, surrogate, ranked, limit, tolerance, params)
    chosen = preference.choose(descent, ended)
    name = signature(chosen.assignment)
    worse = [c for c in ranked if c.iteration_ms >= chosen.iteration_ms]
    rest = [c for c in worse if signature(c.assignment) != name]
    return [chosen, *rest], preference.ties(chosen)


class _Preference:
    """Choice among the known plans, and more plans reached from them.

    Attributes:
        tied: plans that tie, with what the search minimises.
        by_rules: the preferred one, before its caches take the memory left over.
        near: plans within the limit, whose devices may take too long.
        device_range_ms: what their devices take alone, as far as that was looked at.
        apart: by how much plans that are alike by a rule may differ.
        device_limit: the most that the devices of a plan that ties take alone, in ms.
        kind: of memory, that is scarce: 0 for HBM, 1 for host memory.
    """

    def __init__(
        self,
        objective: Objective,
        nominal: Objective,
        surrogate: Surrogate,
        ranked: Sequence[Candidate],
        limit: float,
        tolerance: float,
        params: SearchParams,
    ) -> None:
        self.objective, self.nominal, self.surrogate = objective, nominal, surrogate
        self.ranked, self.fastest, self.params = ranked, ranked[0], params
        alike = params.alike
        self.apart = dict(zip(RULES, (alike, 0.0, 0.0, alike), strict=True))
        self.limit, self.tolerance = limit, tolerance
        self.kind = int(nominal.problem.hardware.device == "cpu")
        self.most_bytes = max(1.0, float(nominal.caps[self.kind].max()))
        alone = GivenErrors({OVERHEADS: NO_TIME})
        self.alone = nominal.problem.perturbed(nominal.scorer, alone)
        start = self.fastest.assignment
        self.near = {start}
        self.device_range_ms = np.inf, 0.0
        self.host_bound = bool(
            self.device_ms([start])[0] < nominal.score([start])[0] * (1 - params.least_tie)
        )
        self.device_limit = np.inf
        self.tied = {start: self.fastest.iteration_ms}
        self.by_rules = start

    def device_ms(self, plans: Sequence[Assignment]) -> Array:
        """Return the time of the devices alone for plans within the limit, ``[plans]``."""
        if not plans:
            return np.zeros(0)
        numbers = np.array([self.nominal.numbers(plan) for plan in plans])
        times = self.alone.score_numbered(numbers)[:, 0]
        low, high = self.device_range_ms
        self.device_range_ms = min(low, float(times.min())), max(high, float(times.max()))
        return times

    def shares(self, memory: Array) -> Array:
        """Return the fraction of a device's memory in use on each rank, ``[ranks]``."""
        return np.asarray(memory[self.kind] / self.most_bytes)

    def fullest(self, plan: Assignment) -> float:
        """Return the fraction of a device's memory in use on the fullest rank."""
        return float(self.shares(self.nominal.memory(plan)).max())

    def lateness(self, measures: Array, plans: Sequence[Assignment]) -> Array:
        """Return the lateness of plans, ``[plans]``; at most 1 for those that tie.

        Args:
            measures: what the search minimises, of each plan.
        """
        lateness = np.asarray(measures / self.limit)
        near = np.flatnonzero(lateness <= 1).tolist()
        near_plans = [plans[i] for i in near]
        self.near.update(near_plans)
        if self.device_limit < np.inf:
            lateness[near] = np.maximum(
                lateness[near], self.device_ms(near_plans) / self.device_limit
            )
        return lateness

    def choose(self, descent: int, ended: Callable[..., bool]) -> Candidate:
        """Return the preferred plan; the fastest one if none is better."""
        self._add({c.assignment: c.iteration_ms for c in self.ranked})
        if self.host_bound:
            self._limit_devices(descent, ended)
        least = min(self.tied, key=lambda plan: (self.fullest(plan), self.tied[plan]))
        self._descend(TiedPlans(self, self._crowding), least, descent, ended)
        least = self._best()
        simple = TiedPlans(self, self._pieces, self.fullest(least))
        self._descend(simple, least, descent, ended)
        self.by_rules = self._table_wise(self._best())
        best = self._fill_caches(self.by_rules)
        if best == self.fastest.assignment:
            return self.fastest
        return Candidate(best, self.tied[best], FOUND_AMONG_TIES)

    def _add(self, measures: Mapping[Assignment, float]) -> None:
        """Take in plans that tie, those with the least memory if they are many."""
        near = [plan for plan, measure in measures.items() if measure <= self.limit]
        for plan in sorted(near, key=self.fullest)[: self.params.pool]:
            self.tied.setdefault(plan, measures[plan])
        self.near.update(near)

    def _limit_devices(self, descent: int, ended: Callable[..., bool]) -> None:
        """Search the plan with the least device time; plans that take much longer do not tie."""
        objective = self.objective

        def rate(plans: Sequence[Assignment]) -> Array:
            near = np.flatnonzero(objective.score(plans) <= self.limit).tolist()
            near_plans = [plans[i] for i in near]
            self.near.update(near_plans)
            rates = np.full(len(plans), np.inf)
            rates[near] = self.device_ms(near_plans)
            return rates

        times = dict(zip(self.tied, self.device_ms([*self.tied]).tolist(), strict=True))
        search = LocalSearch(RatedObjective(self.nominal, rate), self.surrogate, descent)
        search.improve(min(times, key=times.__getitem__), descent, ended)
        times.update(search.visited)
        self.device_limit = min(times.values()) * (1 + self.tolerance)
        near = [plan for plan, ms in times.items() if ms <= self.device_limit]
        self.tied = dict(zip(near, objective.score(near).tolist(), strict=True))

    def _descend(
        self, objective: TiedPlans, start: Assignment, evaluations: int, ended: Callable[..., bool]
    ) -> None:
        """Look for plans that tie and are better by another measure."""
        search = MemorySearch(objective, self.surrogate, seed=evaluations)
        search.improve(start, evaluations, ended)
        reached = [plan for plan, worth in search.visited.items() if worth < LATE]
        measures = self.objective.score(reached).tolist()
        self.tied.update(zip(reached, measures, strict=True))

    def _table_wise(self, plan: Assignment) -> Assignment:
        """Return the plan with all one-shard tables table-wise, if it ties.

        TorchRec stores and reads them the same either way; column-wise they join the exchange of
        tables that are cut.
        """
        options = self.nominal.space.options

        def whole(option: Option) -> Option:
            twins = [o for o in options[option.table] if o.way[1:] == option.way[1:]]
            kinds = {o.sharding_type: o for o in twins}
            return kinds.get(ShardingType.TABLE_WISE, option) if option.num_shards == 1 else option

        whole_tables = tuple((whole(option), ranks) for option, ranks in plan)
        measures = self.objective.score([whole_tables])
        if whole_tables == plan or self.lateness(measures, [whole_tables])[0] > 1:
            return plan
        self.tied[whole_tables] = float(measures[0])
        return whole_tables

    def _fill_caches(self, plan: Assignment) -> Assignment:
        """Return the plan with caches that fill the remaining memory, the largest tables first.

        Memory that no cache takes would lie idle.
        """
        for table in sorted(range(len(plan)), key=lambda t: -sum(plan[t][0].bytes_of[1])):
            option, ranks = plan[table]
            if option.compute_kernel is not ComputeKernel.FUSED_UVM_CACHING:
                continue
            same = (o for o in self.nominal.space.options[table] if o.way[:4] == option.way[:4])
            for larger in sorted(same, key=lambda o: -o.bytes_of[0][0]):
                if larger is option:
                    break
                filled = apply(plan, {table: (larger, ranks)})
                measures = self.objective.score([filled])
                if self.nominal.fits(filled) and self.lateness(measures, [filled])[0] <= 1:
                    plan, self.tied[filled] = filled, float(measures[0])
                    break
        return plan

    def _crowding(self, plan: Assignment, memory: Array) -> float:
        """Return a norm of the memory shares that is large if some rank is full."""
        return float(np.linalg.norm(self.shares(memory), NORM))

    def _pieces(self, plan: Assignment, memory: Array) -> float:
        """Rate a plan by its sharding types, then pieces of tables, then crowding."""
        types, pieces = simplicity(plan)
        return types + (pieces + self._crowding(plan, memory) / 10) / PIECES

    def _best(self) -> Assignment:
        """Return the preferred one of the tied plans."""
        *_, (_, preferred) = self._kept()
        return min(preferred, key=self.tied.__getitem__)

    def _kept(self) -> Iterator[tuple[str, list[Assignment]]]:
        """Yield each rule with the tied plans that remain after it."""
        plans = [*self.tied]
        values = self._values(plans)
        remaining = np.arange(len(plans))
        for rule in RULES:
            least = values[rule][remaining].min() + self.apart[rule]
            remaining = remaining[values[rule][remaining] <= least]
            yield rule, [plans[i] for i in remaining.tolist()]

    def _values(self, plans: Sequence[Assignment]) -> dict[str, Array]:
        """Return the values that the rules compare, ``[plans]`` each."""
        shares = np.array([self.shares(self.nominal.memory(plan)) for plan in plans])
        types, pieces = np.array([simplicity(plan) for plan in plans], dtype=np.float64).T
        spread = shares.max(axis=1) - shares.min(axis=1)
        return dict(zip(RULES, (shares.max(axis=1), types, pieces, spread), strict=True))

    def ties(self, chosen: Candidate) -> TieSummary:
        """Summarise the ties and the rule that decided between the chosen and the fastest plan."""
        pair = [self.by_rules, self.fastest.assignment]
        ways = [[(option.way[:4], ranks) for option, ranks in plan] for plan in pair]
        decided = None
        if ways[0] == ways[1]:  # but for caches, which take what is left over
            pair[0] = chosen.assignment
        elif pair[1] not in self.tied:
            decided = DEVICE_TIME
        else:
            decided = next(
                (rule for rule, remaining in self._kept() if pair[1] not in remaining), None
            )
        shares = np.array([self.fullest(plan) for plan in pair])
        mine, fastest = (shares * self.most_bytes).round().astype(int).tolist()
        return TieSummary(
            plans=len(self.near),
            tolerance=self.tolerance,
            host_bound=self.host_bound,
            device_ms=float(self.device_ms(pair)[0]),
            device_range_ms=self.device_range_ms,
            decided_by=decided,
            fullest_bytes=(mine, fastest),
        )


def simplicity(plan: Assignment) -> tuple[int, int]:
    """Count exchanges, and pieces of tables; a copy on every rank is no piece."""
    copies = ShardingType.DATA_PARALLEL
    exchanges = {(option.module, option.sharding_type) for option, _ in plan}
    return len(exchanges), sum(
        1 if option.sharding_type is copies else option.num_shards for option, _ in plan
    )


class TiedPlans(Objective):
    """Objective that rates plans that tie by their worth, and others by their lateness.

    Args:
        worth: of a plan and its memory ``[hbm or ddr, ranks]``; the least is best.
        fullest: share of a device's memory that no rank may exceed by more than the share
            `SearchParams.alike`.
    """

    def __init__(
        self,
        preference: _Preference,
        worth: Callable[[Assignment, Array], float],
        fullest: float | None = None,
    ) -> None:
        nominal = preference.nominal
        super().__init__(nominal.problem, nominal.space)
        self.preference, self.worth = preference, worth
        if fullest is not None:
            most = (fullest + preference.params.alike) * preference.most_bytes
            self.caps[preference.kind] = np.minimum(self.caps[preference.kind], most)

    def score(self, assignments: Sequence[Assignment]) -> Array:
        """Return the worth of each plan; `LATE` plus lateness if it does not tie."""
        self.evaluations += len(assignments)
        worth = np.array([self.worth(plan, self.memory(plan)) for plan in assignments])
        measures = self.preference.objective.score(assignments)
        lateness = self.preference.lateness(measures, assignments)
        return np.where(lateness <= 1, worth, LATE + lateness)

    def score_neighbours(self, base: Assignment, changes: Sequence[Mapping[int, Choice]]) -> Array:
        """Return the worth of ``base`` with each change; infinite if it is no less.

        The time of a plan that is no better is not predicted.
        """
        now = float(self.score([base])[0])
        memory = self.memory(base)
        plans = [apply(base, change) for change in changes]
        worth = np.array(
            [
                self.worth(plan, self.memory_after(base, memory, change))
                for plan, change in zip(plans, changes, strict=True)
            ]
        )
        scores = np.full(len(plans), np.inf)
        better = np.flatnonzero(worth < now).tolist()
        self.evaluations += len(better) + (len(plans) - len(better)) // UNSCORED
        promising = [changes[i] for i in better]
        measures = self.preference.objective.score_neighbours(base, promising)
        lateness = self.preference.lateness(measures, [plans[i] for i in better])
        scores[better] = np.where(lateness <= 1, worth[better], LATE + lateness)
        return scores


class MemorySearch(LocalSearch):
    """Local search that first changes tables on the fullest rank."""

    def _order(self, base: Assignment) -> list[int]:
        full = int((self.objective.memory(base) / self.objective.caps.clip(1)).max(axis=0).argmax())
        order = self.random.sample(range(len(base)), len(base))
        return sorted(order, key=lambda table: full not in base[table][1])
