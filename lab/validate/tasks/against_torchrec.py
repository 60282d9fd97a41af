"""The plan of TorchRec's planner against ours, both run for real: gains predicted and measured.

Batches come from `python -m lab batch --against`. A gain is the share of the iteration time of
TorchRec's plan that ours saves. `lab.validate.tasks.gains` has the rules for leaving rounds and
tasks out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lab.statistics import grouped, mean_interval
from lab.suites import SUITES, ComparedRow, Report
from lab.tasks.against import OURS, SHIPPED, THEIRS
from lab.tasks.plans import PREFIX
from lab.tasks.task_set import MeasuredTask
from lab.validate.tasks.gains import FEWEST_ROUNDS, QUIET, Gain, TaskGains, find_gains, load_quiet
from lab.validate.tasks.tables import Line
from predictor.errors import InputError
from shardopt.formatting import percent

PLANS, DRAWN = "plans", "random plans"
"""Parts of the rows: chosen plans, and those drawn at random."""
FORETOLD = "foretold"
NEAR = 0.05
"""Largest difference at which predicted and measured gain agree."""
WORDS = {
    OURS: "shardopt, machine calibrated",
    SHIPPED: "shardopt, shipped profile, where it gives another plan",
    FORETOLD: "shardopt, shipped profile, as it foretells",
    DRAWN: "random plans",
}
ALL = "all"


class Group(NamedTuple):
    """Tasks that share a line: those of one runtime, and of one family or task set, or of all."""

    cells: tuple[str, str, str]
    tasks: Sequence[TaskGains]


def validate_against_torchrec(folder: Path) -> Report:
    """Predict and time TorchRec's plan and ours in every task of every batch in a folder.

    Raises:
        InputError: there is no batch, or a file of one is broken, of another machine, or without
            the two plans.
    """
    batches, quiet, skipped = load_quiet(folder, "plans against TorchRec's")
    tasks = [find_gains(whole.batch, _check_plans(whole.task)) for whole, _ in quiet]
    groups = list(_groups(tasks))
    suite = SUITES["against-torchrec"]
    chosen = [
        (group, name, gains)
        for name in (OURS, SHIPPED)
        for group in groups
        if (gains := _chosen_gains(group, name))
    ]
    foretold = [
        (group, FORETOLD, gains)
        for group in groups
        if (gains := [[task.foretold] for task in group.tasks if task.foretold])
    ]
    drawn = [
        (group, DRAWN, gains)
        for group in groups
        if (gains := [[*task.drawn] for task in group.tasks if task.drawn])
    ]
    loaded = [f"{t.name} ({t.loaded} of {t.rounds + t.loaded} rounds)" for t in tasks if t.loaded]
    return suite.report(
        [row for task in tasks for row in _rows(task)],
        skipped,
        scores=(
            suite.table("against TorchRec's planner", [_gain_line(*line) for line in chosen]),
            suite.table(
                "expected gains",
                [_expected_line(*line) for line in [*chosen, *foretold, *drawn]],
            ),
            suite.table(
                "tasks",
                [
                    _task_line(task, task.chosen[name])
                    for name in (OURS, SHIPPED)
                    for task in tasks
                    if name in task.chosen
                ],
            ),
            suite.table(
                "batches",
                [
                    (
                        *(b.name, b.runtime, b.models, f"{b.calibrated:%Y-%m-%d %H:%M} UTC"),
                        *(b.topology, len(b.tasks)),
                    )
                    for b in batches
                ],
            ),
        ),
        quiet=QUIET,
        fewest=FEWEST_ROUNDS,
        dropped=_dropped(tasks),
        loaded=", ".join(loaded) or "none",
    )


def _dropped(tasks: Sequence[TaskGains]) -> str:
    """Describe the number of dropped rounds, over all tasks and by runtime."""
    parts = []
    for name, named_tasks in {
        ALL: tasks,
        **grouped(tasks, lambda task: task.batch.runtime),
    }.items():
        dropped = sum(task.loaded for task in named_tasks)
        every = dropped + sum(task.rounds for task in named_tasks)
        parts.append(f"{dropped} of {every} ({percent(dropped / max(1, every))}) {name}")
    return ", ".join(parts)


def _check_plans(task: MeasuredTask) -> MeasuredTask:
    names = task.rows.names
    if names[:2] != [THEIRS, OURS]:
        raise InputError(
            f"{task.name}: its plans are {', '.join(names)}, but the first two of a task "
            f"measured by `python -m lab batch --against` are {THEIRS} and {OURS}"
        )
    return task


def _rows(task: TaskGains) -> Iterator[ComparedRow]:
    """Yield a row for each plan; TorchRec's only once, from the first part."""
    family = f"{task.batch.runtime}, {task.batch.models}, {task.batch.topology}"
    for at, part in enumerate(task.parts):
        for row in part.rows()[1 if at else 0 :]:
            drawn = str(row.name["plan"]).startswith(PREFIX)
            yield replace(row, family=family, part=DRAWN if drawn else PLANS)


