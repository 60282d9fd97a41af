"""What a study keeps: what it was begun for, and of every trial what any worker can read."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from predictor.errors import InputError
from predictor.model.plan import ShardingPlan
from predictor.model.plan_json import plan_from_dict, plan_to_dict
from search.tune.case import Case, Setting, Value
from search.tune.goals import Goal, Values
from search.tune.grid import Grid
from search.tune.sampler import SettingSampler, is_complete, setting_of
from search.tune.storage import SharedStorage, quiet, storage_errors

SETTINGS = "shardopt"
"""Attribute of a study: what its trials were made for."""
OUTCOME = ("state", "bound", "reason", "iteration_ms", "plan", "lower_bound_ms")
"""Attributes of a trial: what became of it."""
FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)


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


def read_trial(grid: Grid, trial: FrozenTrial) -> Trial:
    """A trial as this worker or another left it."""
    notes = trial.user_attrs
    drawn = is_complete(grid, trial)
    setting = setting_of(grid, trial.params) if drawn else {}
    bound = tuple(notes["bound"]) if "bound" in notes else None
    if trial.state not in FINISHED:
        return Trial(trial.number, setting, "failed" if trial.state.is_finished() else "open")
    if trial.state is TrialState.PRUNED:
        reason = notes.get("reason", "")
        return Trial(trial.number, setting, notes["state"], bound=bound, reason=reason)
    return Trial(
        trial.number,
        setting,
        "searched",
        tuple(trial.values),
        bound,
        notes["iteration_ms"],
        notes["lower_bound_ms"],
        decode_plan(notes["plan"]),
        evaluations=notes.get("evaluations", 0),
    )


def notes_of_twin(
    grid: Grid, setting: Setting, trials: Sequence[FrozenTrial]
) -> tuple[dict[str, Any], Values | None] | None:
    """What a trial with the same effects found, its notes and values; None without such a trial."""
    effects = grid.effects_of(setting)
    for trial in trials:
        if trial.state in FINISHED and is_complete(grid, trial):
            found = setting_of(grid, trial.params)
            if found != setting and grid.effects_of(found) == effects:
                done = trial.state is TrialState.COMPLETE
                notes = {k: v for k, v in trial.user_attrs.items() if k in OUTCOME}
                return notes, tuple(trial.values) if done else None
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
    with nullcontext() if shared is None else storage_errors(shared.name), quiet():
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
    if found is None:
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
