"""Choice among plans that the predictor cannot tell apart: the one a practitioner would ship.

A plan ties if its predicted time is within the tolerance of the least, and its expected time, the
mean over draws of the stated errors of the costs, within the tolerance of the least expected time.
The second rules out plans that launch twice as much, which are fast only if the host is as fast as
predicted. Where the host sets the pace, thousands of plans tie; then the time of the devices alone
must be within the tolerance, too.

Rules choose among plans that tie, in this order: least memory on the fullest GPU, fewest sharding
types, fewest pieces of tables, smallest difference between the fullest and the emptiest GPU. Each
rule keeps the plans that are about equally good, and the next rule chooses among those. The search
for speed finds few plans with little memory, so annealing looks for more: first with less memory,
then with fewer sharding types.

Why: docs/decisions/0030-choosing-among-plans.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from predictor.cost.errors import OVERHEADS, GivenErrors, StratifiedErrors
from predictor.model.plan import ComputeKernel, ShardingType
from search.candidate import Candidate, signature
from search.improve.annealing import Annealer, AnnealingTask
from search.improve.merges import ExchangeMerges
from search.objective import Assignment, Objective, Rate, apply
from search.params import SearchParams
from search.problem import ROUNDING, TieSummary
from search.space.option import Option
from search.surrogate import Surrogate

Array = NDArray[np.float64]

TOLERANCE = SearchParams.tie
"""Tolerance of a tie, as a fraction; a gain must exceed it too."""
NO_TIME = 1e-6
"""Factor on the host's times after which only the time of the devices counts."""
MEMORY_TARGETS = (0.0, 0.25, 0.5, 0.75)
"""Memory targets for the fullest GPU, in the order in which annealing tries them: 0 is the least
that the tables can take, 1 is the memory of the leanest known plan."""
STARTS = 3
"""Number of plans from which annealing looks for the least device time."""
FOUND_AMONG_TIES = "chosen among ties"
DEVICE_TIME, EXPECTED_TIME = "device time", "expected time"
DRAWS, DRAWS_SEED = 16, 2
"""Draws of the costs' errors by which plans are compared; gains and scenarios use other seeds."""
RULES = ("memory", "sharding types", "shards", "balance")


def no_host() -> GivenErrors:
    """Return the errors that leave the time of the devices alone."""
    return GivenErrors({OVERHEADS: NO_TIME})


def prefer(
    objective: Objective,
    surrogate: Surrogate,
    rate: Rate,
    ranked: Sequence[Candidate],
    limit: float,
    tolerance: float,
    params: SearchParams,
    moves: int = 0,
    ended: Callable[..., bool] = lambda *_: False,
) -> tuple[list[Candidate], TieSummary]:
    """Return the preferred plan followed by all plans that are not faster, and the ties' summary.

    Args:
        rate: measure that the search minimises.
        ranked: plans, best first; their ``iteration_ms`` holds that measure.
        limit: measure above which no plan ties.
        tolerance: fraction by which the expected time of a plan that ties may exceed the least one,
            and the devices' time theirs where the host sets the pace.
        moves: annealing proposals for each plan that is looked for; 0 if the measure is not a time.
        ended: returns True once the time for that is up.
    """
    ties = Ties(objective, surrogate, rate, ranked, limit, tolerance, params)
    chosen = ties.choose(moves, ended)
    name = signature(chosen.assignment)
    worse = [c for c in ranked if c.iteration_ms >= chosen.iteration_ms]
    rest = [c for c in worse if signature(c.assignment) != name]
    return [chosen, *rest], ties.summary(chosen)


class TieRules:
    """The rules by which plans that tie are compared.

    Attributes:
        kind: memory that is scarce: 0 for HBM, 1 for host memory.
        apart: rule -> largest difference between plans that count as alike.
    """

    def __init__(self, objective: Objective, params: SearchParams) -> None:
        self.objective = objective
        self.kind = objective.kind
        self.most_bytes = max(1.0, float(objective.caps[self.kind].max()))
        self.apart = dict(zip(RULES, (params.alike, 0.0, 0.0, params.alike), strict=True))

    def shares(self, plan: Assignment) -> Array:
        """Return the fraction of a device's memory in use on each rank, ``[ranks]``."""
        return np.asarray(self.objective.memory(plan)[self.kind] / self.most_bytes)

    def fullest(self, plan: Assignment) -> float:
        """Return the fraction of a device's memory in use on the fullest rank."""
        return float(self.shares(plan).max())

    def within(self, share: float) -> LeanObjective:
        """Return the objective of plans that need at most this share of a device's memory."""
        return LeanObjective(self.objective, self.kind, share * self.most_bytes)

    def best(self, measures: Mapping[Assignment, float]) -> Assignment:
        """Return the preferred plan of those that tie: the fastest that all rules keep."""
        *_, (_, preferred) = self.kept([*measures])
        return min(preferred, key=measures.__getitem__)

    def kept(self, plans: Sequence[Assignment]) -> Iterator[tuple[str, list[Assignment]]]:
        """Yield each rule with the plans that remain after it."""
        shares = np.array([self.shares(plan) for plan in plans])
        types, pieces = np.array([simplicity(plan) for plan in plans], dtype=np.float64).T
        spread = shares.max(axis=1) - shares.min(axis=1)
        remaining = np.arange(len(plans))
        columns = (shares.max(axis=1), types, pieces, spread)
        for rule, values in zip(RULES, columns, strict=True):
            least = values[remaining].min() + self.apart[rule]
            remaining = remaining[values[remaining] <= least]
            yield rule, [plans[i] for i in remaining.tolist()]


