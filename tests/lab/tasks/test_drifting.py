"""Tasks of drifting data: who chose which plan, where it runs, and what a perturbed profile is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torchrec")

from lab.tasks import drifting
from lab.tasks.draw import task_topology
from lab.tasks.drifting import (
    HEDGED,
    JOINT,
    MISLED,
    NOMINAL,
    REGRET,
    THEIRS,
    draw_drifting_task,
    perturbed,
)
from lab.tasks.measure import TaskSetSettings, measure_task_set
from lab.tasks.plans import without_repeats
from lab.tasks.task_set import TaskSet, load_windows
from lab.tasks.windows import split_window
from predictor.cost.errors import known_errors
from predictor.hardware.loader import load_hardware
from predictor.model.plan import ShardingPlan
from predictor.model.workload import Workload
from search.problem import Problem
from search.scenarios.scenario import DRAWS
from tests.builders import a_table, a_topology, a_workload, plan_of, table_wise

HARDWARE = load_hardware("cpu-gloo")
RANKS = task_topology(HARDWARE, 2, 2)


def alternating(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Searches that give the first table to one rank for the nominal time, to the other for
    regret; remembers what they were asked for."""
    asked: list[dict[str, Any]] = []

    def search(problem: Problem, stop: object, seed: int, **how: Any) -> object:
        asked.append({**how, "hardware": problem.hardware})
        tables = problem.workload.tables
        last = 1 if how["aim"] == NOMINAL else 0
        plans = [table_wise(t, i % 2) for i, t in enumerate(tables[:-1])]
        plan = plan_of(problem.workload, RANKS, [*plans, table_wise(tables[-1], last)])
        return SimpleNamespace(best=SimpleNamespace(plan=plan))

    monkeypatch.setattr(drifting, "solve", search)
    return asked


def test_plans_are_chosen_for_one_window_and_run_in_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = alternating(monkeypatch)
    task_set = cast(TaskSet, SimpleNamespace(ranks=RANKS, made=SimpleNamespace(profile=HARDWARE)))
    task = draw_drifting_task(3, task_set)
    windows = 1 + len(task.windows)
    assert [how["aim"] for how in asked] == [NOMINAL, REGRET, NOMINAL, REGRET]
    assert [len(how.get("scenarios", ())) for how in asked] == [0, windows, 0, windows + DRAWS]
    weights = [one.weight for how in asked for one in how.get("scenarios", ())]
    assert sum(weights) == pytest.approx(2)
    assert asked[0]["hardware"] == asked[1]["hardware"] == HARDWARE != asked[2]["hardware"]
    in_first = [name for name in task.plans if split_window(name)[1] == 1]
    assert [split_window(name)[0] for name in in_first][1:] == [
        JOINT.join((NOMINAL, MISLED)),
        JOINT.join((REGRET, HEDGED)),
    ]
    assert in_first[0] == f"{THEIRS} @1"
    assert len(task.plans) == windows * len(in_first), "nobody was misled to a plan of his own"
    _measured(monkeypatch, tmp_path, task)


def _measured(monkeypatch: pytest.MonkeyPatch, folder: Path, task: Any) -> None:
    """The windows reach the ranks through files."""
    from lab.tasks import measure

    jobs = []
    monkeypatch.setitem(measure.FAMILY_TASKS, "drifting", lambda seed, task_set: task)
    monkeypatch.setattr(measure, "load_task_set", lambda folder: None)
    monkeypatch.setattr(measure, "_calibrate", lambda settings, say: None)
    monkeypatch.setattr(measure, "run_bench", lambda job, path, say: jobs.append(job))
    monkeypatch.setattr(measure.os, "sched_getaffinity", lambda pid: {0, 1})
    settings = TaskSetSettings(folder / "set", [3], models="drifting")
    measure_task_set(settings, lambda text: None)
    assert task.windows == load_windows(settings.folder, "task-003")
    for plan in task.plans:
        number = split_window(plan)[1]
        assert jobs[0].data.get(plan) == (None if number == 1 else task.windows[number - 2])
    assert list(jobs[0].plans) == list(task.plans)


def test_the_same_plan_is_kept_once_under_all_names() -> None:
    workload = a_workload(a_table("a"), a_table("b"))
    one, renamed, other = (_plan(workload, *ranks) for ranks in ((0, 1), (1, 0), (0, 0)))
    found = without_repeats({"x": one, "y": other, "z": renamed}, workload)
    assert found == {("x", "z"): one, ("y",): other}


def _plan(workload: Workload, *ranks: int) -> ShardingPlan:
    tables = zip(workload.tables, ranks, strict=True)
    return plan_of(workload, a_topology(2, 2), [table_wise(t, rank) for t, rank in tables])


def test_a_perturbed_profile_is_off_within_its_stated_errors() -> None:
    sizes = known_errors(HARDWARE, RANKS)
    ratios = [
        perturbed(HARDWARE, RANKS, seed).overheads.op_us / HARDWARE.overheads.op_us
        for seed in range(20)
    ]
    most = 1 + 2.5 * sizes["overheads"].shared
    assert len(set(ratios)) == 20
    assert 1 / most < min(ratios) < 1 < max(ratios) < most
