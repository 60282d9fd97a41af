"""Expected and measured gain of a plan over TorchRec's plan of the same task.

Why: docs/decisions/0024-gains.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lab.statistics import within_noise
from lab.tasks.against import SHIPPED, THEIRS
from lab.tasks.plans import PREFIX
from lab.tasks.task_set import BASE, MeasuredTask, TaskSet, load_task_sets
from lab.validate.tasks.task_prediction import TaskOfSet, TaskPrediction, predict_task
from predictor.hardware.loader import load_hardware
from search.expected_gain import ExpectedGain, expected_gain
from search.problem import Problem
from shardopt.bench.summary import PlanSummary, summaries

QUIET = 0.25
"""Most cores that other work may keep busy in a round that counts."""
FEWEST_ROUNDS = 6
"""Least number of quiet rounds of a task; fewer have no interval."""


@dataclass(frozen=True)
class Gain:
    """Gain of a plan, as a fraction of the time of TorchRec's plan.

    Args:
        task: the part of the task that both plans ran in.
        theirs, ours: measured times of both.
        predicted: gain by the calibration of the batch.
        expected: mean gain over the stated errors of the costs, as `plan` prints it.
        all_rounds: measured gain including rounds beside other work.
    """

    task: TaskPrediction
    theirs: PlanSummary
    ours: PlanSummary
    predicted: float
    expected: ExpectedGain
    all_rounds: float

    @property
    def measured(self) -> float:
        """Median gain over the rounds, each of which ran both plans."""
        return measured_gain(self.ours)

    @property
    def interval(self) -> tuple[float, float]:
        """Interval of at least 95 % for the measured gain."""
        ratio = self.ours.ratio
        if ratio is None or ratio.interval is None:
            return math.nan, math.nan
        return 1 - ratio.interval[1], 1 - ratio.interval[0]

    @property
    def verdict(self) -> str:
        """``faster``, ``slower``, or ``equal`` where noise explains the difference."""
        if self.ours.ratio is None or not self.ours.ratio.significant:
            return "equal"
        return "faster" if self.measured > 0 else "slower"

    @property
    def same_sign(self) -> bool:
        """True if prediction and clock prefer the same plan, or the clock prefers none."""
        return self.verdict == "equal" or self.predicted * self.measured > 0

    @property
    def off(self) -> float:
        """Expected less measured gain."""
        return self.expected.mean - self.measured

    @property
    def inside(self) -> bool:
        """True if the measured gain lies in the expected 90 % interval."""
        low, high = self.expected.interval
        return low <= self.measured <= high

    @property
    def inside_with_noise(self) -> bool:
        """The same for the interval of their difference, with the noise of the measurement."""
        expected = self.expected
        return within_noise(expected.mean, self.measured, expected.interval, self.interval)

    @property
    def optimism(self) -> float:
        """Relative amount by which the ratio to TorchRec's plan is predicted too small.

        For plans about as fast as TorchRec's it is the error of the predicted gain; a plan three
        times as slow does not weigh more.
        """
        return 1 - (1 - self.predicted) / (1 - self.measured)


def measured_gain(plan: PlanSummary) -> float:
    """Return the gain of a plan over the first one of its rows."""
    return 1 - plan.ratio.value if plan.ratio else math.nan


@dataclass(frozen=True)
class TaskGains(TaskOfSet):
    """Gains of one task.

    Args:
        chosen: gains of the chosen plans, by name.
        foretold: gain that the shipped profile predicts for the plan chosen with it.
        drawn: gains of random plans, in measured order.
        rounds, loaded: rounds of the first part that count, and those left out for other work.
    """

    chosen: dict[str, Gain]
    foretold: Gain | None
    drawn: tuple[Gain, ...]
    rounds: int
    loaded: int
    parts: tuple[TaskPrediction, ...]


def quiet_part(part: MeasuredTask, most: float = QUIET) -> MeasuredTask:
    """Return the part without the rounds that other work disturbed, by the load alone.

    Args:
        most: cores that other work may keep busy in a round that counts.
    """
    rounds = [r for r in part.rows.rounds if (r["other_cores"] or 0.0) <= most]
    return replace(part, rows=replace(part.rows, rounds=rounds))


QuietTasks = tuple[list[TaskSet], list[tuple[TaskOfSet, MeasuredTask]], list[str]]
"""Task sets; their tasks, each whole and with its quiet rounds only; and a message for each left
out."""


def load_quiet(
    folder: Path, models: str, most: float = QUIET, fewest: int = FEWEST_ROUNDS
) -> QuietTasks:
    """Load the tasks of every task set in a folder that have enough quiet rounds.

    Args:
        models: contents of the task sets, for the message where there are none.
        most: cores that other work may keep busy in a round that counts.
        fewest: least number of quiet rounds of a task.

    Raises:
        InputError: there is no task set, or a file of one is broken, or of another machine.
    """
    batches = load_task_sets(
        folder, f"a folder of task sets of {models} that `python -m lab batch` has measured"
    )
    skipped = [text for batch in batches for text in batch.skipped]
    quiet_tasks = []
    for batch in batches:
        for task in batch.tasks:
            quiet = quiet_part(task, most)
            if len(quiet.rows.rounds) >= fewest:
                quiet_tasks.append((TaskOfSet(batch, task), quiet))
            else:
                skipped.append(
                    f"{batch.name} {task.name}: only {len(quiet.rows.rounds)} of "
                    f"{len(task.rows.rounds)} rounds without other work, and {fewest} are needed; "
                    "measure more rounds with the same command"
                )
    return batches, quiet_tasks, skipped


def find_gains(batch: TaskSet, task: MeasuredTask) -> TaskGains:
    """Predict and time every plan of a task with enough quiet rounds.

    Further parts with too few are left out.
    """
    gains: list[Gain] = []
    predicted: list[TaskPrediction] = []
    for rows in (task.rows, *task.more):
        whole = replace(task, rows=rows, more=())
        part = quiet_part(whole)
        if len(part.rows.rounds) >= FEWEST_ROUNDS:
            predicted.append(predict_task(batch, part))
            gains += _gains(batch, predicted[-1], whole)
    rounds = len(predicted[0].task.rows.rounds)
    chosen = {gain.ours.name: gain for gain in gains if not gain.ours.name.startswith(PREFIX)}
    return TaskGains(
        batch,
        task,
        chosen,
        _foretold(batch, chosen[SHIPPED]) if SHIPPED in chosen else None,
        tuple(gain for gain in gains if gain.ours.name.startswith(PREFIX)),
        rounds,
        len(task.rows.rounds) - rounds,
        tuple(predicted),
    )


def _foretold(batch: TaskSet, gain: Gain) -> Gain:
    """Return the gain with the prediction of the shipped profile, as for an uncalibrated user."""
    part = gain.task.task
    problem = Problem(part.workload, batch.ranks, load_hardware(BASE))
    plan, baseline = part.plans[gain.ours.name], part.plans[THEIRS]
    expected = expected_gain(problem, plan, baseline, THEIRS)
    return replace(gain, predicted=expected.nominal, expected=expected)


def _gains(batch: TaskSet, part: TaskPrediction, whole: MeasuredTask) -> Iterator[Gain]:
    """Yield the gain of every plan of a part but the first."""
    theirs, *candidates = summaries(part.task.rows)
    times, plans = part.predicted_ms, part.task.plans
    problem = Problem(part.task.workload, batch.ranks, batch.calibration.profile)
    in_all = summaries(whole.rows)[1:]
    for at, (ours, again) in enumerate(zip(candidates, in_all, strict=True), start=1):
        yield Gain(
            part,
            theirs,
            ours,
            1 - float(times[at] / times[0]),
            expected_gain(problem, plans[ours.name], plans[THEIRS], THEIRS),
            measured_gain(again),
        )
