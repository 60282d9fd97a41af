"""Studies: the next setting, the stored outcome of a trial, and the purpose of the study."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
import optuna
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState
from pydantic import TypeAdapter

from predictor.errors import InputError
from search.tune.goals import Goal
from search.tune.knobs import PARAMETERS, Grid, Setting, Value
from search.tune.storage import SharedStorage, storage_errors
from search.tune.trial import TRIED, Outcome, Trial

BEGUN_FOR = "shardopt"
"""Attribute of a study: the model, machine and options its trials belong to."""
OUTCOME = "outcome"
"""Attribute of a trial: the outcome of its setting."""
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
STARTUP = 6
"""Number of random settings before TPE proposes any."""


def setting_of(grid: Grid, params: Mapping[str, Any]) -> dict[str, Value]:
    """Convert Optuna's parameters to a setting, in the grid's order.

    Ordered parameters, whose near values act alike, are indices into their list of values.
    """
    return {
        name: values[params[name]] if PARAMETERS[name].ordered else params[name]
        for name, values in grid.values.items()
    }


def params_of(grid: Grid, setting: Setting) -> dict[str, Any]:
    """Convert a setting to Optuna's parameters; the inverse of `setting_of`."""
    return {
        name: values.index(setting[name]) if PARAMETERS[name].ordered else setting[name]
        for name, values in grid.values.items()
    }


def draw_setting(grid: Grid, trial: optuna.Trial) -> dict[str, Value]:
    """Draw the setting of a trial that has just begun."""
    for name, values in grid.values.items():
        if PARAMETERS[name].ordered:
            trial.suggest_int(name, 0, len(values) - 1)
        else:
            trial.suggest_categorical(name, values)
    return setting_of(grid, trial.params)


def sampler_of(seed: int, trials: int) -> BaseSampler:
    """Return the sampler that proposes the next setting after so many trials.

    Its draws depend only on the seed and the content of the study, so an interrupted study goes on
    as it would have.
    """
    drawn = int(np.random.SeedSequence([seed, trials]).generate_state(1)[0])
    return TPESampler(seed=drawn, n_startup_trials=STARTUP, multivariate=True)


def untried(grid: Grid, trials: Sequence[Trial], seed: int) -> dict[str, Value]:
    """Draw a random setting that no trial has.

    If every setting is in a trial, draw one that no trial has finished: a worker may have died in
    it. At least one setting must be unfinished.
    """
    begun, done = (
        {tuple(t.setting.values()) for t in trials if t.state in states}
        for states in ((*TRIED, "open"), TRIED)
    )
    tried = begun if len(begun) < grid.size else done
    random = np.random.default_rng([seed, len(trials)])
    while True:
        values = [choices[int(random.integers(len(choices)))] for choices in grid.values.values()]
        if tuple(values) not in tried:
            return dict(zip(grid.values, values, strict=True))


_OUTCOMES = TypeAdapter(Outcome)


def keep_outcome(trial: optuna.Trial, setting: Setting, outcome: Outcome) -> None:
    """Store the outcome of a trial, for any worker to read."""
    trial.set_user_attr("setting", dict(setting))
    trial.set_user_attr(OUTCOME, _OUTCOMES.dump_python(outcome, mode="json"))


def read_trial(grid: Grid, goals: int, trial: FrozenTrial) -> Trial:
    """Read a trial as this worker or another left it.

    Args:
        goals: how many values a searched setting has.

    Raises:
        InputError: the stored trial is damaged, or no worker of shardopt wrote it.
    """
    drawn = grid.values.keys() <= trial.params.keys()
    setting = setting_of(grid, trial.params) if drawn else {}
    if trial.state not in FINISHED:
        state: Literal["failed", "open"] = "failed" if trial.state.is_finished() else "open"
        return Trial(number=trial.number, setting=setting, state=state)
    try:
        outcome = _OUTCOMES.validate_python(trial.user_attrs[OUTCOME])
        counts = {
            len(numbers) for numbers in (outcome.values, outcome.bound) if numbers is not None
        }
        whole = None not in (outcome.values, outcome.iteration_ms, outcome.plan)
        if counts - {goals} or whole != (trial.state is TrialState.COMPLETE):
            raise ValueError("an outcome lacks what its state says")
    except (LookupError, ValueError, zlib.error):
        raise InputError(
            f"trial {trial.number} of the study is damaged, or not one of shardopt's; choose "
            "another name, or another storage",
            ("storage", "study"),
        ) from None
    return Trial(number=trial.number, setting=setting, **vars(outcome))


def new_study(
    grid: Grid,
    goals: Sequence[Goal],
    seed: int,
    facts: Mapping[str, Any],
    *,
    name: str | None = None,
    shared: SharedStorage | None = None,
) -> optuna.Study:
    """Create a study, or open the one of that name that another worker began.

    Args:
        facts: what the trials are made for, as plain JSON: model, machine, effort.

    Raises:
        InputError: the study was started for something else; says for what.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    purpose = {
        **facts,
        **{f"values of {name}": list(values) for name, values in grid.values.items()},
        "objectives": [goal.name for goal in goals],
        "seed": seed,
    }
    with nullcontext() if shared is None else storage_errors(shared.name):
        study = optuna.create_study(
            storage=None if shared is None else shared.storage,
            study_name=name,
            directions=["minimize"] * len(goals),
            load_if_exists=True,
        )
        if BEGUN_FOR not in study.user_attrs and not study.get_trials(deepcopy=False):
            study.set_user_attr(BEGUN_FOR, purpose)
        stored = study.user_attrs.get(BEGUN_FOR)
    if not isinstance(stored, dict):
        raise InputError(
            f"study '{name}' was not started by shardopt; choose another name", ("study",)
        )
    purpose = json.loads(json.dumps(purpose))
    differ = "; ".join(
        f"{key} is {stored.get(key, 'not set')} there, {purpose.get(key, 'not set')} here"
        for key in dict.fromkeys([*stored, *purpose])
        if stored.get(key) != purpose.get(key)
    )
    if differ:
        raise InputError(
            f"study '{name}' was started for something else: {differ}; choose another name",
            ("study",),
        )
    return study
