"""Choosing what a plan cannot express: settings of the training job, each with its best plan."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from search.tune.goals import Goal
from search.tune.knobs import Case, Grid, Value, grid_of
from search.tune.storage import open_storage
from search.tune.study import new_study
from search.tune.tune import Budget, Member, Tuning
from shardopt.api.setting import Setting
from shardopt.version import __version__

STUDY_DIGITS = 10
"""Of the digest in the name of a study."""


def new_tuning(
    setting: Setting,
    knobs: Mapping[str, tuple[Value, ...] | None],
    goals: list[Goal],
    budget: Budget,
    *,
    storage: str | None = None,
    study: str | None = None,
) -> tuple[Tuning, str | None]:
    """A study that is ready to run, and its name if it is stored.

    Args:
        knobs: knob -> the values to try; None for those that the case suggests.
        storage: where the study is kept and shared; in this process if None.
        study: its name; one that the same model and settings give on every machine if None.

    Raises:
        InputError: a knob or storage that cannot be used, or a study made for something else.
    """
    case = Case(setting.workload, setting.installed, setting.hardware, setting.reserve)
    grid = grid_of(case, knobs)
    facts = _study_facts(setting, case, budget)
    shared = None if storage is None else open_storage(storage)
    if shared is not None and study is None:
        study = _study_name(setting, facts, grid, goals, budget.seed)
    made = new_study(case, grid, goals, budget.seed, facts, name=study, shared=shared)
    return Tuning(case, grid, goals, budget, made, shared), study


def tuned_setting(setting: Setting, tuning: Tuning, member: Member) -> Setting:
    """The setting with the values of one trial."""
    case = tuning.grid.apply_setting(tuning.case, member.trial.setting)
    topology = case.problem().topology
    return replace(setting, workload=case.workload, installed=case.installed, topology=topology)


def _study_facts(setting: Setting, case: Case, budget: Budget) -> dict[str, Any]:
    """What the trials of a study are made for; workers must agree on all of it."""
    machine = case.installed
    profile = hashlib.sha256(case.hardware.model_dump_json().encode()).hexdigest()
    return {
        "shardopt": __version__,
        "model": case.workload.name,
        "digest of the model": case.workload.sha256,
        "batch size": case.workload.batch_size,
        "hardware": setting.hardware_name,
        "digest of the hardware": profile,
        "ranks": machine.world_size,
        "ranks per host": machine.local_world_size,
        "NVLink domain": machine.nvlink_domain,
        "network": [asdict(level) for level in machine.network],
        "HBM bytes": _one_or_all(machine.hbm_cap_bytes),
        "DDR bytes": _one_or_all(machine.ddr_cap_bytes),
        "reserve": case.reserve,
        "effort": budget.effort,
        "searchers": list(budget.searchers),
    }


def _one_or_all(caps: tuple[int, ...]) -> int | list[int]:
    return caps[0] if len(set(caps)) == 1 else list(caps)


def _study_name(
    setting: Setting, facts: Mapping[str, Any], grid: Grid, goals: list[Goal], seed: int
) -> str:
    """The name that the same model and flags give on every machine."""
    what = [facts, {k: list(v) for k, v in grid.values.items()}, [g.name for g in goals], seed]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:STUDY_DIGITS]
    return f"shardopt-{setting.workload.name}-{digest}"
