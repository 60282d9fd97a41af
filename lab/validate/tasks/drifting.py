"""Plans run in windows of data that drift: the one for the first window against that of the least
regret over all, and TorchRec's; the same for plans chosen on a perturbed profile.

Two more plans were chosen on a machine that is not the real one, its costs scaled within their
stated errors, as whoever plans on a shipped profile does. Every round runs every plan in every
window, so that ratios are of times within seconds of each other. The first set ran plans of
perturbed profiles in the first window alone; two plans are compared in the windows that both ran
in.

Why: docs/decisions/0030-choosing-among-plans.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lab.tasks.task_set import MeasuredTask, TaskSet, in_window, split_window
from lab.validate.report import Cell, ComparedRow, Report, Scores
from lab.validate.tasks.gains import QUIET, load_quiet
from lab.validate.tasks.task_prediction import predict_task
from predictor.errors import InputError
from shardopt.race import Ratio, median_interval, ratio_of

NAME = "drifting"
THEIRS, NOMINAL, REGRET = "torchrec", "nominal", "regret"
MISLED, HEDGED = "nominal perturbed", "regret perturbed"
"""Chosen on a perturbed profile."""
JOINT = " = "
"""Between the names of plans that are the same up to a renaming of ranks, and were run once."""
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

    def windows_of(self, *plans: str) -> list[int]:
        """The windows, from 1, that all of these were run in."""
        there = {*self.task.rows.names}
        return [
            number
            for number in range(1, self.windows + 1)
            if all(in_window(self.label(plan), number) in there for plan in plans)
        ]

    def window_ms(self, chosen_by: str) -> list[float]:
        """The median of each window that a plan was run in."""
        numbers = self.windows_of(chosen_by)
        return [statistics.median(self.rounds_ms(chosen_by, number)) for number in numbers]

    def _worst_rounds(self, chosen_by: str, windows: Sequence[int]) -> list[float]:
        """The rounds in that of some windows in which a plan takes longest."""
        rounds = [self.rounds_ms(chosen_by, number) for number in windows]
        return max(rounds, key=statistics.median)

    def same(self, one: str, other: str) -> bool:
        """Whether two chose the same plan."""
        return self.label(one) == self.label(other)

    def in_worst(self, one: str, other: str) -> Ratio:
        """A plan's time in its worst window over the other's in that one's worst."""
        windows = self.windows_of(one, other)
        return ratio_of(self._worst_rounds(one, windows), self._worst_rounds(other, windows))

    def in_first(self, one: str, other: str) -> Ratio:
        """A plan's time in the first window over the other's."""
        return ratio_of(self.rounds_ms(one, 1), self.rounds_ms(other, 1))

    def in_mean(self, one: str, other: str) -> Ratio:
        """A plan's mean over the windows over the other's."""
        windows = self.windows_of(one, other)
        return ratio_of(self._mean_rounds(one, windows), self._mean_rounds(other, windows))

    def _mean_rounds(self, chosen_by: str, windows: Sequence[int]) -> list[float]:
        of_windows = (self.rounds_ms(chosen_by, number) for number in windows)
        return [statistics.fmean(times) for times in zip(*of_windows, strict=True)]

    def regret(self, plan: str, *others: str) -> float:
        """By which share a plan was slower than the faster one of some plans, itself among them, in
        the window where that is most."""
        windows = self.windows_of(plan, *others)
        mine, *rest = (
            [statistics.median(self.rounds_ms(name, number)) for number in windows]
            for name in (plan, *others)
        )
        best = (min(times) for times in zip(mine, *rest, strict=True))
        return max(ms / least for ms, least in zip(mine, best, strict=True)) - 1

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
    found = load_quiet(folder, "drifting data")
    tasks = [_checked(DriftTask(batch, task)) for batch, task in found.tasks]
    return Report(
        NAME,
        tuple(row for task in tasks for row in task.rows()),
        headline=PLANS,
        skipped=found.skipped,
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


def _by_set(tasks: Sequence[DriftTask]) -> dict[str, list[DriftTask]]:
    """The tasks of every set, which are of other models and chosen in another way."""
    names = dict.fromkeys(task.batch.name for task in tasks)
    return {name: [task for task in tasks if task.batch.name == name] for name in names}


_COLUMNS = (
    *(("task set", "text"), ("plan", "text"), ("against", "text"), ("tasks", "count")),
    *(("same plan", "count"), ("worse", "count"), ("better", "count")),
    *(("beyond noise worse", "count"), ("beyond noise better", "count"), ("median", "signed")),
    *(("from", "signed"), ("to", "signed"), ("least", "signed"), ("most", "signed")),
    *(("mean of windows", "signed"), ("first window", "signed")),
    *(("regret", "signed"), ("regret of the other", "signed")),
)


def _over_windows(tasks: Sequence[DriftTask]) -> Scores:
    pairs = (REGRET, NOMINAL), (REGRET, THEIRS), (NOMINAL, THEIRS)
    return Scores(
        "worst window",
        _COLUMNS,
        tuple(
            _compared(name, some, pair) for name, some in _by_set(tasks).items() for pair in pairs
        ),
        f"Time in the worst window against that of another plan in its own worst; worse: by more "
        f"than {WORSE:.0%}, better: by {BETTER:.0%} or more, beyond noise: by the interval of the "
        "task. Medians are over the tasks in which the plans differ, with an interval of 95 % or "
        "more. Regret: how much longer than the faster of both a plan took in a window, at most.",
    )


def _perturbed(tasks: Sequence[DriftTask]) -> Scores:
    pairs = (HEDGED, MISLED), (HEDGED, NOMINAL), (MISLED, NOMINAL)
    return Scores(
        "perturbed profiles",
        _COLUMNS,
        tuple(
            _compared(name, some, pair) for name, some in _by_set(tasks).items() for pair in pairs
        ),
        "Plans chosen on a profile that is off within its stated errors, run on the machine as it "
        "is, in the windows that both were run in.",
    )


def _compared(name: str, tasks: Sequence[DriftTask], pair: tuple[str, str]) -> tuple[Cell, ...]:
    """One line: a plan against another in the tasks of a set in which they differ."""
    differ = [task for task in tasks if not task.same(*pair)]
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
