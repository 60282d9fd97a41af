"""``shardopt plan --tune``: choose what a plan cannot express, with a plan for the best choice."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shardopt.api.plan_file import plan_meta, write_best
from shardopt.api.setting import Setting
from shardopt.cli.interrupts import EXIT_INTERRUPTED
from shardopt.cli.output import note
from shardopt.cli.setting import refuse_outside
from shardopt.cli.tune.flags import TRIALS, TuneFlags, read_goals, read_knobs

if TYPE_CHECKING:
    from predictor.predict import Prediction
    from search.expected_gain import ExpectedGain
    from search.tune.study import Trial
    from search.tune.tune import Member, TuneResult, Tuning
    from shardopt.report.tune import TuneReport


@dataclass(frozen=True)
class OutputChoice:
    """Where the outcome goes."""

    json: bool
    output: Path | None
    quiet: bool
    strict: bool


def run_tuning(
    model: Path,
    setting: Setting,
    flags: TuneFlags,
    limits: tuple[float, float | None, int, Sequence[str], int],
    show: OutputChoice,
) -> None:
    """Tune, search the best setting with full effort, report.

    Args:
        limits: effort, time limit in seconds, seed, searchers and plans to show.

    Raises:
        InputError: a knob, objective or storage that cannot be used.
        InfeasibleError: no setting has a plan that fits.
    """
    from search.tune.tune import Budget
    from shardopt.api.tuning import new_tuning

    assert flags.tune is not None
    knobs = read_knobs(flags.tune)
    goals = read_goals(flags.objectives, knobs)
    tuning, study = new_tuning(
        setting,
        knobs,
        goals,
        Budget(flags.trials or TRIALS, *limits),
        storage=flags.storage,
        study=flags.study,
    )
    if tuning.shared is not None:
        note([f"study '{study}' in {tuning.shared.name}"], quiet=show.quiet)
    _finish(model, setting, tuning, study, show)


def _finish(
    model: Path, setting: Setting, tuning: Tuning, study: str | None, show: OutputChoice
) -> None:
    """Run the trials and the last searches, write and report."""
    from search.expected_gain import gain_over_baseline
    from shardopt.api.tuning import tuned_setting
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
    gain = gain_over_baseline(best.problem(), result)
    if show.json:
        from shardopt.cli.output import print_json
        from shardopt.report.objects import plan_object

        note(setting.notes, quiet=show.quiet)
        made = plan_object(result, predictions, meta, setting.notes, gain)
        print_json({**made, "tune": tune_object(report)})
    else:
        _print(model, best, report, predictions, gain, show)
    if interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _search(tuning: Tuning, *, on: bool) -> tuple[TuneResult, list[Member], bool]:
    """The trials, the plans of the settings that no other beats, and whether Ctrl-C ended it."""
    from shardopt.report.progress import SearchProgress

    with SearchProgress(on=on) as progress:
        begun: list[tuple[float, int]] = []

        def watch(done: int, total: int, best: Trial | None) -> None:
            best_ms = None if best is None else best.iteration_ms
            begun.append((time.monotonic(), done))
            left = time_left(begun[0], begun[-1], total)
            text = f"trial {min(done + 1, total)} of {total}{left}"
            progress(text, done / total, best_ms, None)

        tuning.watch = watch
        tuned = tuning.run()

        def last(
            stage: str, fraction: float, best_ms: float | None, bound_ms: float | None
        ) -> None:
            progress(f"best setting: {stage}", fraction, best_ms, bound_ms)

        members, interrupted = tuning.finish(tuned, last)
    return tuned, members, interrupted


def time_left(first: tuple[float, int], last: tuple[float, int], total: int) -> str:
    """``, about 40 s left`` by the pace of the trials so far; empty before the first has ended.

    Args:
        first, last: when the study was looked at, in s, and how many trials had ended by then.
    """
    passed, done = last[0] - first[0], last[1] - first[1]
    return f", about {passed / done * (total - last[1]):.0f} s left" if done else ""


def _print(
    model: Path,
    best: Setting,
    report: TuneReport,
    predictions: list[Prediction],
    gain: ExpectedGain | None,
    show: OutputChoice,
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
    plan_report = PlanReport(best, report.best.result, predictions, written, following, gain=gain)
    (show_tuned_headline if show.quiet else show_tuned)(make_console(), report, plan_report)
