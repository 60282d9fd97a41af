"""Tasks with windows of data: plans chosen for the first one or for all, run in every one.

The plans are TorchRec's and our fastest for the first window, and that of the least regret over the
windows. Two more are chosen on a machine that is not the real one, its costs scaled within their
stated errors, as whoever plans on a shipped profile does: the fastest, and that of the least regret
over windows and draws of the errors. All are run in all windows, on the machine as it is. Plans
that are the same up to a renaming of ranks are run once, under both names.

Why: docs/decisions/0030-choosing-among-plans.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from lab.tasks.draw import Task
from lab.tasks.models import draw_windows, lognormal
from lab.tasks.plans import their_plan, without_repeats
from lab.tasks.task_set import TaskSet, task_name
from lab.tasks.windows import in_window
from predictor.cost.errors import known_errors
from predictor.errors import InputError
from predictor.hardware.scaling import scale_group
from predictor.hardware.schema import HardwareProfile
from predictor.model.plan import ShardingPlan
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from search.problem import Problem
from search.scenarios.scenario import (
    Scenario,
    draw_scenarios,
    join_scenarios,
    window_scenarios,
)
from search.solve import solve
from search.stop import Stop

THEIRS, NOMINAL, REGRET = "torchrec", "nominal", "regret"
MISLED, HEDGED = "nominal perturbed", "regret perturbed"
"""Chosen on a perturbed profile, and run in the first window alone."""
JOINT = " = "
"""Between the names of plans that are the same."""

EFFORT = 0.3
"""Of the searches: more finds nothing better in models that are so small."""
MOST = 2.0
"""Stated errors that a perturbed profile is off at most."""


def draw_drifting_task(seed: int, task_set: TaskSet) -> Task:
    """The model and plans of a seed.

    Args:
        task_set: whose calibration our plans are searched on.

    Raises:
        InputError: the seed is negative, or TorchRec's planner finds no plan.
    """
    if seed < 0:
        raise InputError(f"a task's seed is {seed}; it must be at least 0")
    first, *later = draw_windows(seed)
    ranks, hardware = task_set.ranks, task_set.made.profile
    problem = Problem(first, ranks, hardware)
    guessed = Problem(first, ranks, perturbed(hardware, ranks, seed))
    chosen = {
        THEIRS: their_plan(first, ranks, seed),
        NOMINAL: _search(problem),
        REGRET: _search(problem, join_scenarios(_windows(problem, later))),
        MISLED: _search(guessed),
        HEDGED: _search(guessed, join_scenarios(_windows(guessed, later), draw_scenarios(guessed))),
    }
    plans = {
        in_window(JOINT.join(names), number): plan
        for number in range(1, 2 + len(later))
        for names, plan in without_repeats(chosen, first).items()
    }
    return Task(seed, task_name(seed), first, plans, windows=tuple(later))


def perturbed(hardware: HardwareProfile, ranks: Topology, seed: int) -> HardwareProfile:
    """The profile with the times of every group off by a draw of its stated error."""
    rng = random.Random(f"shardopt perturbed {seed}")
    for group, size in known_errors(hardware, ranks).items():
        factor = lognormal(rng, 1.0, size.shared)
        most = math.exp(MOST * size.shared)
        hardware = scale_group(hardware, group, min(max(factor, 1 / most), most))
    return hardware


def _search(problem: Problem, scenarios: Sequence[Scenario] = ()) -> ShardingPlan:
    """The fastest plan as given, or that of the least regret over some scenarios."""
    how = {"aim": REGRET, "scenarios": scenarios} if scenarios else {"aim": NOMINAL}
    return solve(problem, Stop(effort=EFFORT), seed=0, **how).best.plan


def _windows(problem: Problem, later: Sequence[Workload]) -> list[Scenario]:
    windows = enumerate((problem.workload, *later), start=1)
    return window_scenarios(problem, {f"window {at}": workload for at, workload in windows})
