"""Settings are drawn once each, and depend on the seed, the number and the study alone."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from predictor.errors import InputError
from predictor.model.plan import ShardingPlan
from search.tune.knobs import Grid
from search.tune.study import (
    SettingSampler,
    distributions,
    encode_plan,
    params_of,
    read_trial,
    setting_of,
)

GRID = Grid({"batch_size": (8, 16, 32, 64), "pipeline": ("base", "sparse_dist")})
FIRST = {"batch_size": 32, "pipeline": "base"}


def drawn(seed: int, count: int, directions: int = 1, *, prune: bool = False) -> list[object]:
    study = optuna.create_study(
        sampler=SettingSampler(GRID, FIRST, seed), directions=["minimize"] * directions
    )
    for _ in range(count):
        trial = study.ask(distributions(GRID))
        size = float(setting_of(GRID, trial.params)["batch_size"])
        if prune and trial.number % 3 == 2:
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, [1 / size, size][:directions])
    return [tuple(setting_of(GRID, t.params).items()) for t in study.get_trials()]


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("prune", [False, True])
def test_each_setting_is_drawn_once(directions: int, prune: bool) -> None:
    found = drawn(0, GRID.size, directions, prune=prune)
    assert found[0] == tuple(FIRST.items())
    assert len(set(found)) == GRID.size


def test_the_seed_decides() -> None:
    assert drawn(1, 8) == drawn(1, 8)
    assert drawn(1, 8) != drawn(2, 8)


def test_a_larger_grid_is_learnt() -> None:
    """Of 64 x 64 settings the best corner is approached, not found by chance."""
    grid = Grid({"batch_size": tuple(range(1, 65)), "bucket": tuple(map(float, range(1, 65)))})
    first = {"batch_size": 1, "bucket": 1.0}
    study = optuna.create_study(sampler=SettingSampler(grid, first, 0))
    for _ in range(60):
        trial = study.ask(distributions(grid))
        setting = setting_of(grid, trial.params)
        far = abs(float(setting["batch_size"]) - 50) + abs(float(setting["bucket"]) - 10)
        study.tell(trial, far)
    values = [t.values[0] for t in study.get_trials()]
    early, late = sum(values[1:16]) / 15, sum(values[-15:]) / 15
    assert late < 0.6 * early


def test_settings_and_parameters_are_inverse() -> None:
    setting = {"batch_size": 64, "pipeline": "sparse_dist"}
    assert params_of(GRID, setting) == {"batch_size": 3, "pipeline": "sparse_dist"}
    assert setting_of(GRID, params_of(GRID, setting)) == setting


@pytest.mark.parametrize(
    ("notes", "values"),
    [
        ({"plan": "~~~"}, [1.0]),
        ({"iteration_ms": "x"}, [1.0]),
        ({"iteration_ms": None}, [1.0]),
        ({"bound": [1.0, 2.0]}, [1.0]),
        ({}, [1.0, 2.0]),
    ],
)
def test_a_damaged_trial_is_named(notes: dict[str, Any], values: list[float]) -> None:
    plan = ShardingPlan(tables={}, world_size=1, local_world_size=1)
    whole = {"iteration_ms": 1.0, "lower_bound_ms": 0.5, "plan": encode_plan(plan)}

    def trial(notes: dict[str, Any], values: list[float]) -> FrozenTrial:
        return optuna.trial.create_trial(values=values, user_attrs={**whole, **notes})

    assert read_trial(GRID, 1, trial({}, [1.0])).plan == plan
    with pytest.raises(InputError, match="trial -1 of the study is damaged"):
        read_trial(GRID, 1, trial(notes, values))
