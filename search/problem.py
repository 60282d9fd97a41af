"""Input and output of a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from predictor.cost.errors import CostErrors, FactorErrors, known_errors
from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.loads import DrawnLoads, ShardLoads
from predictor.cost.posterior import errors_left
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.perturbed import PerturbedScorer
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.memory.peak import PeakMemory
from predictor.model.memory.ranks import RankMemory, fits, plan_memory
from predictor.model.plan import Shard, ShardingPlan, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import Workload

NOMINAL, MEAN, REGRET = "nominal", "mean", "regret"
AIMS = (NOMINAL, MEAN, REGRET)
ROUNDING = 1e-9
"""Relative tolerance, above the rounding error of a sum that is taken in another order."""


@dataclass(frozen=True)
class PlanInUse:
    """A plan in use that the search starts from.

    Args:
        plan: plan for the problem's model and world size.
        max_moves: tables that may change, >= 0; None for all of them.
        max_bytes: bytes that may move to ranks that do not hold them, >= 0; None for any number.
        horizon: steps over which a move must pay for itself, >= 1; None ignores the cost of moves.
        allows: returns whether the table of a key may change to a sharding, on any ranks; a table
            that may not keep even its own sharding on other ranks stays where it is. None allows
            all.
        held: key -> shards as they lie now, where they differ from the plan's; see `MovePrice`.
    """

    plan: ShardingPlan
    max_moves: int | None = None
    max_bytes: float | None = None
    horizon: int | None = None
    allows: Callable[[str, TablePlan], bool] | None = None
    held: Mapping[str, tuple[Shard, ...]] | None = None

    @property
    def new(self) -> frozenset[str]:
        """Keys of the tables that no rank holds yet."""
        return frozenset(key for key, shards in (self.held or {}).items() if not shards)


@dataclass(frozen=True)
class Scenario:
    """Alternative costs or data under which plans are compared.

    Args:
        weight: > 0; the weights of all scenarios sum to one.
        problem: problem with the same tables and ranks.
    """

    name: str
    weight: float
    problem: Problem


@dataclass(frozen=True)
class Problem:
    """Model with its constraints, ranks with the memory left for shards, costs, plan in use, aim.

    Args:
        in_use: plan in use; the search stays near it if it limits the moves. If it allows none,
            that plan is rated against the bound of all plans.
        aim: one of `AIMS`: the nominal time, the mean over the scenarios, or the largest regret.
        scenarios: scenarios to compare plans under; None draws the errors that the profile states.
        errors: one draw of the costs' errors, applied to every cost; None for none.
        loads: shard loads of a problem that differs only in its errors; None computes them.
        thorough: simulate the peak memory of every plan, even if its shards take little memory.
    """

    workload: Workload
    topology: Topology
    hardware: HardwareProfile
    in_use: PlanInUse | None = field(default=None, repr=False, kw_only=True)
    aim: str = field(default=NOMINAL, kw_only=True)
    scenarios: tuple[Scenario, ...] | None = field(
        default=None, compare=False, repr=False, kw_only=True
    )
    errors: CostErrors | None = field(default=None, compare=False, repr=False, kw_only=True)
    loads: ShardLoads | None = field(default=None, compare=False, repr=False, kw_only=True)
    thorough: bool = field(default=False, compare=False, repr=False, kw_only=True)

    @cached_property
    def scorer(self) -> PlanScorer:
        """Predictor of plans, shared with its shard loads by all users of the problem."""
        inputs = self.workload, self.topology, self.hardware
        if self.errors is None:
            return PlanScorer(*inputs, shards=self.loads)
        loads = DrawnLoads(self.loads or ShardLoads(*inputs), self.errors)
        return PlanScorer(*inputs, FixedCosts(*inputs, self.errors), loads)

    @cached_property
    def peaks(self) -> PeakMemory:
        """Simulator of the memory of plans; ranks that are alike are simulated once."""
        return PeakMemory(self.workload, self.topology, self.hardware.device)

    def memory_of(self, plan: ShardingPlan) -> list[RankMemory]:
        """Return the memory of a plan on every rank: its peak, or the least that its shards add if
        the topology states no limit for a process."""
        if self.topology.limit_bytes:
            return self.peaks.of(plan)
        return plan_memory(self.workload, self.topology, plan, self.hardware.device)

    def fits(self, plan: ShardingPlan) -> bool:
        """Return True if every rank has the memory that the plan needs."""
        return fits(self.memory_of(plan))

    @cached_property
    def _factors(self) -> FactorErrors | None:
        return errors_left(self.workload, self.topology, self.hardware)

    def draw_errors(self, draws: int, seed: int, how: type[CostErrors] = CostErrors) -> CostErrors:
        """Draw from the errors that the profile states, or that remain after learning.

        Args:
            draws: number of draws, even.
            how: `CostErrors`, or `StratifiedErrors` for few draws.
        """
        return how(known_errors(self.hardware, self.topology), draws, seed, self._factors)

    def perturbed(self, scorer: PlanScorer, errors: CostErrors) -> PerturbedScorer:
        """Return a predictor of plans under draws of the costs' errors, on top of the problem's.

        Args:
            scorer: predictor of the problem.
        """
        return PerturbedScorer(scorer, errors)


@dataclass(frozen=True)
class RankedPlan:
    """A plan with its predicted iteration time and the searcher that found it."""

    plan: ShardingPlan
    iteration_ms: float
    found_by: str


@dataclass(frozen=True)
class RatedPlanInUse:
    """The plan in use that a search started from.

    Args:
        iteration_ms: predicted iteration time, even if the plan does not fit.
        misfits: reasons why it cannot stay as it is; empty if it can.
        max_moves: tables that could change; None for all.
        max_bytes: bytes that could move; None for any number.
        horizon: steps over which a move had to pay for itself; None if moves cost nothing.
        held: see `PlanInUse`.
    """

    plan: ShardingPlan
    iteration_ms: float
    misfits: tuple[str, ...]
    max_moves: int | None
    max_bytes: float | None = None
    horizon: int | None = None
    held: Mapping[str, tuple[Shard, ...]] | None = None


@dataclass(frozen=True)
class TieSummary:
    """Plans as good as the best, and the rule that chose one of them.

    Args:
        plans: number of plans within the tolerance, the fastest included.
        tolerance: fraction by which they may be slower than the fastest.
        host_bound: True if the chosen plan's devices alone would be done earlier.
        device_ms: time of the chosen plan's devices alone.
        device_range_ms: least and most device time of the examined plans within the tolerance.
        decided_by: rule by which the chosen plan beats the fastest one: ``device time``,
            ``expected time``, ``memory``, ``sharding types``, ``shards`` or ``balance``; None if it
            is the fastest, or the one with whole tables table-wise.
        fullest_bytes: bytes of shards on the fullest rank, of the chosen plan and of the fastest.
        expected_ms: mean time under the stated errors of the costs, of the same two plans.
    """

    plans: int
    tolerance: float
    host_bound: bool
    device_ms: float
    device_range_ms: tuple[float, float]
    decided_by: str | None
    fullest_bytes: tuple[int, int]
    expected_ms: tuple[float, float]


@dataclass(frozen=True)
class ScenarioTimes:
    """Times of the chosen plan and of the best one in one scenario.

    Args:
        weight: weight of the scenario; all sum to one.
        ours_ms: predicted iteration time of the chosen plan. Where moves from a plan in use have to
            pay for themselves, it includes the cost of the move per step, as ``best_ms`` does.
        best_ms: time of the best plan known in the scenario.
        bound_ms: lower bound on the time in the scenario; 0 where nothing is proven.
    """

    name: str
    weight: float
    ours_ms: float
    best_ms: float
    bound_ms: float = 0.0

    @property
    def regret(self) -> float:
        """Fraction by which the chosen plan is slower than the best one known."""
        return self.ours_ms / self.best_ms - 1

    @property
    def proved_regret(self) -> float:
        """Fraction by which it can be slower than the optimum; infinite if nothing is proven."""
        return self.ours_ms / self.bound_ms - 1 if self.bound_ms > 0 else math.inf


@dataclass(frozen=True)
class Result:
    """Outcome of a search.

    Args:
        plans: the preferred plan, then worse ones by the minimised value; all distinct up to a
            renaming of ranks. Where moves count, the value is the time plus the cost of the move
            per step.
        lower_bound_ms: no plan of the search space is predicted to be faster; 0 where time was up
            before anything was proven.
        stopped_by: ``work`` (the deterministic budget), ``gap``, ``time`` or ``interrupted``.
        baselines: method -> predicted iteration time of its plan.
        baseline_plans: method -> its plan.
        evaluations: plans scored on the full timeline.
        in_use: the plan in use, if the search started from one.
        fastest: the fastest plan found, where another is preferred: one that ties and is better by
            other rules, one that is better over the scenarios, or one whose move pays for itself.
        aim: minimised quantity: the ``nominal`` time, the ``mean`` over the scenarios, or the
            largest ``regret`` in them.
        ties: plans as good as the best, if the search examined them.
        scenarios: times of the best plan in each scenario, in their order.
        passed_over: mean in ms, or one plus the largest regret, of a plan that is better by the aim
            but within the stated errors of the best nominal plan, so that plan was returned
            instead. None if no plan was passed over.
    """

    plans: tuple[RankedPlan, ...]
    lower_bound_ms: float
    stopped_by: str
    baselines: Mapping[str, float]
    baseline_plans: Mapping[str, ShardingPlan]
    search_seconds: float
    evaluations: int
    seed: int
    in_use: RatedPlanInUse | None = None
    fastest: RankedPlan | None = None
    bound_notes: tuple[str, ...] = ()
    aim: str = NOMINAL
    ties: TieSummary | None = None
    scenarios: tuple[ScenarioTimes, ...] = ()
    passed_over: float | None = None

    @property
    def best(self) -> RankedPlan:
        """The best plan by what was minimised, or one that ties and is preferred."""
        return self.plans[0]

    @property
    def gap(self) -> float:
        """Optimality gap of the best plan: ``iteration / bound - 1``, a fraction.

        Infinite where nothing is proven.
        """
        if self.lower_bound_ms <= 0:
            return math.inf
        return self.best.iteration_ms / self.lower_bound_ms - 1

    @property
    def worst_regret(self) -> float | None:
        """Largest regret of the best plan over the scenarios, a fraction; None without any."""
        return max((scenario.regret for scenario in self.scenarios), default=None)

    @property
    def proved_regret(self) -> float | None:
        """Largest regret against the lower bounds; infinite where one is not proven."""
        return max((scenario.proved_regret for scenario in self.scenarios), default=None)


class Progress(Protocol):
    """Callback of a search, given the stage, its progress, the incumbent and the bound."""

    def __call__(
        self, stage: str, fraction: float, best_ms: float | None, bound_ms: float | None
    ) -> None:
        """Report progress; ``fraction`` is the spent part of the work budget, in [0, 1]."""
        ...


def silent(stage: str, fraction: float, best_ms: float | None, bound_ms: float | None) -> None:
    """Ignore progress."""
