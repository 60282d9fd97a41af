"""What a search takes and what it returns."""

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


@dataclass(frozen=True)
class PlanInUse:
    """A plan in use that the search starts from.

    Args:
        plan: fits the problem's model and world size.
        max_moves: tables that may change, >= 0; None for all of them.
        max_bytes: that may reach ranks which do not hold them, >= 0; None for any number.
        horizon: steps over which a move must pay for itself, >= 1; None counts no moves.
        allows: whether the table of a key may change to a sharding, on whatever ranks; a table
            that may not even keep its own elsewhere stays where it is. None: to any.
        held: key -> shards as they lie now, where these are not the plan's; see `MovePrice`.
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
    """One thing that could be true.

    Args:
        weight: > 0; those of all scenarios sum to one.
        problem: with the tables and ranks of the problem as given.
    """

    name: str
    weight: float
    problem: Problem


@dataclass(frozen=True)
class Problem:
    """What to plan: the model with its constraints, the ranks with the memory left for shards, the
    costs, the plan in use, and what the new one is to be good at.

    Args:
        in_use: a plan in use, near which the search stays if it limits the moves. If it allows
            none, that plan is rated against the bound of all plans.
        aim: one of `AIMS`: the nominal time, the mean over the scenarios, or the largest regret.
        scenarios: what else could be true; None for draws of the errors that the profile states.
        errors: one draw of the costs' errors, which every cost then has; None for none.
        loads: those of the shards of another problem that has the same but for the errors; None to
            compute them.
        thorough: the peak of every plan is simulated, also where its shards take little of the
            memory.
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
        """What predicts plans; all that the problem is asked shares it, and so its loads."""
        inputs = self.workload, self.topology, self.hardware
        if self.errors is None:
            return PlanScorer(*inputs, shards=self.loads)
        loads = DrawnLoads(self.loads or ShardLoads(*inputs), self.errors)
        return PlanScorer(*inputs, FixedCosts(*inputs, self.errors), loads)

    @cached_property
    def peaks(self) -> PeakMemory:
        """What simulates the memory of plans; those of like ranks are simulated once."""
        return PeakMemory(self.workload, self.topology, self.hardware.device)

    def memory_of(self, plan: ShardingPlan) -> list[RankMemory]:
        """What a plan needs on every rank: at its peak, or, where the topology does not say what a
        process may take, what its shards add at least."""
        if self.topology.limit_bytes:
            return self.peaks.of(plan)
        return plan_memory(self.workload, self.topology, plan, self.hardware.device)

    def fits(self, plan: ShardingPlan) -> bool:
        """Every rank has what the plan needs: the one notion of what fits."""
        return fits(self.memory_of(plan))

    @cached_property
    def _factors(self) -> FactorErrors | None:
        return errors_left(self.workload, self.topology, self.hardware)

    def draw_errors(self, draws: int, seed: int, how: type[CostErrors] = CostErrors) -> CostErrors:
        """Draws of the errors that the profile states, or has left after learning.

        Args:
            draws: even.
            how: `CostErrors`, or `StratifiedErrors` for few draws.
        """
        return how(known_errors(self.hardware, self.topology), draws, seed, self._factors)

    def perturbed(self, scorer: PlanScorer, errors: CostErrors) -> PerturbedScorer:
        """What predicts plans under draws of the costs' errors, on top of those of the problem.

        Args:
            scorer: of the problem.
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
        iteration_ms: predicted, whether it fits or not.
        misfits: why it cannot stay as it is; empty if it can.
        max_moves: tables that could change; None for all.
        max_bytes: that could move; None for any number.
        horizon: steps over which a move had to pay for itself; None where moves counted nothing.
        held: as of `PlanInUse`.
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
    """Plans that were found to be as good as the best, and how one of them was chosen.

    Args:
        plans: how many are within the tolerance, the fastest among them.
        tolerance: by which share they may be slower than the fastest.
        host_bound: the host sets the pace: the chosen plan's devices alone would be done earlier.
        device_ms: what the chosen plan's devices take alone.
        device_range_ms: least and most of the plans within the tolerance that were looked at.
        decided_by: ``device time``, ``memory``, ``sharding types``, ``shards`` or ``balance``: by
            which the chosen plan is better than the fastest one; None where it is the fastest, or
            that with whole tables table-wise.
        fullest_bytes: what shards take on the fullest rank, under the chosen plan and under the
            fastest one.
    """

    plans: int
    tolerance: float
    host_bound: bool
    device_ms: float
    device_range_ms: tuple[float, float]
    decided_by: str | None
    fullest_bytes: tuple[int, int]


@dataclass(frozen=True)
class ScenarioTimes:
    """How the chosen plan does in one scenario.

    Args:
        weight: of the scenario; all sum to one.
        ours_ms: predicted iteration time of the chosen plan. Where moves from a plan in use have to
            pay for themselves, with its share of the move, as the next has.
        best_ms: of the best plan known there.
        bound_ms: no plan of the space is predicted to be faster there; 0 where nothing is proven.
    """

    name: str
    weight: float
    ours_ms: float
    best_ms: float
    bound_ms: float = 0.0

    @property
    def regret(self) -> float:
        """By which share the chosen plan is slower than the best one known."""
        return self.ours_ms / self.best_ms - 1

    @property
    def proved_regret(self) -> float:
        """By which share it can be slower than the best plan there is; infinite if not proven."""
        return self.ours_ms / self.bound_ms - 1 if self.bound_ms > 0 else math.inf


@dataclass(frozen=True)
class Result:
    """Outcome of a search.

    Args:
        plans: the preferred one, then worse ones by what the search minimises; no two are the same
            up to a renaming of ranks. Where moves count, by their time and their share of the move.
        lower_bound_ms: no plan of the search space is predicted to be faster; 0 where time was up
            before anything was proven.
        stopped_by: ``work`` (the deterministic budget), ``gap``, ``time`` or ``interrupted``.
        baselines: name -> predicted iteration time of the plan that other methods give.
        baseline_plans: the plans themselves.
        evaluations: plans scored on the full timeline.
        in_use: the plan in use, if the search started from one.
        fastest: the fastest plan found, where another is preferred: one that ties and is better by
            other rules, one that is better over the scenarios, or one whose move pays for itself.
        aim: what was minimised: the ``nominal`` time, the ``mean`` over the scenarios, or the
            largest ``regret`` in them.
        ties: plans as good as the best, where the search looked at them.
        scenarios: how the best plan does in each, in their order.
        passed_over: what was minimised, of a plan that is better by it, but that the stated errors
            cannot tell from the best plan, which is the one of the nominal aim; a mean in ms, or
            one plus the largest regret. None where no such plan was passed over.
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
        """How far the best plan can be from optimal: ``iteration / bound - 1``, a fraction.

        Infinite where nothing is proven.
        """
        if self.lower_bound_ms <= 0:
            return math.inf
        return self.best.iteration_ms / self.lower_bound_ms - 1

    @property
    def worst_regret(self) -> float | None:
        """By which share the best plan is slower than the best one known of any scenario, at most;
        None without scenarios."""
        return max((one.regret for one in self.scenarios), default=None)

    @property
    def proved_regret(self) -> float | None:
        """The same compared with the bounds; infinite where one is not proven."""
        return max((one.proved_regret for one in self.scenarios), default=None)


class Progress(Protocol):
    """Called while searching, with what is being done and what is known so far."""

    def __call__(
        self, stage: str, fraction: float, best_ms: float | None, bound_ms: float | None
    ) -> None:
        """``fraction`` of the work budget that is spent, in [0, 1]."""
        ...


def silent(stage: str, fraction: float, best_ms: float | None, bound_ms: float | None) -> None:
    """A `Progress` that shows nothing."""