def _groups(tasks: Sequence[TaskGains]) -> Iterator[Group]:
    """Yield groups by runtime, family and task set, without repeated sets of tasks."""
    yielded: set[tuple[str, ...]] = set()
    for runtime, runtime_tasks in grouped(tasks, lambda task: task.batch.runtime).items():
        families = grouped(runtime_tasks, lambda task: task.batch.models)
        sets = grouped(runtime_tasks, lambda task: task.batch.name)
        for group in (runtime_tasks, *families.values(), *sets.values()):
            key = tuple(task.name for task in group)
            if key not in yielded:
                yielded.add(key)
                models = _one({task.batch.models for task in group})
                yield Group((runtime, models, _one({task.batch.name for task in group})), group)


def _one(names: set[str]) -> str:
    return min(names) if len(names) == 1 else ALL


def _chosen_gains(group: Group, name: str) -> list[list[Gain]]:
    """Return the gains of a group's tasks by one kind of plan, a list for each task."""
    return [[task.chosen[name]] for task in group.tasks if name in task.chosen]


def _gain_line(group: Group, name: str, tasks: Sequence[Sequence[Gain]]) -> Line:
    gains = [gain for task in tasks for gain in task]
    measured = [gain.measured for gain in gains]
    verdicts = [gain.verdict for gain in gains]
    return (
        *(WORDS[name], *group.cells, len(gains)),
        *(verdicts.count(verdict) for verdict in ("faster", "equal", "slower")),
        *mean_interval(measured),
        *(statistics.median(measured), min(measured), max(measured)),
        statistics.fmean(gain.all_rounds for gain in gains),
    )


def _expected_line(group: Group, name: str, tasks: Sequence[Sequence[Gain]]) -> Line:
    gains = [gain for task in tasks for gain in task]

    def means(figure: Callable[[Gain], float]) -> list[float]:
        """Return the mean over the plans of each task."""
        return [statistics.fmean(figure(gain) for gain in task) for task in tasks]

    return (
        *(WORDS[name], *group.cells, len(tasks), len(gains)),
        statistics.fmean(means(lambda gain: gain.predicted)),
        statistics.fmean(means(lambda gain: gain.expected.mean)),
        statistics.fmean(means(lambda gain: gain.measured)),
        *mean_interval(means(lambda gain: gain.off)),
        *mean_interval(means(lambda gain: gain.optimism)),
        statistics.fmean(abs(gain.off) for gain in gains),
        statistics.fmean(abs(gain.off) <= NEAR for gain in gains),
        statistics.fmean(gain.inside for gain in gains),
        statistics.fmean(gain.inside_with_noise for gain in gains),
        statistics.fmean(gain.same_sign for gain in gains),
    )


def _task_line(task: TaskGains, gain: Gain) -> Line:
    prediction = gain.task
    return (
        *(
            task.name,
            len(task.task.workload.tables),
            gain.ours.name,
            prediction.types(gain.ours.name),
        ),
        *(prediction.types(THEIRS), gain.theirs.median_ms, gain.ours.median_ms),
        *(gain.predicted, gain.expected.mean, gain.measured, *gain.interval),
        *(task.rounds, task.loaded, gain.verdict),
    )
