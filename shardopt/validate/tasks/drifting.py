"""Plans run in windows of data that drift: the one for the first window against that of the least
regret over all, and TorchRec's; the same for plans chosen on a perturbed profile.

Task sets are those of `shardopt.bench.tasks.drifting`. Every round runs every plan in every window,
so that ratios are of times within seconds of each other.

Why: docs/decisions/0065.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from predictor.errors import InputError
from shardopt.bench.summary import Ratio, ratio_of
from shardopt.bench.tasks.drifting import HEDGED, JOINT, MISLED, NOMINAL, REGRET, THEIRS
from shardopt.bench.tasks.task_set import MeasuredTask, TaskSet, load_task_sets
from shardopt.bench.windows import in_window, split_window
from shardopt.validate.report import Cell, ComparedRow, Report, Scores
from shardopt.validate.tasks.gains import QUIET, has_enough, quiet_part
from shardopt.validate.tasks.task_prediction import predict_task

NAME = "drifting"
PLANS = "plans"
WORSE, BETTER = 0.01, 0.03
"""What the plan of least regret may lose, and what it is to gain where it differs."""
WINDOW_PLANS = (THEIRS, NOMINAL, REGRET)


@dataclass(frozen=True)
class DriftTask:
    """One measured task, its plans by the names of those that chose them."""

    batch: TaskSet
    task: MeasuredTask

    @property
    def name(self) -> str:
        """``task set, task-007``."""
        return f"{self.batch.name} {self.task.name}"

    @property
    def windows(self) -> int:
        """How many there are."""
        return 1 + len(self.task.windows)

    def label(self, chosen_by: str) -> str:
        """Under which name a plan was run: that of all that chose it."""
        for name in self.task.rows.names:
            plain = split_window(name)[0]
            if chosen_by in plain.split(JOINT):
                return plain
        raise InputError(
            f"{self.name}: no plan of '{chosen_by}' was run; tasks of drifting data have one"
        )

    def rounds_ms(self, chosen_by: str, window: int) -> list[float]:
        """The median of each round."""
        name = in_window(self.label(chosen_by), window)
        return [statistics.median(block) for block in self.task.rows.samples_ms(name)]

    def window_ms(self, chosen_by: str) -> list[float]:
        """The median of each window."""
        numbers = range(1, self.windows + 1)
        return [statistics.median(self.rounds_ms(chosen_by, number)) for number in numbers]

    def worst(self, chosen_by: str) -> int:
        """The window, from 1, in which a plan takes longest."""
        times = self.window_ms(chosen_by)
        return 1 + times.index(max(times))

    def same(self, one: str, other: str) -> bool:
        """Whether two chose the same plan."""
        return self.label(one) == self.label(other)

    def in_worst(self, one: str, other: str) -> Ratio:
        """A plan's time in its worst window over the other's in that one's worst."""
        return ratio_of(
            self.rounds_ms(one, self.worst(one)), self.rounds_ms(other, self.worst(other))
        )

    def in_first(self, one: str, other: str) -> Ratio:
        """A plan's time in the first window over the other's."""
        return ratio_of(self.rounds_ms(one, 1), self.rounds_ms(other, 1))

    def in_mean(self, one: str, other: str) -> Ratio:
        """A plan's mean over the windows over the other's."""
        return ratio_of(self._mean_rounds(one), self._mean_rounds(other))

    def _mean_rounds(self, chosen_by: str) -> list[float]:
        numbers = range(1, self.windows + 1)
        of_windows = (self.rounds_ms(chosen_by, number) for number in numbers)
        return [statistics.fmean(times) for times in zip(*of_windows, strict=True)]

    def rows(self) -> Iterator[ComparedRow]:
        """Every plan in every window, predicted and measured."""
        for number, workload in enumerate((self.task.workload, *self.task.windows), start=1):
            plans = [p for p in self.task.rows.plans if split_window(p["name"])[1] == number]
            rows = replace(self.task.rows, plans=plans)
            part = replace(self.task, workload=workload, rows=rows, windows=())
            for row in predict_task(self.batch, part).rows():
                yield replace(row, family=f"window {number}", part=PLANS)


