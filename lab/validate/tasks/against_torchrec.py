"""The plan of TorchRec's planner against ours, both run for real: gains predicted and measured.

Batches are those of `python -m lab batch --against`. A gain is the share of the iteration time of
TorchRec's plan that ours saves. What may be left out, and by which rule, is fixed in
`lab.validate.tasks.gains`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lab.tasks.against import OURS, SHIPPED, THEIRS
from lab.tasks.plans import PREFIX
from lab.tasks.task_set import MeasuredTask, TaskSet, load_task_sets
from lab.validate.report import Cell, ComparedRow, Report, Scores, mean_interval
from lab.validate.tasks.gains import (
    FEWEST_ROUNDS,
    QUIET,
    Gain,
    TaskGains,
    find_gains,
)
from predictor.errors import InputError
from shardopt.formatting import percent

NAME = "against-torchrec"
PLANS, DRAWN = "plans", "random plans"
"""Parts of the rows: chosen plans, and those drawn at random."""
NEAR = 0.05
"""Predicted and measured gain agree when they are at most so far apart."""
WORDS = {
    OURS: "shardopt, machine calibrated",
    SHIPPED: "shardopt, shipped profile, where it gives another plan",
    DRAWN: "random plans",
}
ALL = "all"


@dataclass(frozen=True)
class Group:
    """Tasks that share a line: of one runtime; of one family and task set, or of all."""

    runtime: str
    models: str
    batch: str
    tasks: tuple[TaskGains, ...]

    @property
    def cells(self) -> tuple[str, str, str]:
        """What names it."""
        return self.runtime, self.models, self.batch


def validate_against_torchrec(folder: Path) -> Report:
    """Predict and time TorchRec's plan and ours in every task of every batch in a folder.

    Raises:
        InputError: there is no batch, or a file of one is broken, of another machine, or without
            the two plans.
    """
    batches = load_task_sets(
        folder,
        "a folder of batches that `python -m lab batch --against` has measured",
    )
    found = [
        (batch, task, find_gains(batch, _check_plans(task)))
        for batch in batches
        for task in batch.tasks
    ]
    tasks = [gains for _, _, gains in found if gains is not None]
    groups = list(_groups(tasks))
    return Report(
        NAME,
        tuple(row for task in tasks for row in _rows(task)),
        headline=PLANS,
        held_out=(DRAWN,),
        skipped=(
            *(text for batch in batches for text in batch.skipped),
            *(_too_loaded(batch, task) for batch, task, gains in found if gains is None),
        ),
        notes=(
            "both planners had the same model, pooling factors and memory; TorchRec's ran with its "
            "defaults, including its default bandwidths",
            "measured: both plans interleaved in one process group; a gain is the median over "
            "rounds, with a sign-test interval of at least 95 %",
            f"rounds in which other work kept more than {QUIET:g} of a core busy are in the files "
            f"but are not counted: {_dropped(tasks)}. A task needs {FEWEST_ROUNDS} others. "
            f"Measured in part under load: {_loaded(tasks)}",
            "predicted from the calibration of the batch, without using any iteration of a task",
            "from, to: 95 % interval of the mean by Student's t over tasks; tasks are what is "
            "drawn, so plans of one task count once",
        ),
        scores=(
            _summary(groups),
            _expected(groups),
            _by_task(tasks),
            _calibrated(batches),
        ),
    )


def _too_loaded(batch: TaskSet, task: MeasuredTask) -> str:
    quiet = sum((r["other_cores"] or 0.0) <= QUIET for r in task.rows.rounds)
    return (
        f"{batch.name} {task.name}: only {quiet} of {len(task.rows.rounds)} rounds without other "
        f"work, and {FEWEST_ROUNDS} are needed; measure more rounds with the same command"
    )


def _dropped(tasks: Sequence[TaskGains]) -> str:
    """How many rounds that is, over all tasks and by runtime."""
    groups = {"all": tasks} | {
        runtime: [t for t in tasks if t.batch.runtime == runtime]
        for runtime in dict.fromkeys(t.batch.runtime for t in tasks)
    }
    counted = {
        name: (sum(t.loaded for t in of), sum(t.rounds for t in of)) for name, of in groups.items()
    }
    return ", ".join(
        f"{dropped} of {dropped + kept} ({percent(dropped / max(1, dropped + kept))}) {name}"
        for name, (dropped, kept) in counted.items()
    )


def _loaded(tasks: Sequence[TaskGains]) -> str:
    found = [f"{t.name} ({t.loaded} of {t.rounds + t.loaded} rounds)" for t in tasks if t.loaded]
    return ", ".join(found) or "none"


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
    for runtime in dict.fromkeys(t.batch.runtime for t in tasks):
        of = [t for t in tasks if t.batch.runtime == runtime]
        families = {m: [t for t in of if t.batch.models == m] for m in _each_model(of)}
        sets = {b: [t for t in of if t.batch.name == b] for b in _each_batch(of)}
        groups = [
            Group(runtime, _one(_each_model(of)), _one(_each_batch(of)), tuple(of)),
            *(Group(runtime, m, _one(_each_batch(ts)), tuple(ts)) for m, ts in families.items()),
            *(Group(runtime, _one(_each_model(ts)), b, tuple(ts)) for b, ts in sets.items()),
        ]
        for group in groups:
            key = tuple(t.name for t in group.tasks)
            if key not in seen:
                seen.add(key)
                yield group


def _each_model(tasks: Iterable[TaskGains]) -> list[str]:
    return list(dict.fromkeys(t.batch.models for t in tasks))


def _each_batch(tasks: Iterable[TaskGains]) -> list[str]:
    return list(dict.fromkeys(t.batch.name for t in tasks))


def _one(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ALL


GROUP_COLUMNS = (
    *(("plans of", "text"), ("runtime", "text"), ("models", "text"), ("task set", "text")),
    ("tasks", "count"),
)


def _summary(groups: Sequence[Group]) -> Scores:
    columns = (
        *GROUP_COLUMNS,
        *(("faster", "count"), ("equal", "count"), ("slower", "count"), ("mean gain", "signed")),
        *(("from", "signed"), ("to", "signed"), ("median gain", "signed"), ("least", "signed")),
        *(("largest", "signed"), ("mean, all rounds", "signed")),
    )
    rows: list[tuple[Cell, ...]] = []
    for group, name, gains in _chosen(groups):
        measured = [gain.measured for gain in gains]
        verdicts = [gain.verdict for gain in gains]
        rows.append(
            (
                *(WORDS[name], *group.cells, len(gains)),
                *(verdicts.count(verdict) for verdict in ("faster", "equal", "slower")),
                *mean_interval(measured),
                *(statistics.median(measured), min(measured), max(measured)),
                statistics.fmean(gain.all_rounds for gain in gains),
            )
        )
    return Scores(
        "against TorchRec's planner",
        columns,
        tuple(rows),
        "Gain: share of the time of TorchRec's plan that is saved. Equal: its interval holds 0, so "
        "noise explains it. All rounds: with those beside other work.",
    )


def _chosen(groups: Sequence[Group]) -> Iterator[tuple[Group, str, list[Gain]]]:
    """The gains of a group by plan, where there are any."""
    for name in (OURS, SHIPPED):
        for group in groups:
            gains = [task.chosen[name] for task in group.tasks if name in task.chosen]
            if gains:
                yield group, name, gains


def _expected(groups: Sequence[Group]) -> Scores:
    columns = (
        *GROUP_COLUMNS,
        *(("plans", "count"), ("mean predicted", "signed"), ("mean expected", "signed")),
        ("mean measured", "signed"),
        *(("expected - measured", "signed"), ("from", "signed"), ("to", "signed")),
        *(("optimism", "signed"), ("optimism from", "signed"), ("optimism to", "signed")),
        *(("mean distance", "share"), (f"within {100 * NEAR:.0f} points", "share")),
        *(("in the interval", "share"), ("same sign", "share")),
    )
    by_task = [(group, name, [[gain] for gain in gains]) for group, name, gains in _chosen(groups)]
    for group in groups:
        drawn = [list(task.drawn) for task in group.tasks if task.drawn]
        if drawn:
            by_task.append((group, DRAWN, drawn))
    rows = tuple(
        (WORDS[name], *group.cells, *_expected_line(tasks)) for group, name, tasks in by_task
    )
    return Scores(
        "expected gains",
        columns,
        rows,
        "Expected: the mean under the errors that the costs may have, as plan prints it; in the "
        "interval: its 90 % interval meets that of the measured gain. Optimism: share by which a "
        "plan's time over that of TorchRec's plan is predicted too short. Distance: between "
        "expected and measured gain. Same sign: or measured as equal. Of random plans nothing was "
        "chosen, so what ours have beyond them comes from choosing.",
    )


def _expected_line(tasks: Sequence[Sequence[Gain]]) -> tuple[Cell, ...]:
    """Figures of gains in lists, one for each task."""
    gains = [gain for task in tasks for gain in task]
    return (
        *(len(tasks), len(gains)),
        statistics.fmean(_means(tasks, "predicted")),
        statistics.fmean(_means(tasks, "expected_mean")),
        statistics.fmean(_means(tasks, "measured")),
        *mean_interval(_means(tasks, "off")),
        *mean_interval(_means(tasks, "optimism")),
        statistics.fmean(abs(gain.off) for gain in gains),
        statistics.fmean(abs(gain.off) <= NEAR for gain in gains),
        statistics.fmean(gain.within for gain in gains),
        statistics.fmean(gain.same_sign for gain in gains),
    )


def _means(tasks: Sequence[Sequence[Gain]], what: str) -> list[float]:
    """The mean over the plans of each task."""
    return [statistics.fmean(getattr(gain, what) for gain in task) for task in tasks]


def _by_task(tasks: Sequence[TaskGains]) -> Scores:
    columns = (
        *(("task", "text"), ("tables", "count"), ("plan", "text"), ("types", "text")),
        *(("TorchRec's types", "text"), ("TorchRec's ms", "ms"), ("ms", "ms")),
        *(("predicted gain", "signed"), ("expected", "signed"), ("measured gain", "signed")),
        ("from", "signed"),
        *(("to", "signed"), ("rounds", "count"), ("under load", "count"), ("verdict", "text")),
    )
    rows = tuple(
        _task_row(task, task.chosen[name])
        for name in (OURS, SHIPPED)
        for task in tasks
        if name in task.chosen
    )
    return Scores("tasks", columns, rows, "From, to: the interval of the measured gain.")


def _task_row(task: TaskGains, gain: Gain) -> tuple[Cell, ...]:
    of = gain.task
    return (
        *(task.name, len(task.task.workload.tables), gain.ours.name, of.types(gain.ours.name)),
        *(of.types(THEIRS), gain.theirs.median_ms, gain.ours.median_ms),
        *(gain.predicted, gain.expected_mean, gain.measured, *gain.interval),
        *(task.rounds, task.loaded, gain.verdict),
    )


def _calibrated(batches: Sequence[TaskSet]) -> Scores:
    columns = (
        *(("batch", "text"), ("runtime", "text"), ("models", "text"), ("calibrated", "text")),
        *(("topology", "text"), ("tasks", "count")),
    )
    rows = tuple(
        (
            *(b.name, b.runtime, b.models, f"{b.calibrated:%Y-%m-%d %H:%M} UTC"),
            *(b.topology, len(b.tasks)),
        )
        for b in batches
    )
    return Scores("batches", columns, rows)
