"""TorchRec's own plan and ours of random models, run side by side: is ours faster, as predicted?

Both planners get the same model, with its real pooling factors, and the same memory. TorchRec's
runs with its defaults. Ours runs twice: on the calibration of the task set, which no measured
iteration is part of, and on the shipped profile, as whoever does not calibrate would.

Why: docs/decisions/0028.
"""

from __future__ import annotations

from predictor.errors import InputError
from predictor.hardware.loader import HardwareProfile, load_hardware
from predictor.model.plan import ShardingPlan
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from search.problem import Problem
from search.solve import solve
from search.stop import Stop
from shardopt.bench.tasks.draw import PROFILE, Task, draw_task
from shardopt.bench.tasks.measure import TaskSetSettings
from shardopt.bench.tasks.plans import signature

THEIRS, OURS, SHIPPED = "torchrec", "shardopt", "shardopt_shipped_profile"
"""The plans, by their names in the rows file; the last is left out where it is one of the others
up to a renaming of ranks."""


def draw_planners_task(settings: TaskSetSettings, seed: int) -> Task:
    """The model of a task, with what each planner makes of it; TorchRec's plan is the first.

    Raises:
        InputError: TorchRec's planner finds no plan.
    """
    from shardopt.bench.tasks.task_set import load_task_set
    from shardopt.torchrec.planning.torchrec_planner import plan_with_torchrec

    task_set = load_task_set(settings.folder)
    workload = draw_task(
        seed, world_size=settings.world_size, local_world_size=settings.local_world_size
    ).workload
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
    return Task(seed, workload.name, workload, plans)


def _search(workload: Workload, ranks: Topology, hardware: HardwareProfile) -> ShardingPlan:
    """What `shardopt plan` writes with its defaults."""
    return solve(Problem(workload, ranks, hardware), Stop(), seed=0).best.plan


def _signature(plan: ShardingPlan, workload: Workload) -> object:
    return signature([plan.tables[key] for key in workload.keys])
