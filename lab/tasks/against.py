"""Tasks: a model drawn at random, TorchRec's own plan and ours of it, run side by side.

Both planners get the same model, with its real pooling factors, and the same memory. TorchRec's
runs with its defaults. Ours runs twice: on the calibration of the task set, which no measured
iteration is part of, and on the shipped profile, as whoever does not calibrate would. Plans drawn
at random run beside them, to tell how much of the error comes from choosing.

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
"""The chosen plans, by their names in the rows file; the last is left out where it is one of the
others up to a renaming of ranks."""


Task = tuple[Workload, dict[str, ShardingPlan]]
"""A model, as its file reads, and the plans of it that are run side by side, by name; the first is
what others are compared with."""


def draw_task(seed: int, task_set: TaskSet, models: str, count: int) -> Task:
    """The model of a task, what each planner makes of it, TorchRec's first, and random plans.

    Args:
        task_set: whose calibration our plan is searched on.
        count: of random plans.

    Raises:
        InputError: TorchRec's planner finds no plan.
    """
    ranks = task_set.ranks
    workload = draw_model(models, seed)
    theirs = _their_plan(workload, ranks, seed)
    plans = {THEIRS: theirs, OURS: _search(workload, ranks, task_set.made.profile)}
    shipped = _search(workload, ranks, load_hardware(BASE))
    known = {signature(plan, workload) for plan in plans.values()}
    if signature(shipped, workload) not in known:
        plans[SHIPPED] = shipped
    # what is drawn must not depend on what the profiles choose
    return workload, plans | random_plans(seed, workload, ranks, count, [theirs])


def _search(workload: Workload, ranks: Topology, hardware: HardwareProfile) -> ShardingPlan:
    """What `shardopt plan` writes with its defaults."""
    return solve(Problem(workload, ranks, hardware), Stop(), seed=0).best.plan


def _their_plan(workload: Workload, ranks: Topology, seed: int) -> ShardingPlan:
    """The plan of TorchRec's planner, which looks at embedding modules alone."""
    from shardopt.training.torchrec_planner import plan_with_torchrec

    found = plan_with_torchrec(workload, ranks, "cpu").plan
    if found is None:
        raise InputError(
            f"TorchRec's planner finds no plan for task {seed} that fits this machine's memory; "
            "measure on one with more, or leave the task out"
        )
    return found
