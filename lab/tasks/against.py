"""Tasks: a random model with TorchRec's plan and ours, run side by side.

Both planners get the same model, with its real pooling factors, and the same memory. TorchRec's
runs with its defaults. Ours runs twice: on the calibration of the task set, which contains no
measured iteration, and on the shipped profile, as for an uncalibrated user. Random plans run beside
them, to separate the optimizer's curse from other errors.

Why: docs/decisions/0024-gains.md.
"""

from __future__ import annotations

from lab.tasks.models import draw_model
from lab.tasks.plans import random_plans, signature
from lab.tasks.task_set import BASE, TaskSet
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.plan import ShardingPlan
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from search.problem import Problem
from search.solve import solve
from search.stop import Stop

THEIRS, OURS, SHIPPED = "torchrec", "shardopt", "shardopt_shipped_profile"
"""Names of the chosen plans in the rows file; the last is left out if it equals another up to a
renaming of ranks."""


Task = tuple[Workload, dict[str, ShardingPlan]]
"""Model, and its plans by name, which run side by side; the first is the baseline."""


def draw_task(seed: int, task_set: TaskSet, models: str, count: int) -> Task:
    """Draw the model of a task, and its plans: TorchRec's first, then ours and random ones.

    Args:
        task_set: task set whose calibration our plan is searched on.
        count: number of random plans.

    Raises:
        InputError: TorchRec's planner finds no plan.
    """
    ranks = task_set.ranks
    workload = draw_model(models, seed)
    theirs = _their_plan(workload, ranks, seed)
    plans = {THEIRS: theirs, OURS: _search(workload, ranks, task_set.calibration.profile)}
    shipped = _search(workload, ranks, load_hardware(BASE))
    signatures = {signature(plan, workload) for plan in plans.values()}
    if signature(shipped, workload) not in signatures:
        plans[SHIPPED] = shipped
    # random plans must not depend on the plans that the profiles choose
    return workload, plans | random_plans(seed, workload, ranks, count, [theirs])


def _search(workload: Workload, ranks: Topology, hardware: HardwareProfile) -> ShardingPlan:
    """Return the plan of `shardopt plan` with its defaults."""
    return solve(Problem(workload, ranks, hardware), Stop(), seed=0).best.plan


def _their_plan(workload: Workload, ranks: Topology, seed: int) -> ShardingPlan:
    """Return the plan of TorchRec's planner, which reads only the embedding modules."""
    from shardopt.training.torchrec_planner import plan_with_torchrec

    plan = plan_with_torchrec(workload, ranks, "cpu").plan
    if plan is None:
        raise InputError(
            f"TorchRec's planner finds no plan for task {seed} that fits this machine's memory; "
            "measure on one with more, or leave the task out"
        )
    return plan
