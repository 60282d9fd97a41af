"""Measurement of a task set: a calibration, then every task, then some of them a second time.

A task is drawn from its seed (`lab.tasks.against`), or has the model and plans of another task set.
`lab.tasks.task_set` describes its folder. Complete parts are not measured again, so the same
command continues after an interruption.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.architecture import architecture_of
from lab.tasks.against import draw_task
from lab.tasks.models import SHAPES, draw_model
from lab.tasks.task_set import (
    CALIBRATION_FILE,
    OLD_FILES,
    SCHEMA,
    TASK_SET_FILE,
    load_task_set,
    load_windows,
    machine_of,
    part_path,
    part_paths,
    read_about,
    read_plans,
    split_plans,
    split_window,
    task_name,
)
from predictor.errors import InfeasibleError, InputError, ShardoptError
from predictor.model.plan import ShardingPlan
from predictor.model.workload import Workload
from shardopt.bench.job import Job
from shardopt.bench.rows import read_rows, write_rows
from shardopt.bench.run import new_rows, run_bench
from shardopt.config import load_model
from shardopt.config.write import write_model
from shardopt.files import atomic_write_text
from shardopt.measure.machine import environment
from shardopt.ranks.hosts import HOSTS, Link
from shardopt.ranks.rank import RankDiedError
from shardopt.ranks.realtime import Runtime

BACKEND = "gloo"
Say = Callable[[str], None]


@dataclass(frozen=True)
class TaskSetSettings:
    """Settings of a task set.

    Args:
        folder: created if missing; its parent must exist.
        tasks: seeds, in the order measured.
        repeats: tasks to measure a second time, after all others.
        rounds, block: as in `Job`, for each task.
        link_gbit_s: rate of the link between two hosts of a rank each; None: all on one host.
        runtime: runtime of the ranks.
        models: family that models are drawn from.
        random_plans: number of random plans of a task.
        like: another task set with the models and plans of the tasks; None: they are drawn.
        warmup: rounds before measuring; None lets the samples decide.
    """

    folder: Path
    tasks: Sequence[int]
    repeats: Sequence[int] = ()
    rounds: int = 10
    block: int = 6
    world_size: int = 2
    link_gbit_s: float | None = None
    runtime: Runtime = Runtime.PLAIN
    models: str = SHAPES
    random_plans: int = 12
    like: Path | None = None
    warmup: int | None = None

    @property
    def link(self) -> Link | None:
        return None if self.link_gbit_s is None else Link(self.link_gbit_s)

    def job(self, seed: int, workload: Workload, plans: dict[str, ShardingPlan]) -> Job:
        return Job(
            workload,
            plans,
            backend=BACKEND,
            rounds=self.rounds,
            block=self.block,
            warmup=self.warmup,
            seed=seed,
            link=self.link,
            runtime=self.runtime,
        )


def measure_task_set(settings: TaskSetSettings, say: Say) -> None:
    """Calibrate, measure every task, then the repeats, as far as they are not complete.

    Args:
        say: receives a line of progress.

    Raises:
        InputError: a number is out of range, or the folder is of another machine or topology;
            nothing was started.
        RankDiedError: tasks whose ranks died or did not fit; all others are measured.
    """
    _check(settings)
    _open(settings)
    _calibrate(settings, say)
    failed: dict[str, ShardoptError] = {}
    for seeds, again, run in (
        (settings.tasks, "", _measure),
        (settings.repeats, " again", _repeat),
    ):
        for at, seed in enumerate(seeds, start=1):
            title = f"task {seed}{again} ({at} of {len(seeds)})"
            try:
                run(settings, title, seed, say)
            except (RankDiedError, InfeasibleError) as error:
                failed[title] = error
                say(f"{title}: {error}")
    if failed:
        (title, first), *remaining = failed.items()
        more = f"\nso did {', '.join(name for name, _ in remaining)}" if remaining else ""
        raise RankDiedError(f"{title} did not end well: {first}{more}", first.exit_code)


def _check(settings: TaskSetSettings) -> None:
    """Refuse impossible settings before minutes are spent on the calibration."""
    cores, ranks = len(os.sched_getaffinity(0)), settings.world_size
    if not 2 <= ranks <= cores:
        raise InputError(
            f"the number of ranks is {ranks}; it must be at least 2 and at most {cores}, the cores "
            "that this process may use",
            inputs=("ranks",),
        )
    if settings.link_gbit_s is not None and ranks != HOSTS:
        raise InputError(
            f"a link joins {HOSTS} hosts of one rank, not {ranks} ranks; choose {HOSTS}, or leave "
            "the link out",
            inputs=("link", "ranks"),
        )
    if settings.like is None:
        draw_model(settings.models, 0)
        # a missing torchrec is reported now, not after the minutes of the calibration
        from shardopt.training import torchrec_planner  # noqa: F401

        return
    there = read_about(settings.like)
    lacks = [seed for seed in settings.tasks if not part_paths(settings.like, task_name(seed))]
    if lacks:
        raise InputError(
            f"{settings.like}: has no plans of task {lacks[0]}; it has tasks {there['tasks']}",
            inputs=("tasks",),
        )


def _open(settings: TaskSetSettings) -> None:
    """Write the file of the task set, or add the tasks to an existing one.

    Raises:
        InputError: it is of another machine, other versions or other ranks.
    """
    path, link = settings.folder / TASK_SET_FILE, settings.link_gbit_s
    like = settings.like
    about: dict[str, Any] = {
        "schema": SCHEMA,
        "topology": "loopback" if link is None else f"{link:g} Gbit/s",
        "link_gbit_s": link,
        "world_size": settings.world_size,
        "local_world_size": settings.world_size if link is None else 1,
        "runtime": settings.runtime.value,
        "block": settings.block,
        "models": settings.models if like is None else read_about(like)["models"],
        "environment": environment(BACKEND),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "tasks": sorted(set(settings.tasks)),
    }
    if path.exists():
        old = read_about(settings.folder)
        _refuse_mixed(path, old, about)
        about = {**old, "tasks": sorted({*old["tasks"], *settings.tasks})}
    else:
        try:
            settings.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{settings.folder}: cannot make this folder: {error.strerror or error}; "
                "give one whose parent is there and writable"
            ) from None
    unknown = [seed for seed in settings.repeats if seed not in about["tasks"]]
    if unknown:
        raise InputError(
            f"task {unknown[0]} is to be repeated, but it is none of the tasks of "
            f"{settings.folder}; measure it a first time as well",
            inputs=("repeat", "tasks"),
        )
    atomic_write_text(path, json.dumps(about, indent=1) + "\n", update=True)


def _refuse_mixed(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    keys = ("topology", "link_gbit_s", "world_size", "local_world_size", "block", *OLD_FILES)
    was, now = (
        {**{key: about.get(key) for key in keys}, **machine_of(about["environment"])}
        for about in (old, new)
    )
    for key in {**was, **now}:
        if was.get(key) != now.get(key):
            raise InputError(
                f"{path}: {key} was {was.get(key)!r}, now it is {now.get(key)!r}; one folder holds "
                "one machine, topology, runtime, family of models and set of versions: measure "
                "into another folder, or go back to what it was"
            )


def _calibrate(settings: TaskSetSettings, say: Say) -> None:
    """Measure the missing rows of the calibration."""
    from shardopt.extras import needs_torchrec

    with needs_torchrec():
        import fbgemm_gpu  # noqa: F401

        from shardopt.calibrate import points as design
        from shardopt.calibrate import run
    rows = settings.folder / CALIBRATION_FILE
    calibration = design.CalibrationSettings(
        BACKEND,
        settings.world_size,
        design.QUICK,
        rows,
        settings.link,
        runtime=settings.runtime,
    )
    run.check_calibration(calibration)
    run.measure(calibration, lambda text: say(f"calibration: {text}"))


def _measure(settings: TaskSetSettings, title: str, seed: int, say: Say) -> None:
    """Measure the missing rounds of the parts of a task."""
    name = task_name(seed)
    if not part_paths(settings.folder, name):
        _draw(settings, title, seed, say)
    paths = part_paths(settings.folder, name)
    for number, path in enumerate(paths, start=1):
        part = title if len(paths) == 1 else f"{title}, part {number} of {len(paths)}"
        _run(settings, part, seed, path, path, say)


def _repeat(settings: TaskSetSettings, title: str, seed: int, say: Say) -> None:
    """Measure the first part of a task again, into its own file."""
    first = part_path(settings.folder, task_name(seed), 1)
    if not first.exists() or not read_rows(first).rounds:
        say(f"{title}: left out, as it was never measured a first time")
        return
    _run(settings, title, seed, first, first.with_name(f"{task_name(seed)}.again.rows.json"), say)


def _run(
    settings: TaskSetSettings, title: str, seed: int, plans: Path, path: Path, say: Say
) -> None:
    """Run the plans of one rows file until a file, possibly the same, has all rounds."""
    if path.exists() and len(read_rows(path).rounds) >= settings.rounds:
        say(f"{title}: complete")
        return
    job = _job(settings, seed, settings.folder, plans)
    run_bench(job, path, say=lambda text: say(f"{title}: {text}"))


def _draw(settings: TaskSetSettings, title: str, seed: int, say: Say) -> None:
    """Write the model and the plans of a task: rows files without any round.

    From then on the files define the task, since draws change with the calibration and with this
    code.
    """
    name, like = task_name(seed), settings.like
    if like is not None:
        # a model, its windows, and dense ops beside them
        for source in like.glob(f"{name}.*"):
            if not source.name.endswith(".rows.json"):
                atomic_write_text(settings.folder / source.name, source.read_text(encoding="utf-8"))
        jobs = [_job(settings, seed, like, path) for path in part_paths(like, name)]
    else:
        task_set = load_task_set(settings.folder)
        workload, plans = draw_task(seed, task_set, settings.models, settings.random_plans)
        write_model(settings.folder / f"{name}.yaml", workload)
        parts, left_out = split_plans(workload, plans, environment(BACKEND)["memory_bytes"])
        if left_out:
            say(
                f"{title}: left out {', '.join(left_out)}, which with {next(iter(plans))} "
                "need more than half of the memory"
            )
        jobs = [settings.job(seed, workload, part) for part in parts]
    # the first part comes last: if it exists, all do
    for number, job in reversed(list(enumerate(jobs, start=1))):
        write_rows(part_path(settings.folder, name, number), new_rows(job))


def _job(settings: TaskSetSettings, seed: int, folder: Path, part: Path) -> Job:
    name = task_name(seed)
    workload, rows = load_model(folder / f"{name}.yaml"), read_rows(part)
    plans, windows = read_plans(part, rows, workload), load_windows(folder, name)
    numbers = {plan: split_window(plan)[1] for plan in plans}
    data = {plan: windows[number - 2] for plan, number in numbers.items() if number > 1}
    job = replace(settings.job(seed, workload, plans), data=data)
    architecture = architecture_of(rows)
    if architecture is None:
        return job
    from lab.rankers import RankerBuilder, model_facts

    return replace(
        job, build=RankerBuilder(architecture), facts=model_facts(workload, architecture)
    )
