"""A study: which setting comes next, what is kept of a trial, and what the study was begun for."""

from __future__ import annotations

import base64
import itertools
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from predictor.errors import InputError
from predictor.model.plan import ShardingPlan
from predictor.model.plan_json import plan_from_dict, plan_to_dict
from search.tune.goals import Goal, Values
from search.tune.knobs import Case, Grid, Setting, Value
from search.tune.storage import SharedStorage, storage_errors

SETTINGS = "shardopt"
"""Attribute of a study: what its trials were made for."""
OUTCOME = ("state", "bound", "reason", "iteration_ms", "plan", "lower_bound_ms")
"""Attributes of a trial: what became of it."""
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
STARTUP = 6
"""Settings tried at random before TPE has something to learn from."""
ENUMERATED = 1 << 12
"""Grids of up to this many settings are listed to find an untried one."""


def distributions(grid: Grid) -> dict[str, BaseDistribution]:
    """What Optuna knows of a grid: the place in the list where near values act alike, and the value
    itself where not."""
    return {
        name: IntDistribution(0, len(values) - 1)
        if grid.ordered(name)
        else CategoricalDistribution(values)
        for name, values in grid.values.items()
    }


def setting_of(grid: Grid, params: Mapping[str, Any]) -> dict[str, Value]:
    """Optuna's parameters as a setting, in the grid's order."""
    return {
        name: values[params[name]] if grid.ordered(name) else params[name]
        for name, values in grid.values.items()
    }


def params_of(grid: Grid, setting: Setting) -> dict[str, Any]:
    """The inverse of `setting_of`."""
    return {
        name: values.index(setting[name]) if grid.ordered(name) else setting[name]
        for name, values in grid.values.items()
    }


def draw_setting(grid: Grid, trial: optuna.Trial) -> dict[str, Value]:
    """The setting of a trial that has just begun."""
    for name, values in grid.values.items():
        if grid.ordered(name):
            trial.suggest_int(name, 0, len(values) - 1)
        else:
            trial.suggest_categorical(name, values)
    return setting_of(grid, trial.params)


def is_complete(grid: Grid, trial: FrozenTrial) -> bool:
    """All of its parameters are drawn."""
    return all(name in trial.params for name in grid.values)


