"""Tasks of `python -m lab batch --against N`: two planners' answers to one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.cli import main
from lab.suites import COMMITTED
from lab.tasks import against
from lab.tasks.against import OURS, SHIPPED, THEIRS, draw_task
from lab.tasks.task_set import BASE, TaskSet, load_task_set, task_set_folders
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.model.distribution import Zipf
from predictor.model.plan import ShardingPlan
from predictor.model.workload import Feature, Workload
from predictor.predict import predict
from search.prefer import TOLERANCE
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


@pytest.fixture(scope="module")
def calibrated() -> TaskSet:
    return load_task_set(FOLDER)


@pytest.fixture
def a_set(calibrated: TaskSet, monkeypatch: pytest.MonkeyPatch) -> TaskSet:
    model = a_model()
    monkeypatch.setattr(against, "Stop", lambda: Stop(effort=0.005))
    monkeypatch.setattr(against, "draw_model", lambda *_: model)
    return calibrated


@pytest.mark.slow
def test_both_planners_plans_theirs_first(a_set: TaskSet) -> None:
    workload, plans = draw_task(3, a_set, "shapes", 2)
    assert list(plans)[:2] == [THEIRS, OURS]
    assert list(plans)[-2:] == ["random_1", "random_2"]
    assert workload == a_model()
    times = {
        name: predict(workload, a_set.ranks, a_set.calibration.profile, plan).iteration_ms
        for name, plan in plans.items()
    }
    assert times[OURS] <= min(times.values()) * (1 + TOLERANCE)


def test_the_shipped_profiles_plan_stands_once(
    a_set: TaskSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    plans: list[ShardingPlan] = []
    real = against._search

    def searched(workload: Workload, ranks: Any, hardware: Any) -> ShardingPlan:
        used.append(hardware.name)
        plans.append(plans[0] if plans else real(workload, ranks, hardware))
        return plans[-1]

    monkeypatch.setattr(against, "_search", searched)
    assert SHIPPED not in draw_task(3, a_set, "shapes", 2)[1]
    assert used == [a_set.calibration.profile.name, load_hardware(BASE).name]


def test_a_model_that_torchrec_cannot_place_is_refused(
    a_set: TaskSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardopt.training import torchrec_planner

    answer = torchrec_planner.TorchRecAnswer(None, 0.1, None)
    monkeypatch.setattr(torchrec_planner, "plan_with_torchrec", lambda *_: answer)
    with pytest.raises(InputError, match="task 3"):
        draw_task(3, a_set, "shapes", 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tasks", "5-2"], "--tasks is '5-2'"),
        (["--tasks", "1", "--rounds", "0"], "--rounds"),
        (["--tasks", "1", "--ranks", "9999"], "9999"),
        (["--tasks", "1", "--against", "-1"], "--against"),
        (["--tasks", "1", "--models", "shape"], "'shapes'"),
    ],
)
def test_bad_numbers_start_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["batch", str(tmp_path / "folder"), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "folder").exists()