class Ties:
    """Plans that tie with the fastest one; annealing looks for more of them.

    Attributes:
        tied: plan that ties -> measure that the search minimises.
        by_rules: plan that the rules prefer, before its caches grow into the memory left over.
        near: plans within the limit of the measure; some do not tie by the other two times.
        device_range_ms: least and most time of the devices alone, over the plans examined.
        device_limit: longest time of the devices alone that ties, in ms.
        expected_limit: longest expected time that ties, in ms.
    """

    def __init__(
        self,
        objective: Objective,
        surrogate: Surrogate,
        rate: Rate,
        ranked: Sequence[Candidate],
        limit: float,
        tolerance: float,
        params: SearchParams,
    ) -> None:
        self.objective, self.surrogate, self.rate = objective, surrogate, rate
        self.fastest, self.params = ranked[0], params
        self.limit, self.tolerance = limit, tolerance
        tables, ranks = len(objective.space.options), objective.problem.topology.world_size
        self.part = params.part_of(tables, ranks)
        self.merges = ExchangeMerges(objective, surrogate)
        self.rules = TieRules(objective, params)
        self.alone = objective.under(no_host())
        draws = objective.problem.draw_errors(DRAWS, DRAWS_SEED, StratifiedErrors)
        self.drawn = objective.under(draws)
        start = self.fastest.assignment
        self.device_range_ms = np.inf, 0.0
        self.device_limit = self.expected_limit = np.inf
        self.host_bound = bool(
            self.device_ms([start])[0] < objective.score([start])[0] * (1 - params.tie)
        )
        self.by_rules = start
        known = {c.assignment: c.iteration_ms for c in ranked if c.iteration_ms <= limit}
        self.near = {start, *known}
        self.tied = {start: self.fastest.iteration_ms}
        leanest = sorted(known, key=self.rules.fullest)[: params.pool]
        self.tied |= {plan: known[plan] for plan in leanest}

    def device_ms(self, plans: Sequence[Assignment]) -> Array:
        """Return the time of the devices alone for plans within the limit, ``[plans]``."""
        if not plans:
            return np.zeros(0)
        times = self.alone(plans)[:, 0]
        low, high = self.device_range_ms
        self.device_range_ms = min(low, float(times.min())), max(high, float(times.max()))
        return times

    def choose(self, moves: int, ended: Callable[..., bool]) -> Candidate:
        """Return the preferred plan; the fastest one if none is better."""
        if self.host_bound:
            self._limit_devices(moves, ended)
        self._drop_slower()
        if moves:
            self._with_less_memory(moves, ended)
            self._with_fewer_types(moves, ended)
            self._with_fewer_pieces(ended)
        self.by_rules = self._table_wise(self.rules.best(self.tied))
        best = self._fill_caches(self.by_rules)
        if best == self.fastest.assignment:
            return self.fastest
        return Candidate(best, self.tied[best], FOUND_AMONG_TIES)

    def expected_ms(self, plans: Sequence[Assignment]) -> Array:
        """Return the mean time under the stated errors of the costs, ``[plans]``."""
        return np.asarray(self.drawn(plans).mean(axis=1))

    def _add(self, plans: Sequence[Assignment]) -> bool:
        """Add the plans that tie; return True if any does."""
        if not plans:
            return False
        measures = zip(plans, self.rate(plans).tolist(), strict=True)
        near = {plan: ms for plan, ms in measures if ms <= self.limit}
        self.near.update(near)
        late = np.zeros(len(near), dtype=np.bool_)
        if self.device_limit < np.inf:
            late = self.device_ms([*near]) > self.device_limit
        if self.expected_limit < np.inf and near:
            late |= self.expected_ms([*near]) > self.expected_limit
        tied = {p: ms for (p, ms), slow in zip(near.items(), late, strict=True) if not slow}
        self.tied |= tied
        return bool(tied)

    def _anneal(
        self,
        objective: Objective,
        start: Assignment,
        options: Sequence[Sequence[Option]],
        moves: int,
        ended: Callable[..., bool],
    ) -> list[Assignment]:
        """Return plans that fit and are fast by an objective."""
        rounds = round(self.part * self.params.rounds)
        if not rounds:
            return []
        task = AnnealingTask(start, options, moves, rounds, moves)
        same = objective.scorer is self.objective.scorer
        surrogate = self.surrogate if same else Surrogate(objective)
        annealer = Annealer(objective, surrogate, self.params)
        return [plan for plan, _ in annealer.improve(task, ended)]

    def _limit_devices(self, moves: int, ended: Callable[..., bool]) -> None:
        """Look for the least device time; plans whose devices take much longer do not tie.

        Annealing keeps the exchanges of its start, so it also starts from variants of the fastest
        plan in which one exchange is merged into another.
        """
        if moves:
            start, problem = self.fastest.assignment, self.objective.problem
            devices = Objective(replace(problem, errors=no_host()), self.objective.space)
            merged = [p for p in self.merges.whole(start) if self.objective.fits(p)]
            self._add(merged)
            starts = [start, *(p for p in merged if p in self.tied)]
            order = np.argsort(self.device_ms(starts), kind="stable")[:STARTS]
            for i in order.tolist():
                options = self.objective.space.options
                self._add(self._anneal(devices, starts[i], options, moves, ended))
        times = dict(zip(self.tied, self.device_ms([*self.tied]).tolist(), strict=True))
        self.device_limit = min(times.values()) * (1 + self.tolerance)
        self.tied = {p: ms for p, ms in self.tied.items() if times[p] <= self.device_limit}

    def _drop_slower(self) -> None:
        """Drop plans whose expected time exceeds the least one by more than the tolerance."""
        expected = self.expected_ms([*self.tied])
        self.expected_limit = float(expected.min()) * (1 + self.tolerance)
        pairs = zip(self.tied.items(), expected.tolist(), strict=True)
        self.tied = {plan: ms for (plan, ms), mean in pairs if mean <= self.expected_limit}

    def _with_less_memory(self, moves: int, ended: Callable[..., bool]) -> None:
        """Look for plans with less memory on the fullest rank, smallest target first; then for the
        fastest plan with about as little memory."""
        rules, options = self.rules, self.objective.space.options
        start = min(self.tied, key=lambda plan: (rules.fullest(plan), self.tied[plan]))
        least_bytes = sum(min(sum(o.bytes_of[rules.kind]) for o in table) for table in options)
        ranks = self.objective.problem.topology.world_size
        least, most = least_bytes / ranks / rules.most_bytes, rules.fullest(start)
        for part in MEMORY_TARGETS:
            share = least + part * (most - least) + rules.apart["memory"] / 2
            if share > most - rules.apart["memory"] or ended():
                return  # so small a difference decides nothing
            reached = self._anneal(rules.within(share), start, options, moves, ended)
            if self._add(reached):
                self._add(self._anneal(self._lean(), reached[0], options, moves, ended))
                return

    def _with_fewer_types(self, moves: int, ended: Callable[..., bool]) -> None:
        """Look for plans that tie with one exchange less and no more memory, until there is
        none."""
        options = self.objective.space.options
        while not ended():
            plan = self.rules.best(self.tied)
            count, _ = simplicity(plan)
            merged = [p for p in self.merges.whole(plan) if simplicity(p)[0] < count]
            if not merged:
                return
            start = merged[int(self.rate(merged).argmin())]
            left = {option.exchange for option, _ in start}
            fewer = [[o for o in table if o.exchange in left] for table in options]
            self._add(self._anneal(self._lean(), start, fewer, moves, ended))
            if simplicity(self.rules.best(self.tied))[0] >= count:
                return

    def _with_fewer_pieces(self, ended: Callable[..., bool]) -> None:
        """Split tables into fewer pieces, those with most pieces first, where the plan still ties
        and needs no more memory."""
        plan = self.rules.best(self.tied)
        lean, exchanges = self._lean(), {option.exchange for option, _ in plan}
        split = [table for table in range(len(plan)) if plan[table][0].pieces > 1]
        split.sort(key=lambda table: -plan[table][0].pieces)
        for table in split[: round(self.part * self.params.pool)]:
            loads, used = self.surrogate.standing_without(plan, [table])
            coarser = []
            for option in self.objective.space.options[table]:
                if option.pieces < plan[table][0].pieces and option.exchange in exchanges:
                    ranks = self.merges.placer.best_ranks(option, loads, used)
                    other = None if ranks is None else apply(plan, {table: (option, ranks)})
                    coarser += [other] if other is not None and lean.fits(other) else []
            if ended():
                return
            if self._add(coarser):
                plan = min(filter(self.tied.__contains__, coarser), key=simplicity)

    def _lean(self) -> LeanObjective:
        """Return the objective of plans that need no more memory than the preferred plan may."""
        least = min(map(self.rules.fullest, self.tied))
        return self.rules.within(least + self.rules.apart["memory"])

    def _table_wise(self, plan: Assignment) -> Assignment:
        """Return the plan with all one-shard tables table-wise, if it ties.

        TorchRec stores and reads a one-shard table the same way under both types, but a column-wise
        one takes part in the exchange of tables that are cut.
        """
        options = self.objective.space.options

        def whole(option: Option) -> Option:
            twins = [o for o in options[option.table] if o.way[1:] == option.way[1:]]
            kinds = {o.sharding_type: o for o in twins}
            return kinds.get(ShardingType.TABLE_WISE, option) if option.num_shards == 1 else option

        whole_tables = tuple((whole(option), ranks) for option, ranks in plan)
        return whole_tables if self._add([whole_tables]) else plan

    def _fill_caches(self, plan: Assignment) -> Assignment:
        """Return the plan with caches that fill the remaining memory, the largest tables first.

        Memory that no cache takes would lie idle.
        """
        for table in sorted(range(len(plan)), key=lambda t: -sum(plan[t][0].bytes_of[1])):
            option, ranks = plan[table]
            if option.compute_kernel is not ComputeKernel.FUSED_UVM_CACHING:
                continue
            same = (o for o in self.objective.space.options[table] if o.way[:4] == option.way[:4])
            for larger in sorted(same, key=lambda o: -o.bytes_of[0][0]):
                if larger is option:
                    break
                filled = apply(plan, {table: (larger, ranks)})
                if self.objective.fits(filled) and self._add([filled]):
                    plan = filled
                    break
        return plan

    def summary(self, chosen: Candidate) -> TieSummary:
        """Summarise the ties and the rule that decided between the chosen and the fastest plan."""
        best, fastest = self.by_rules, self.fastest.assignment
        expected = self.expected_ms([best, fastest]).tolist()
        ways = [[(option.way[:4], ranks) for option, ranks in plan] for plan in (best, fastest)]
        if ways[0] == ways[1]:  # except for caches, which grow into the memory left over
            best, decided = chosen.assignment, None
        elif self.tied[best] * (1 + ROUNDING) < self.fastest.iteration_ms:
            decided = None  # annealing among ties found a faster plan
        else:
            kept = self.rules.kept([*dict.fromkeys([*self.tied, fastest])])
            decided = next((rule for rule, remaining in kept if fastest not in remaining), None)
            if fastest not in self.tied:
                if self.device_ms([fastest])[0] > self.device_limit:
                    decided = DEVICE_TIME
                elif expected[0] < expected[1]:
                    decided = EXPECTED_TIME
        shares = np.array([self.rules.fullest(plan) for plan in (best, fastest)])
        least, most = (shares * self.rules.most_bytes).round().astype(int).tolist()
        return TieSummary(
            plans=len(self.near),
            tolerance=self.tolerance,
            host_bound=self.host_bound,
            device_ms=float(self.device_ms([best])[0]),
            device_range_ms=self.device_range_ms,
            decided_by=decided,
            fullest_bytes=(least, most),
            expected_ms=(expected[0], expected[1]),
        )


def simplicity(plan: Assignment) -> tuple[int, int]:
    """Count the exchanges and the pieces of tables of a plan."""
    return len({option.exchange for option, _ in plan}), sum(option.pieces for option, _ in plan)


class LeanObjective(Objective):
    """Objective that admits only plans whose shards take at most ``most_bytes`` of each rank.

    Args:
        kind: memory that is limited: 0 for HBM, 1 for host memory.
    """

    def __init__(self, base: Objective, kind: int, most_bytes: float) -> None:
        vars(self).update(vars(base))
        self.caps = base.caps.copy()
        self.caps[kind] = np.minimum(self.caps[kind], most_bytes)

    def beside(self, assignment: Assignment) -> Objective:
        """Return the objective itself: its limit is one on shards, not on a peak."""
        return self

    def fits(self, assignment: Assignment) -> bool:
        """Return True if the plan also takes no more than the limit."""
        return bool((self.memory(assignment) <= self.caps).all()) and super().fits(assignment)
