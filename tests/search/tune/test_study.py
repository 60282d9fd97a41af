"""Settings are tried once each, and depend on the seed, the number and the study alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial

from predictor.errors import InputError
from predictor.model.plan import ShardingPlan
from search.problem import Problem
from search.tune import tune
from search.tune.goals import GOALS, Goal
from search.tune.knobs import Case, Grid, Value
from search.tune.study import OUTCOME, new_study, params_of, read_trial, setting_of
from search.tune.trial import Outcome, Trial, pack_plan
from search.tune.tune import Budget, Tuning
from tests.search.problems import H100, a_table, a_workload, hosts

GRID = Grid({"batch_size": (8, 16, 32, 64), "pipeline": ("base", "sparse_dist")})
CASE = Case(a_workload(a_table(), batch_size=32), hosts(2), H100)
GOOD = {"batch_size": 50, "bucket": 10.0}


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tunes without a search: a setting is the better the nearer it is to a good one."""

    def far(problem: Problem, goals: Sequence[Goal], *_: object) -> Outcome:
        workload = problem.workload
        size, bucket = workload.batch_size, workload.dense.bucket_cap_mb
        if size == 16:
            return Outcome(state="ruled out")
        ms = 1 + abs(size - GOOD["batch_size"]) + abs(bucket - GOOD["bucket"])
        plan = ShardingPlan(tables={}, world_size=2, local_world_size=2)
        values = (ms, 1 / ms)[: len(goals)]
        return Outcome(state="searched", values=values, iteration_ms=ms, plan=plan)

    def tuned(grid: Grid, seed: int, trials: int, count: int = 2) -> tuple[Trial, ...]:
        goals = [GOALS["time"], GOALS["memory"]][:count]
        study = new_study(grid, goals, seed, {})
        return Tuning(CASE, grid, goals, Budget(trials, seed=seed), study).run().trials

    monkeypatch.setattr(tune, "try_setting", far)
    return tuned


def settings(trials: tuple[Trial, ...]) -> list[tuple[tuple[str, Value], ...]]:
    return [tuple(trial.setting.items()) for trial in trials]


def test_each_setting_is_tried_once_and_the_first_is_the_case_as_given(tried: Any) -> None:
    in_order = settings(tried(GRID, 0, 99))
    assert in_order[0] == (("batch_size", 32), ("pipeline", "base"))
    assert len(set(in_order)) == len(in_order) == GRID.size


def test_the_seed_decides(tried: Any) -> None:
    assert tried(GRID, 1, 6) == tried(GRID, 1, 6)
    assert settings(tried(GRID, 1, 6)) != settings(tried(GRID, 2, 6))


def test_a_larger_grid_is_learnt(tried: Any) -> None:
    """The study approaches the best corner of 64 x 64 settings, and does not meet it by chance."""
    grid = Grid({"batch_size": tuple(range(1, 65)), "bucket": tuple(map(float, range(1, 65)))})
    ms = [trial.iteration_ms or math.nan for trial in tried(grid, 0, 60, 1)]
    first, last = ([x for x in part if x == x] for part in (ms[1:16], ms[-15:]))
    assert sum(last) / len(last) < 0.6 * sum(first) / len(first)


def test_settings_and_parameters_are_inverse() -> None:
    setting = {"batch_size": 64, "pipeline": "sparse_dist"}
    assert params_of(GRID, setting) == {"batch_size": 3, "pipeline": "sparse_dist"}
    assert setting_of(GRID, params_of(GRID, setting)) == setting


@pytest.mark.parametrize(
    "damage",
    [
        {"plan": "~~~"},
        {"plan": None},
        {"iteration_ms": "x"},
        {"iteration_ms": None},
        {"bound": [1.0, 2.0]},
        {"values": [1.0, 2.0]},
        {"values": [float("nan")]},
        {"state": "lost"},
    ],
)
def test_a_damaged_trial_is_named(damage: dict[str, Any]) -> None:
    plan = ShardingPlan(tables={}, world_size=1, local_world_size=1)
    undamaged = {
        "state": "searched",
        "values": [1.0],
        "iteration_ms": 1.0,
        "lower_bound_ms": 0.5,
        "plan": pack_plan(plan),
    }

    def trial(outcome: dict[str, Any]) -> FrozenTrial:
        return optuna.trial.create_trial(values=[1.0], user_attrs={OUTCOME: outcome})

    assert read_trial(GRID, 1, trial(undamaged)).plan == plan
    with pytest.raises(InputError, match="trial -1 of the study is damaged"):
        read_trial(GRID, 1, trial({**undamaged, **damage}))
