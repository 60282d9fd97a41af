"""What a task of `python -m lab against` is: the two planners' answers to one model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.cli import main
from lab.suites import COMMITTED
from lab.tasks import against
from lab.tasks.against import OURS, SHIPPED, THEIRS, draw_planners_task
from lab.tasks.draw import PROFILE
from lab.tasks.measure import TaskSetSettings
from lab.tasks.task_set import load_task_set, task_set_folders
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.model.distribution import Zipf
from predictor.model.plan import ShardingPlan
from predictor.model.workload import Feature, Workload
from predictor.predict import predict
from search.choose import TOLERANCE
from search.stop import Stop
from tests.builders import a_table, a_workload

pytest.importorskip("torchrec")
pytest.importorskip("scipy")

FOLDER = task_set_folders(COMMITTED / "against-torchrec")[0]
"""Of which only the calibration counts here."""


def a_model() -> Workload:
    """Three tables, of which the middle one has by far the most lookups."""
    tables = [
        a_table(name, 20_000, 64, features=(Feature(f"{name}_f", pooling, distribution=Zipf(1.1)),))
        for name, pooling in (("a", 2.0), ("b", 40.0), ("c", 2.0))
    ]
    return a_workload(*tables, batch_size=512)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> TaskSetSettings:
    model = a_model()
    monkeypatch.setattr(against, "Stop", lambda: Stop(effort=0.005))
    monkeypatch.setattr(against, "draw_workload", lambda seed, **_: model)
    return TaskSetSettings(FOLDER, [3], random_plans=2)


@pytest.mark.slow
def test_both_planners_plans_theirs_first(asked: TaskSetSettings) -> None:
    task = draw_planners_task(asked, 3)
    assert list(task.plans)[:2] == [THEIRS, OURS]
    assert list(task.plans)[-2:] == ["random_1", "random_2"]
    assert task.workload == a_model()
    batch = load_task_set(FOLDER)
    times = {
        name: predict(task.workload, batch.ranks, batch.made.profile, plan).iteration_ms
        for name, plan in task.plans.items()
    }
    assert times[OURS] <= min(times.values()) * (1 + TOLERANCE)


def test_the_shipped_profiles_plan_stands_once(
    asked: TaskSetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    plans: list[ShardingPlan] = []
    real = against._search

    def searched(workload: Workload, ranks: Any, hardware: Any) -> ShardingPlan:
        used.append(hardware.name)
        plans.append(plans[0] if plans else real(workload, ranks, hardware))
        return plans[-1]

    monkeypatch.setattr(against, "_search", searched)
    assert SHIPPED not in draw_planners_task(asked, 3).plans
    assert used == [load_task_set(FOLDER).made.profile.name, load_hardware(PROFILE).name]


def test_a_model_that_torchrec_cannot_place_is_refused(
    asked: TaskSetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardopt.training import torchrec_planner

    answer = torchrec_planner.TorchRecAnswer(None, 0.1, None)
    monkeypatch.setattr(torchrec_planner, "plan_with_torchrec", lambda *_: answer)
    with pytest.raises(InputError, match="no plan for task 3 that fits"):
        draw_planners_task(asked, 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "5-2"], "--tasks is '5-2'"),
        (["--tasks", "1", "--rounds", "0"], "--rounds"),
        (["--tasks", "1", "--ranks", "9999"], "number of ranks is 9999"),
        (["--tasks", "1", "--random-plans", "-1"], "--random-plans"),
        (["--tasks", "1", "--models", "shape"], "did you mean 'shapes'"),
    ],
)
def test_bad_numbers_start_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["against", str(tmp_path / "folder"), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "folder").exists()


def test_the_command_asks_for_the_planners_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[TaskSetSettings] = []
    monkeypatch.setattr(
        "lab.tasks.measure.measure_task_set", lambda given, say: asked.append(given)
    )
    assert main(["against", str(tmp_path), "--tasks", "200-202", "--link", "1"]) == 0
    words = ["--models", "shapes", "--random-plans", "200"]
    assert main(["against", str(tmp_path), "--tasks", "0", *words]) == 0
    given = TaskSetSettings(
        tmp_path,
        [200, 201, 202],
        rounds=16,
        link_gbit_s=1.0,
        random_plans=4,
        draw=draw_planners_task,
    )
    other = replace(given, tasks=[0], link_gbit_s=None, models="shapes", random_plans=200)
    assert asked == [given, other]