def validate_drifting(folder: Path) -> Report:
    """Predict and time every plan in every window of every task set in a folder.

    Raises:
        InputError: there is no task set, or a file of one is broken, of another machine, or
            without the plans of a task of drifting data.
    """
    batches = load_task_sets(
        folder, "a folder of task sets of drifting data that `shardopt bench batch` has measured"
    )
    measured = [(batch, quiet_part(task)) for batch in batches for task in batch.tasks]
    tasks = [_checked(DriftTask(batch, task)) for batch, task in measured if has_enough(task)]
    loaded = [(batch, task) for batch, task in measured if not has_enough(task)]
    return Report(
        NAME,
        tuple(row for task in tasks for row in task.rows()),
        headline=PLANS,
        skipped=(
            *(text for batch in batches for text in batch.skipped),
            *(
                f"{batch.name} {task.name}: too few rounds without other work"
                for batch, task in loaded
            ),
        ),
        notes=(
            "plans are chosen on the calibration of the task set, without any iteration of a task",
            "measured: every plan in every window in turns, in one process group; ratios are "
            "medians over rounds. Plans that are the same were run once and count as equal",
            f"rounds in which other work kept more than {QUIET:g} of a core busy do not count",
        ),
        scores=(_over_windows(tasks), _perturbed(tasks), _by_task(tasks)) if tasks else (),
    )


def _checked(task: DriftTask) -> DriftTask:
    for chosen_by in (*WINDOW_PLANS, MISLED, HEDGED):
        task.label(chosen_by)
    return task


_COLUMNS = (
    *(("plan", "text"), ("against", "text"), ("tasks", "count"), ("same plan", "count")),
    *(("worse", "count"), ("better", "count"), ("median", "signed"), ("least", "signed")),
    ("most", "signed"),
)


def _over_windows(tasks: Sequence[DriftTask]) -> Scores:
    columns = (*_COLUMNS, ("mean of windows", "signed"), ("first window", "signed"))
    rows: list[tuple[Cell, ...]] = []
    for one, other in ((REGRET, NOMINAL), (REGRET, THEIRS), (NOMINAL, THEIRS)):
        differ = [task for task in tasks if not task.same(one, other)]
        worst = [task.in_worst(one, other) for task in differ]
        rows.append(
            (
                *_cells(one, other, tasks, worst),
                _median(task.in_mean(one, other) for task in differ),
                _median(task.in_first(one, other) for task in differ),
            )
        )
    return Scores(
        "worst window",
        columns,
        tuple(rows),
        f"Time in the worst window against that of another plan in its own worst; worse: by more "
        f"than {WORSE:.0%}, better: by {BETTER:.0%} or more; medians are over the tasks in which "
        "the plans differ.",
    )


def _perturbed(tasks: Sequence[DriftTask]) -> Scores:
    rows: list[tuple[Cell, ...]] = []
    for one, other in ((HEDGED, MISLED), (HEDGED, NOMINAL), (MISLED, NOMINAL)):
        ratios = [task.in_first(one, other) for task in tasks if not task.same(one, other)]
        rows.append(_cells(one, other, tasks, ratios))
    return Scores(
        "perturbed profiles",
        _COLUMNS,
        tuple(rows),
        "Plans chosen on a profile that is off within its stated errors, run on the machine as it "
        "is, in the first window.",
    )


def _cells(
    one: str, other: str, tasks: Sequence[DriftTask], ratios: Sequence[Ratio]
) -> tuple[Cell, ...]:
    changes = [ratio.value - 1 for ratio in ratios]
    return (
        *(one, other, len(tasks), len(tasks) - len(ratios)),
        *(sum(c > WORSE for c in changes), sum(c <= -BETTER for c in changes)),
        *(f(changes) if changes else None for f in (statistics.median, min, max)),
    )


def _median(ratios: Iterable[Ratio]) -> float | None:
    changes = [ratio.value - 1 for ratio in ratios]
    return statistics.median(changes) if changes else None


def _by_task(tasks: Sequence[DriftTask]) -> Scores:
    columns = (
        *(("task", "text"), ("windows", "count"), ("rounds", "count"), ("plans", "text")),
        *((f"{name}, worst", "ms") for name in WINDOW_PLANS),
        *((f"{name}, mean", "ms") for name in WINDOW_PLANS),
        *(("regret to nominal, worst", "signed"), ("from", "signed"), ("to", "signed")),
        ("first window", "signed"),
    )
    rows: list[tuple[Cell, ...]] = []
    for task in tasks:
        times = {name: task.window_ms(name) for name in WINDOW_PLANS}
        ratio = task.in_worst(REGRET, NOMINAL)
        low, high = ratio.interval or (ratio.value, ratio.value)
        labels = dict.fromkeys(split_window(name)[0] for name in task.task.rows.names)
        rows.append(
            (
                *(task.name, task.windows, len(task.task.rows.rounds), "; ".join(labels)),
                *(max(times[name]) for name in WINDOW_PLANS),
                *(statistics.fmean(times[name]) for name in WINDOW_PLANS),
                *(ratio.value - 1, low - 1, high - 1),
                task.in_first(REGRET, NOMINAL).value - 1,
            )
        )
    return Scores("by task", columns, tuple(rows), "Medians over rounds, ms.")
