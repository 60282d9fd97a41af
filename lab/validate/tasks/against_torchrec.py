"""The plan of TorchRec's planner against ours, both run for real: gains predicted and measured.

Batches are those of `python -m lab batch --against`. A gain is the share of the iteration time of
TorchRec's plan that ours saves. What may be left out, and by which rule, is fixed in
`lab.validate.tasks.gains`.
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
FORETOLD = "foretold"
"""Parts of the rows: chosen plans, and those drawn at random."""
NEAR = 0.05
"""Predicted and measured gain agree when they are at most so far apart."""
WORDS = {
    OURS: "shardopt, machine calibrated",
    SHIPPED: "shardopt, shipped profile, where it gives another plan",
    FORETOLD: "shardopt, shipped profile, as it foretells",
    DRAWN: "random plans",
}
ALL = "all"


class Group(NamedTuple):
    """Tasks that share a line: of one runtime; of one family and task set, or of all."""

    cells: tuple[str, str, str]
    tasks: Sequence[TaskGains]


def validate_against_torchrec(folder: Path) -> Report:
    """Predict and time TorchRec's plan and ours in every task of every batch in a folder.

    Raises:
        InputError: there is no batch, or a file of one is broken, of another machine, or without
            the two plans.
    """
    batches, quiet, skipped = load_quiet(folder, "plans against TorchRec's")
    tasks = [find_gains(of.batch, _check_plans(of.task)) for of, _ in quiet]
    groups = list(_groups(tasks))
    suite = SUITES["against-torchrec"]
    chosen = [(g, name, of) for name in (OURS, SHIPPED) for g in groups if (of := _of(g, name))]
    told = [
        (g, FORETOLD, of) for g in groups if (of := [[t.foretold] for t in g.tasks if t.foretold])
    ]
    drawn = [(g, DRAWN, of) for g in groups if (of := [[*t.drawn] for t in g.tasks if t.drawn])]
    loaded = [f"{t.name} ({t.loaded} of {t.rounds + t.loaded} rounds)" for t in tasks if t.loaded]
    return suite.report(
        [row for task in tasks for row in _rows(task)],
        skipped,
        scores=(
            suite.table("against TorchRec's planner", [_gain_line(*of) for of in chosen]),
            suite.table("expected gains", [_expected_line(*of) for of in [*chosen, *told, *drawn]]),
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
    """How many rounds that is, over all tasks and by runtime."""
    said = []
    for name, of in {ALL: tasks, **grouped(tasks, lambda task: task.batch.runtime)}.items():
        dropped = sum(task.loaded for task in of)
        every = dropped + sum(task.rounds for task in of)
        said.append(f"{dropped} of {every} ({percent(dropped / max(1, every))}) {name}")
    return ", ".join(said)


def _check_plans(task: MeasuredTask) -> MeasuredTask:
    names = task.rows.names
    if names[:2] != [THEIRS, OURS]:
        raise InputError(
            f"{task.name}: its plans are {', '.join(names)}, but the first two of a task "
            f"measured by `python -m lab batch --against` are {THEIRS} and {OURS}"
        )
    return task


def _rows(task: TaskGains) -> Iterator[ComparedRow]:
    """A row a plan; TorchRec's once, as the first part has it."""
    family = f"{task.batch.runtime}, {task.batch.models}, {task.batch.topology}"
    for at, part in enumerate(task.parts):
        for row in part.rows()[1 if at else 0 :]:
            drawn = str(row.name["plan"]).startswith(PREFIX)
            yield replace(row, family=family, part=DRAWN if drawn else PLANS)


def _groups(tasks: Sequence[TaskGains]) -> Iterator[Group]:
    """By runtime, then by family, then by task set; no tasks in two lines under one runtime."""
    seen: set[tuple[str, ...]] = set()
    for runtime, of in grouped(tasks, lambda task: task.batch.runtime).items():
        families = grouped(of, lambda task: task.batch.models)
        sets = grouped(of, lambda task: task.batch.name)
        for some in (of, *families.values(), *sets.values()):
            key = tuple(task.name for task in some)
            if key not in seen:
                seen.add(key)
                models = _one({task.batch.models for task in some})
                yield Group((runtime, models, _one({task.batch.name for task in some})), some)


def _one(names: set[str]) -> str:
    return min(names) if len(names) == 1 else ALL


def _of(group: Group, name: str) -> list[list[Gain]]:
    """The gains of a group's tasks by one kind of plan, a list a task."""
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

    def means(of: Callable[[Gain], float]) -> list[float]:
        """The mean over the plans of each task."""
        return [statistics.fmean(of(gain) for gain in task) for task in tasks]

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
    of = gain.task
    return (
        *(task.name, len(task.task.workload.tables), gain.ours.name, of.types(gain.ours.name)),
        *(of.types(THEIRS), gain.theirs.median_ms, gain.ours.median_ms),
        *(gain.predicted, gain.expected.mean, gain.measured, *gain.interval),
        *(task.rounds, task.loaded, gain.verdict),
    )
