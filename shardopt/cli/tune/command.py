"""``shardopt plan --tune``: choose what a plan cannot express, with a plan for the best choice."""

from __future__ import annotations

import hashlib
import json as json_
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shardopt.api.plan_file import plan_meta, write_best
from shardopt.api.setting import Setting
from shardopt.cli.output import note
from shardopt.cli.setting import refuse_outside
from shardopt.cli.tune.flags import TRIALS, TuneFlags, read_goals, read_knobs

if TYPE_CHECKING:
    from predictor.predict import Prediction
    from search.tune.case import Case
    from search.tune.goals import Goal
    from search.tune.grid import Grid
    from search.tune.storage import Shared
    from search.tune.study import Trial
    from search.tune.tune import Budget, Member, Tuned, Tuning
    from shardopt.report.tune import TuneReport

EXIT_INTERRUPTED = 130
STUDY_DIGITS = 10
"""Of the digest in the name of a study."""


@dataclass(frozen=True)
class Show:
    """Where the outcome goes."""

    json: bool
    output: Path | None
    quiet: bool
    strict: bool


def run_tuning(
    model: Path,
    setting: Setting,
    reserve: float,
    flags: TuneFlags,
    limits: tuple[float, float | None, int, Sequence[str], int],
    show: Show,
) -> None:
    """Tune, search the best setting with full effort, report.

    Args:
        limits: effort, time limit in seconds, seed, searchers and plans to show.

    Raises:
        InputError: a knob, objective or storage that cannot be used.
        InfeasibleError: no setting has a plan that fits.
    """
    from search.tune.case import Case
    from search.tune.grid import grid_of
    from search.tune.study import new_study
    from search.tune.tune import Budget, Tuning

    assert flags.tune is not None
    knobs = read_knobs(flags.tune)
    goals = read_goals(flags.objectives, knobs)
    case = Case(setting.workload, setting.installed, setting.hardware, reserve)
    grid = grid_of(case, knobs)
    budget = Budget(flags.trials or TRIALS, *limits)
    facts = study_facts(setting, case, budget)
    shared = _shared(flags)
    name = None
    if shared is not None:
        name = flags.study or study_name(setting, facts, grid, goals, budget.seed)
        note([f"study '{name}' in {shared.name}"], quiet=show.quiet)
    study = new_study(case, grid, goals, budget.seed, facts, name=name, shared=shared)
    tuning = Tuning(case, grid, goals, budget, study, shared)
    _finish(model, setting, tuning, name, show)


def _finish(model: Path, setting: Setting, tuning: Tuning, study: str | None, show: Show) -> None:
    """Run the trials and the last searches, write and report."""
    from shardopt.report.tune import TuneReport, tune_object

    tuned, members, interrupted = _search(tuning, on=not (show.json or show.quiet))
    best, result = tuned_setting(setting, tuning, members[0]), members[0].result
    predictions = [best.predict(ranked.plan) for ranked in result.plans]
    if show.strict:
        refuse_outside(predictions[0].out_of_range)
    meta = plan_meta(best, tuning.budget.seed)
    if show.output is not None:
        values = {"tuned": dict(members[0].trial.setting)}
        write_best(show.output, result, predictions[0], {**meta, **values})
    undone = [tuning.undone(member) for member in members]
    report = TuneReport(tuning, tuned, members, study, undone)
    if show.json:
        from shardopt.cli.output import print_json
        from shardopt.report.objects import plan_object

        note(setting.notes, quiet=show.quiet)
        made = plan_object(result, predictions, meta, setting.notes)
        print_json({**made, "tune": tune_object(report)})
    else:
        _print(model, best, report, predictions, show)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _search(tuning: Tuning, *, on: bool) -> tuple[Tuned, list[Member], bool]:
    """The trials, the plans of the settings that no other beats, and whether Ctrl-C ended it."""
    from shardopt.report.progress import SearchProgress

    with SearchProgress(on=on) as progress:

        def watch(done: int, total: int, best: Trial | None) -> None:
            best_ms = None if best is None else best.iteration_ms
            progress(f"trial {min(done + 1, total)} of {total}", done / total, best_ms, None)

        tuning.watch = watch
        tuned = tuning.run()
        members, interrupted = tuning.finish(tuned, progress)
    return tuned, members, interrupted


def tuned_setting(setting: Setting, tuning: Tuning, member: Member) -> Setting:
    """What the command would have worked on, had it been given this setting."""
    case = tuning.grid.apply_setting(tuning.case, member.trial.setting)
    topology = case.problem().topology
    return replace(setting, workload=case.workload, installed=case.installed, topology=topology)


def _print(
    model: Path,
    best: Setting,
    report: TuneReport,
    predictions: list[Prediction],
    show: Show,
) -> None:
    from shardopt.report.console import make_console
    from shardopt.report.plan import PlanReport
    from shardopt.report.tune import show_tuned, show_tuned_headline

    written = None if show.output is None else str(show.output)
    following = (
        f"shardopt explain {model} {written}, once {model} has the best setting"
        if written
        else "the same command with -o plan.json"
    )
    plan_report = PlanReport(best, report.best.result, predictions, written, following)
    (show_tuned_headline if show.quiet else show_tuned)(make_console(), report, plan_report)


def study_facts(setting: Setting, case: Case, budget: Budget) -> dict[str, Any]:
    """What the trials of a study are made for; workers must agree on all of it."""
    from shardopt import __version__

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
        "HBM bytes": _one_or_all(machine.hbm_cap_bytes),
        "DDR bytes": _one_or_all(machine.ddr_cap_bytes),
        "reserve": case.reserve,
        "effort": budget.effort,
        "searchers": list(budget.searchers),
    }


def _one_or_all(caps: tuple[int, ...]) -> int | list[int]:
    return caps[0] if len(set(caps)) == 1 else list(caps)


def study_name(
    setting: Setting, facts: Mapping[str, Any], grid: Grid, goals: list[Goal], seed: int
) -> str:
    """The name that the same model and flags give on every machine."""
    what = [facts, {k: list(v) for k, v in grid.values.items()}, [g.name for g in goals], seed]
    digest = hashlib.sha256(json_.dumps(what).encode()).hexdigest()[:STUDY_DIGITS]
    return f"shardopt-{setting.workload.name}-{digest}"


def _shared(flags: TuneFlags) -> Shared | None:
    from search.tune.storage import Liveness, open_storage

    return None if flags.storage is None else open_storage(flags.storage, Liveness())
