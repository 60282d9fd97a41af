"""The plan of TorchRec's planner against ours, both run for real: gains predicted and measured.

Batches are those of `shardopt bench against`. A gain is the share of the iteration time of
TorchRec's plan that ours saves.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from predictor.errors import InputError
from shardopt.bench.summary import PlanSummary, summaries
from shardopt.bench.tasks.against import OURS, SHIPPED, THEIRS
from shardopt.bench.tasks.task_set import MeasuredTask, TaskSet, load_task_sets
from shardopt.validate.report import Cell, Report, Scores
from shardopt.validate.tasks.task_prediction import TaskPrediction, predict_task

NAME = "against-torchrec"
NEAR = 0.05
"""Predicted and measured gain agree when they are at most so far apart."""
QUIET = 0.25
"""Rounds in which other work kept more cores busy than this count for no plan."""
FEWEST_ROUNDS = 6
"""Quiet ones of a task; fewer have no interval."""
WORDS = {
    OURS: "shardopt, machine calibrated",
    SHIPPED: "shardopt, shipped profile, where it gives another plan",
}


@dataclass(frozen=True)
class Gain:
    """What a plan of ours saves, as fractions of the time of TorchRec's plan.

    Args:
        theirs, ours: how long both took.
        predicted: from the calibration of the batch.
    """

    task: TaskPrediction
    theirs: PlanSummary
    ours: PlanSummary
    predicted: float

    @property
    def measured(self) -> float:
        """The median over the rounds, each of which ran both plans."""
        return 1 - self.ours.ratio.value if self.ours.ratio else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Of at least 95 %, for the measured gain."""
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
        """Whether prediction and clock name the same plan, unless the clock names none."""
        return self.verdict == "equal" or self.predicted * self.measured > 0

    @property
    def off(self) -> float:
        """Predicted less measured gain."""
        return self.predicted - self.measured


def validate_against_torchrec(folder: Path) -> Report:
    """Predict and time TorchRec's plan and ours in every task of every batch in a folder.

    Raises:
        InputError: there is no batch, or a file of one is broken, of another machine, or without
            the two plans.
    """
    batches = load_task_sets(
        folder,
        "a folder of batches that `shardopt bench against` has measured",
    )
    quiet = [(batch, _quiet(_check_plans(task))) for batch in batches for task in batch.tasks]
    tasks = [predict_task(batch, task) for batch, task in quiet if _enough(task)]
    gains = {name: [g for task in tasks for g in _gain(task, name)] for name in (OURS, SHIPPED)}
    return Report(
        NAME,
        tuple(row for task in tasks for row in task.rows()),
        headline="plans",
        skipped=(
            *(text for batch in batches for text in batch.skipped),
            *(
                f"{batch.name} {task.name}: only {len(task.rows.rounds)} rounds without other "
                "work; measure more rounds with `shardopt bench against`"
                for batch, task in quiet
                if not _enough(task)
            ),
        ),
        notes=(
            "both planners had the same model, pooling factors and memory; TorchRec's ran with its "
            "defaults, including its default bandwidths",
            "measured: both plans interleaved in one process group; a gain is the median over "
            "rounds, with a sign-test interval of at least 95 %",
            f"rounds in which other work kept more than {QUIET:g} of a core busy are in the files "
            "but are not counted",
            "predicted from the calibration of the batch, without using any iteration of a task",
        ),
        scores=(_summary(gains), _by_task(gains), _calibrated(batches)),
    )


def _quiet(task: MeasuredTask) -> MeasuredTask:
    """The task without the rounds that other work disturbed, by the load alone."""
    rounds = [r for r in task.rows.rounds if (r["other_cores"] or 0.0) <= QUIET]
    return replace(task, rows=replace(task.rows, rounds=rounds))


def _enough(task: MeasuredTask) -> bool:
    return len(task.rows.rounds) >= FEWEST_ROUNDS


def _check_plans(task: MeasuredTask) -> MeasuredTask:
    names = task.rows.names
    if names[:2] != [THEIRS, OURS]:
        raise InputError(
            f"{task.name}: its plans are {', '.join(names)}, but the first two of a task "
            f"measured by `shardopt bench against` are {THEIRS} and {OURS}"
        )
    return task


def _gain(task: TaskPrediction, name: str) -> list[Gain]:
    """Of one plan, if the task has it."""
    if name not in task.plans:
        return []
    at = task.plans.index(name)
    found = summaries(task.task.rows)
    predicted = 1 - float(task.predicted_ms[at] / task.predicted_ms[0])
    return [Gain(task, found[0], found[at], predicted)]


def _summary(gains: dict[str, list[Gain]]) -> Scores:
    columns = (
        *(("plans of", "text"), ("tasks", "count"), ("faster", "count"), ("equal", "count")),
        *(("slower", "count"), ("median gain", "signed"), ("largest", "signed")),
        *(("median predicted", "signed"), ("mean distance", "share"), ("same sign", "count")),
        (f"within {100 * NEAR:.0f} points", "count"),
    )
    rows = tuple(_line(WORDS[name], of) for name, of in gains.items() if of)
    return Scores(
        "against TorchRec's planner",
        columns,
        rows,
        "Gain: share of the time of TorchRec's plan that is saved. Equal: its interval holds 0. "
        "Distance: between predicted and measured gain. Same sign: or measured as equal.",
    )


def _line(name: str, gains: Sequence[Gain]) -> tuple[Cell, ...]:
    verdicts = [gain.verdict for gain in gains]
    return (
        name,
        len(gains),
        *(verdicts.count(verdict) for verdict in ("faster", "equal", "slower")),
        statistics.median(gain.measured for gain in gains),
        max(gain.measured for gain in gains),
        statistics.median(gain.predicted for gain in gains),
        statistics.fmean(abs(gain.off) for gain in gains),
        sum(gain.same_sign for gain in gains),
        sum(abs(gain.off) <= NEAR for gain in gains),
    )


def _by_task(gains: dict[str, list[Gain]]) -> Scores:
    columns = (
        *(("task", "text"), ("tables", "count"), ("plan", "text"), ("types", "text")),
        *(("TorchRec's types", "text"), ("TorchRec's ms", "ms"), ("ms", "ms")),
        *(("predicted gain", "signed"), ("measured gain", "signed"), ("from", "signed")),
        *(("to", "signed"), ("rounds", "count"), ("verdict", "text")),
    )
    rows = tuple(_task_row(gain) for of in gains.values() for gain in of)
    return Scores("tasks", columns, rows, "From, to: the interval of the measured gain.")


def _task_row(gain: Gain) -> tuple[Cell, ...]:
    task = gain.task
    return (
        *(task.name, len(task.task.workload.tables), gain.ours.name, task.types(gain.ours.name)),
        *(task.types(THEIRS), gain.theirs.median_ms, gain.ours.median_ms),
        *(gain.predicted, gain.measured, *gain.interval),
        *(len(task.task.rows.rounds), gain.verdict),
    )


def _calibrated(batches: Sequence[TaskSet]) -> Scores:
    columns = (("batch", "text"), ("calibrated", "text"), ("topology", "text"), ("tasks", "count"))
    rows = tuple(
        (b.name, f"{b.calibrated:%Y-%m-%d %H:%M} UTC", b.topology, len(b.tasks)) for b in batches
    )
    return Scores("batches", columns, rows)
