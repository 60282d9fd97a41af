"""TorchRec's own plan and ours of random models, run side by side: is ours faster, as predicted?

Both planners get the same model, with its real pooling factors, and the same memory. TorchRec's
runs with its defaults. Ours runs twice: on the calibration of the task set, which no measured
iteration is part of, and on the shipped profile, as whoever does not calibrate would. Plans drawn
at random run beside them, to tell how much of the error comes from choosing.

Why: docs/decisions/0024-gains.md.
"""

from __future__ import annotations

from lab.tasks.draw import PROFILE, Task, draw_workload
from lab.tasks.measure import TaskSetSettings
from lab.tasks.models import ARCHITECTURES, CROSSED, DRIFTING, FAMILIES
from lab.tasks.plans import random_plans, signature
from lab.tasks.task_set import load_task_set, task_name
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


def check_models(family: str) -> None:
    """Refuse a family that has plans of its own, before minutes are spent on the calibration.

    Raises:
        InputError: it has.
    """
    if family in (CROSSED, ARCHITECTURES, DRIFTING):
        raise InputError(
            f"models '{family}' come with plans of their own, beside which no planner's would "
            f"tell anything; choose another of {', '.join(FAMILIES)}",
            inputs=("models",),
        )


def draw_planners_task(settings: TaskSetSettings, seed: int) -> Task:
    """The model of a task, what each planner makes of it, TorchRec's first, and random plans.

    Raises:
        InputError: TorchRec's planner finds no plan.
    """
    from shardopt.training.torchrec_planner import plan_with_torchrec

    task_set = load_task_set(settings.folder)
    workload = draw_workload(
        seed,
        world_size=settings.world_size,
        local_world_size=settings.local_world_size,
        models=settings.models,
    )
    theirs = plan_with_torchrec(workload, task_set.ranks, "cpu").plan
    if theirs is None:
        raise InputError(
            f"TorchRec's planner finds no plan for task {seed} that fits this machine's memory; "
            "measure on one with more, or leave the task out"
        )
    plans = {THEIRS: theirs, OURS: _search(workload, task_set.ranks, task_set.made.profile)}
    shipped = _search(workload, task_set.ranks, load_hardware(PROFILE))
    if _signature(shipped, workload) not in {_signature(plan, workload) for plan in plans.values()}:
        plans[SHIPPED] = shipped
    # what is drawn must not depend on what the profiles choose
    plans |= random_plans(seed, workload, task_set.ranks, settings.random_plans, [theirs])
    return Task(seed, task_name(seed), workload, plans)


def _search(workload: Workload, ranks: Topology, hardware: HardwareProfile) -> ShardingPlan:
    """What `shardopt plan` writes with its defaults."""
    return solve(Problem(workload, ranks, hardware), Stop(), seed=0).best.plan


def _signature(plan: ShardingPlan, workload: Workload) -> object:
    return signature([plan.tables[key] for key in workload.keys])