class SettingSampler(BaseSampler):
    """The case as given first, then what TPE proposes, or one at random where that was tried.

    Trials that failed do not count. What is drawn depends on the seed and the other trials alone,
    so a study that was interrupted goes on as it would have. A setting whose trial still runs,
    maybe of a worker that died, is drawn only once all others were tried.
    """

    def __init__(self, grid: Grid, first: Setting, seed: int) -> None:
        self.grid = grid
        self.first = params_of(grid, first)
        self.seed = seed

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """All of the parameters are drawn together."""
        return distributions(self.grid)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """One setting."""
        trials = study.get_trials(deepcopy=False)
        others = [t for t in trials if t.number != trial.number and t.state is not TrialState.FAIL]
        if not others:
            return self.first
        seed = int(np.random.SeedSequence([self.seed, len(others)]).generate_state(1)[0])
        tpe = TPESampler(seed=seed, n_startup_trials=STARTUP, multivariate=True)
        drawn = tpe.sample_relative(study, trial, search_space)
        begun = {self._key(t.params) for t in others if is_complete(self.grid, t)}
        if drawn and self._key(drawn) not in begun:
            return drawn
        done = {self._key(t.params) for t in others if t.state in FINISHED}
        return self._any(begun, done, np.random.default_rng(seed))

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Nothing is drawn on its own."""
        raise NotImplementedError

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Nothing is learnt beyond what the study holds."""

    def _key(self, params: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(params[name] for name in self.grid.values)

    def _any(
        self,
        begun: set[tuple[Any, ...]],
        done: set[tuple[Any, ...]],
        random: np.random.Generator,
    ) -> dict[str, Any]:
        """A setting that was not begun, or else not done; any where all were."""
        places = [
            range(len(values)) if self.grid.ordered(name) else values
            for name, values in self.grid.values.items()
        ]
        if self.grid.size <= ENUMERATED:
            keys = list(itertools.product(*places))
            left = [k for k in keys if k not in begun] or [k for k in keys if k not in done] or keys
            return dict(zip(self.grid.values, left[int(random.integers(len(left)))], strict=True))
        while True:
            key = tuple(place[int(random.integers(len(place)))] for place in places)
            if key not in begun:
                return dict(zip(self.grid.values, key, strict=True))


@dataclass(frozen=True)
class Trial:
    """One setting that was tried.

    Args:
        state: ``searched``, ``ruled out`` by its bound, ``infeasible``, or ``failed`` with its
            worker.
        values: of the goals, of the best plan found; None unless searched.
        bound: no plan of the setting has smaller values; None where none was computed.
        iteration_ms: of the best plan found; None unless searched.
        lower_bound_ms: no plan of the setting takes fewer ms; 0 unless searched.
        plan: the best plan found; None unless searched.
        reason: why it is infeasible.
        evaluations: plans that its search scored.
    """

    number: int
    setting: Mapping[str, Value]
    state: str
    values: Values | None = None
    bound: Values | None = None
    iteration_ms: float | None = None
    lower_bound_ms: float = 0.0
    plan: ShardingPlan | None = None
    reason: str = ""
    evaluations: int = 0


def read_trial(grid: Grid, goals: int, trial: FrozenTrial) -> Trial:
    """A trial as this worker or another left it.

    Args:
        goals: how many values a searched setting has.

    Raises:
        InputError: what the storage holds is not what a worker leaves.
    """
    try:
        return _read_trial(grid, goals, trial)
    except (ArithmeticError, LookupError, TypeError, ValueError, zlib.error) as error:
        raise InputError(
            f"trial {trial.number} of the study is damaged, or no trial of shardopt's: "
            f"{type(error).__name__}: {error}; choose another name, or another storage",
            ("storage", "study"),
        ) from None


def _read_trial(grid: Grid, goals: int, trial: FrozenTrial) -> Trial:
    notes = trial.user_attrs
    drawn = is_complete(grid, trial)
    setting = setting_of(grid, trial.params) if drawn else {}
    bound = _numbers(notes["bound"], goals) if "bound" in notes else None
    if trial.state not in FINISHED:
        return Trial(trial.number, setting, "failed" if trial.state.is_finished() else "open")
    if trial.state is TrialState.PRUNED:
        reason = str(notes.get("reason", ""))
        return Trial(trial.number, setting, str(notes["state"]), bound=bound, reason=reason)
    iteration_ms, lower_bound_ms = _numbers([notes["iteration_ms"], notes["lower_bound_ms"]], 2)
    return Trial(
        trial.number,
        setting,
        "searched",
        _numbers(trial.values, goals),
        bound,
        iteration_ms,
        lower_bound_ms,
        decode_plan(notes["plan"]),
        evaluations=int(notes.get("evaluations", 0)),
    )


def _numbers(found: Sequence[Any], count: int) -> tuple[float, ...]:
    """Finite numbers.

    Raises:
        TypeError, ValueError: they are not, or not so many.
    """
    numbers = tuple(float(one) for one in found)
    if len(numbers) != count or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{found} are not {count} finite numbers")
    return numbers


def notes_of_twin(
    grid: Grid, setting: Setting, trials: Sequence[FrozenTrial]
) -> tuple[dict[str, Any], Values | None] | None:
    """What a finished trial with the same effects found, its notes and values; None without one."""
    effects = grid.effects_of(setting)
    for trial in trials:
        if trial.state not in FINISHED:
            continue
        if grid.effects_of(setting_of(grid, trial.params)) == effects:
            notes = {k: v for k, v in trial.user_attrs.items() if k in OUTCOME}
            return notes, tuple(trial.values) if trial.state is TrialState.COMPLETE else None
    return None


def new_study(
    case: Case,
    grid: Grid,
    goals: Sequence[Goal],
    seed: int,
    facts: Mapping[str, Any],
    *,
    name: str | None = None,
    shared: SharedStorage | None = None,
) -> optuna.Study:
    """A study, or the one of that name that another worker began.

    Args:
        facts: what the trials are made for, as plain JSON: model, machine, effort.

    Raises:
        InputError: the study was begun for something else; says for what.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    wanted = {
        **facts,
        **{f"values of {name}": list(values) for name, values in grid.values.items()},
        "objectives": [goal.name for goal in goals],
        "seed": seed,
    }
    with nullcontext() if shared is None else storage_errors(shared.name):
        study = optuna.create_study(
            storage=None if shared is None else shared.storage,
            sampler=SettingSampler(grid, grid.nearest(case), seed),
            study_name=name,
            directions=["minimize"] * len(goals),
            load_if_exists=True,
        )
        if SETTINGS not in study.user_attrs and not study.get_trials(deepcopy=False):
            study.set_user_attr(SETTINGS, wanted)
        found = study.user_attrs.get(SETTINGS)
    _check_same(found, wanted, name)
    return study


def _check_same(found: Any, wanted: Mapping[str, Any], name: str | None) -> None:
    another = "choose another name"
    if not isinstance(found, dict):
        raise InputError(f"study '{name}' was not begun by shardopt; {another}", ("study",))
    wanted = json.loads(json.dumps(wanted))
    keys = [k for k in dict.fromkeys([*found, *wanted]) if found.get(k) != wanted.get(k)]
    if keys:
        differ = "; ".join(
            f"{key} is {found.get(key, 'not set')} there, {wanted.get(key, 'not set')} here"
            for key in keys
        )
        raise InputError(
            f"study '{name}' was begun for something else: {differ}; {another}", ("study",)
        )


def encode_plan(plan: ShardingPlan) -> str:
    """A plan as a trial holds it: compressed, as MySQL takes no attribute of 64 KiB or more."""
    text = json.dumps(plan_to_dict(plan), separators=(",", ":"))
    return base64.b85encode(zlib.compress(text.encode("utf-8"), 9)).decode("ascii")


def decode_plan(text: str) -> ShardingPlan:
    """The inverse of `encode_plan`."""
    return plan_from_dict(
        json.loads(zlib.decompress(base64.b85decode(text))), where="a trial's plan"
    )
