"""Plans run in windows of drifting data: that of the first window, that of the least regret over
all, and TorchRec's; the same for plans chosen on a perturbed profile.

Two more plans were chosen on a profile with costs scaled within their stated errors, as a user of a
shipped profile does. Every round runs every plan in every window, so ratios are of times within
seconds of each other. The first set ran plans of perturbed profiles only in the first window; two
plans are compared in the windows that both ran in.

Why: docs/decisions/0030-choosing-among-plans.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lab.statistics import grouped
from lab.suites import SUITES, ComparedRow, Report
from lab.tasks.task_set import in_window, split_window
from lab.validate.tasks.gains import QUIET, load_quiet
from lab.validate.tasks.tables import Line
from lab.validate.tasks.task_prediction import TaskOfSet, predict_task
from predictor.errors import InputError
from shardopt.race import Ratio, median_interval, ratio_of

THEIRS, NOMINAL, REGRET = WINDOW_PLANS = ("torchrec", "nominal", "regret")
MISLED, HEDGED = "nominal perturbed", "regret perturbed"
"""Plans chosen on a perturbed profile."""
JOINT = " = "
"""Separator of the names of plans that are equal up to a renaming of ranks, and ran once."""
PLANS = "plans"
WORSE, BETTER = 0.01, 0.03
"""Limit on the loss of the plan of least regret, and its target gain where it differs."""
COMPARED = {
    "worst window": ((REGRET, NOMINAL), (REGRET, THEIRS), (NOMINAL, THEIRS)),
    "perturbed profiles": ((HEDGED, MISLED), (HEDGED, NOMINAL), (MISLED, NOMINAL)),
}
"""Table -> pairs of plans."""


class DriftTask(TaskOfSet):
    """Measured task, with its plans by the name of their choice."""

    @property
    def windows(self) -> int:
        return 1 + len(self.task.windows)

    def label(self, chosen_by: str) -> str:
        """Return the name under which a plan was run, with all its choices."""
        for name in self.task.rows.names:
            plain = split_window(name)[0]
            if chosen_by in plain.split(JOINT):
                return plain
        raise InputError(
            f"{self.name}: no plan of '{chosen_by}' was run; tasks of drifting data have one"
        )

    def rounds_ms(self, chosen_by: str, window: int) -> list[float]:
        """Return the median ms of each round."""
        name = in_window(self.label(chosen_by), window)
        return [statistics.median(block) for block in self.task.rows.samples_ms(name)]

    def windows_of(self, *plans: str) -> list[int]:
        """Return the windows, from 1, that all of these plans ran in."""
        there = {*self.task.rows.names}
        return [
            number
            for number in range(1, self.windows + 1)
            if all(in_window(self.label(plan), number) in there for plan in plans)
        ]

    def window_ms(self, chosen_by: str, windows: Sequence[int]) -> list[float]:
        """Return the median ms of each of some windows."""
        return [statistics.median(self.rounds_ms(chosen_by, number)) for number in windows]

    def in_worst(self, *pair: str) -> Ratio:
        """Return a plan's time in its worst window over the other's in its own worst."""
        windows = self.windows_of(*pair)
        first, second = (
            max((self.rounds_ms(plan, number) for number in windows), key=statistics.median)
            for plan in pair
        )
        return ratio_of(first, second)

    def in_first(self, first: str, second: str) -> Ratio:
        """Return a plan's time in the first window over the other's."""
        return ratio_of(self.rounds_ms(first, 1), self.rounds_ms(second, 1))

    def in_mean(self, *pair: str) -> Ratio:
        """Return a plan's mean over the windows, over the other's."""
        windows = self.windows_of(*pair)
        first, second = (
            [
                statistics.fmean(times)
                for times in zip(*(self.rounds_ms(plan, n) for n in windows), strict=True)
            ]
            for plan in pair
        )
        return ratio_of(first, second)

    def regret(self, *pair: str) -> float:
        """Return the first plan's largest relative loss in a window to the faster of both."""
        windows = self.windows_of(*pair)
        mine, theirs = (self.window_ms(plan, windows) for plan in pair)
        return max(ms / min(ms, other) for ms, other in zip(mine, theirs, strict=True)) - 1

    def rows(self) -> Iterator[ComparedRow]:
        """Yield every plan in every window, predicted and measured."""
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
    _, quiet, skipped = load_quiet(folder, "drifting data")
    tasks = [DriftTask(whole.batch, task) for whole, task in quiet]
    for task in tasks:
        for chosen_by in (*WINDOW_PLANS, MISLED, HEDGED):
            task.label(chosen_by)
    # task sets differ in their models and in the way that plans were chosen
    sets = grouped(tasks, lambda task: task.batch.name)
    suite = SUITES["drifting"]
    tables = [
        suite.table(
            table,
            [
                _compared(name, set_tasks, pair)
                for name, set_tasks in sets.items()
                for pair in pairs
            ],
        )
        for table, pairs in COMPARED.items()
    ]
    return suite.report(
        [row for task in tasks for row in task.rows()],
        skipped,
        scores=[*tables, suite.table("by task", map(_task_line, tasks))],
        quiet=QUIET,
    )


def _compared(name: str, tasks: Sequence[DriftTask], pair: tuple[str, str]) -> Line:
    """Return the line of one plan against another, in the tasks of a set where they differ."""
    differ = [task for task in tasks if task.label(pair[0]) != task.label(pair[1])]
    ratios = [task.in_worst(*pair) for task in differ]
    changes = sorted(ratio.value - 1 for ratio in ratios)
    sure = [ratio.value for ratio in ratios if ratio.significant]
    low, high = median_interval(changes) or (None, None)
    return (
        *(name, *pair, len(tasks), len(tasks) - len(differ)),
        *(sum(c > WORSE for c in changes), sum(c <= -BETTER for c in changes)),
        *(sum(value > 1 for value in sure), sum(value < 1 for value in sure)),
        *(_median(changes), low, high),
        *((changes[0], changes[-1]) if changes else (None, None)),
        _median([task.in_mean(*pair).value - 1 for task in differ]),
        _median([task.in_first(*pair).value - 1 for task in differ]),
        _median([task.regret(*pair) for task in differ]),
        _median([task.regret(*reversed(pair)) for task in differ]),
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _task_line(task: DriftTask) -> Line:
    times = [task.window_ms(name, task.windows_of(name)) for name in WINDOW_PLANS]
    ratio = task.in_worst(REGRET, NOMINAL)
    low, high = ratio.interval or (ratio.value, ratio.value)
    labels = dict.fromkeys(split_window(name)[0] for name in task.task.rows.names)
    return (
        *(task.name, task.windows, len(task.task.rows.rounds), "; ".join(labels)),
        *map(max, times),
        *map(statistics.fmean, times),
        *(ratio.value - 1, low - 1, high - 1),
        task.in_first(REGRET, NOMINAL).value - 1,
    )
