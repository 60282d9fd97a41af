"""Expected gain of a plan over a baseline under the errors that its costs may have.

A search balances the ranks by the predicted costs, so every error of a cost makes some rank of the
chosen plan the slowest one; a baseline that was not balanced by these costs has no such loss. The
predicted gain is therefore too high even where every cost is right in the mean: the optimizer's
curse (Smith and Winkler 2006). It is priced by a parametric bootstrap (Efron and Tibshirani 1993):
the gain is computed again under draws of all costs, and its mean and spread are what `plan` prints.

How much the choice of a plan matters: sane plans compared, with what errors could hide.

Sane plans are those that a search returns and those of other methods, but for a random one. Where
none of them is worse than the best one by more than the known errors of the costs could hide,
time is better spent on something else than on sharding.

Why: docs/decisions/0030-choosing-among-plans.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from predictor.cost.errors import Z_90
from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import match_plan
from search.baselines.starting_plans import TORCHREC
from search.prefer import TOLERANCE
from search.problem import Problem, Result

INSANE = ("random",)
"""Baselines that nobody would run."""
NOTHING = 0.01
"""Share of the iteration below which a difference is none, however sure."""
LITTLE = 0.05
"""Share above which a difference is one, even if errors could hide it."""


@dataclass(frozen=True)
class Stakes:
    """Stakes in the choice of a plan.

    Args:
        plans: sane ones that were compared, the best one among them.
        spread: by which share the slowest of them is predicted to be slower than the best one.
        matters: False where each is slower by nothing, or by little that errors could hide.
    """

    plans: int
    spread: float
    matters: bool


def stakes(problem: Problem, result: Result) -> Stakes | None:
    """Compares the sane plans of a search; None if there is only one."""
    ms_of = result.baselines
    of_others = [(p, ms_of[n]) for n, p in result.baseline_plans.items() if n not in INSANE]
    found = [(ranked.plan, ranked.iteration_ms) for ranked in result.plans]
    best, rivals, slower = result.best.plan, list[ShardingPlan](), list[float]()
    for plan, ms in [*found, *of_others]:
        if all(plan.tables != other.tables for other in (best, *rivals)):
            rivals.append(plan)
            slower.append(ms)
    if not rivals:
        return None
    spread = max(slower) / result.best.iteration_ms - 1
    if spread > 2 * LITTLE:
        return Stakes(1 + len(rivals), spread, matters=True)
    _, times = drawn_times(problem, [best, *rivals])
    gains = 1 - times[0] / times[1:]
    mean, width = gains.mean(axis=1), Z_90 * gains.std(axis=1, ddof=1)
    alike = (mean <= NOTHING) | ((mean <= LITTLE) & (mean <= width))
    return Stakes(1 + len(rivals), spread, matters=not bool(alike.all()))


Array = NDArray[np.float64]

PLAN_ERROR = 0.05
"""1-sigma error of the ratio of two plans on ranks that compute on the host, beside that of their
costs: what waiting for ranks whose steps vary takes, and all else that no part of a cost is. By
the chosen plans of 19 tasks, learned from one trace of TorchRec's (`configs/bench/confirmed`):
there 90 % intervals hold 17 gains, with 0.07 all. Of GPUs no such rows are public."""
DRAWS = 128
GAIN_SEED = 1
"""Seed of the draws; a search that chooses by draws uses others."""


@dataclass(frozen=True)
class ExpectedGain:
    """Share of a baseline's iteration time that a plan is expected to save.

    Args:
        baseline: whose plan it is compared with.
        mean: over the draws.
        interval: 90 %, ``(low, high)``.
        nominal: where every cost is as predicted.
        draws: of the errors.
    """

    baseline: str
    mean: float
    interval: tuple[float, float]
    nominal: float
    draws: int

    @property
    def verdict(self) -> Literal["use", "measure", "keep"]:
        """Verdict on the plan: use it where the whole interval is above `TOLERANCE`; the
        baseline's where the plan is not predicted to be faster by as much; else a measurement
        tells."""
        if self.interval[0] > TOLERANCE:
            return "use"
        return "measure" if self.nominal > TOLERANCE else "keep"


def expected_gain(
    problem: Problem,
    plan: ShardingPlan,
    baseline: ShardingPlan,
    name: str,
    *,
    draws: int = DRAWS,
    seed: int = GAIN_SEED,
) -> ExpectedGain:
    """The gain of a plan over a baseline's under the errors that the profile states.

    Args:
        plan, baseline: both cover the problem's tables and ranks.
        name: of the baseline.
        draws: even; 2 or more.
        seed: of the draws, >= 0.

    Raises:
        PlanError: a plan does not cover the workload's tables or the topology's ranks.
    """
    (ours, theirs), times = drawn_times(problem, (plan, baseline), draws=draws, seed=seed)
    ratio = times[0] / times[1]
    if problem.hardware.inline and plan.tables != baseline.tables:
        own = np.random.default_rng([seed, crc32(b"plan")]).standard_normal(draws // 2)
        ratio = ratio * np.exp(PLAN_ERROR * np.concatenate((own, -own)))
    drawn = 1 - ratio
    mean, width = float(drawn.mean()), Z_90 * float(drawn.std(ddof=1))
    interval = mean - width, mean + width
    return ExpectedGain(name, mean, interval, float(1 - ours / theirs), draws)


def drawn_times(
    problem: Problem,
    plans: Sequence[ShardingPlan],
    *,
    draws: int = DRAWS,
    seed: int = GAIN_SEED,
) -> tuple[Array, Array]:
    """Iteration times in ms as predicted ``[plans]``, and under the same draws of the costs'
    errors ``[plans, draws]``.

    Raises:
        PlanError: a plan does not cover the workload's tables or the topology's ranks.
    """
    scorer = problem.scorer
    all_tables = [match_plan(problem.workload, problem.topology, plan) for plan in plans]
    numbers = np.array(
        [[scorer.number(i, t) for i, t in enumerate(tables)] for tables in all_tables]
    )
    times = problem.perturbed(scorer, problem.draw_errors(draws, seed)).score_numbered(numbers)
    return scorer.score_numbered(numbers), times


def gain_over_baseline(
    problem: Problem, result: Result, name: str = TORCHREC
) -> ExpectedGain | None:
    """The expected gain of a search's best plan over one of its baselines.

    Returns:
        None where the baseline has no plan that fits.
    """
    baseline = result.baseline_plans.get(name)
    return None if baseline is None else expected_gain(problem, result.best.plan, baseline, name)
