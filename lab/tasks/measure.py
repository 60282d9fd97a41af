"""Measures a task set: a calibration, then every task, then some of them a second time.

`lab.tasks.task_set` says what lies in its folder. What is complete is not measured
again, so that the same command goes on where it was interrupted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.architecture import Architecture, architecture_of
from lab.tasks.against import draw_planners_task
from lab.tasks.architectures import draw_architecture_task
from lab.tasks.draw import Task, draw_task
from lab.tasks.drifting import draw_drifting_task
from lab.tasks.models import ARCHITECTURES, DRIFTING, FAMILIES, SHAPES, check_family
from lab.tasks.task_set import (
    CALIBRATION_FILE,
    OLD_FILES,
    SCHEMA,
    TASK_SET_FILE,
    TaskSet,
    load_task_set,
    load_windows,
    part_path,
    part_paths,
    split_plans,
    task_name,
    window_path,
)
from lab.tasks.windows import split_window
from predictor.errors import InfeasibleError, InputError, ShardoptError
from predictor.model.plan import ShardingPlan
from predictor.model.plan_json import plan_from_dict
from predictor.model.workload import Workload
from predictor.units import GIB
from shardopt.bench.job import Job
from shardopt.bench.rows import read_rows, write_rows
from shardopt.bench.run import new_rows, run_bench
from shardopt.config import load_model
from shardopt.config.write import write_model
from shardopt.files import atomic_write_text
from shardopt.measure.machine import environment
from shardopt.measure.store import read_json
from shardopt.ranks.hosts import HOSTS, Link
from shardopt.ranks.rank import RankDiedError
from shardopt.ranks.realtime import Runtime

BACKEND = "gloo"
KINDS = {"environment": dict, "tasks": list}
REMEDY = "restore it, or measure into another folder"
Say = Callable[[str], None]


FAMILY_TASKS: Mapping[str, Callable[[int, TaskSet], Task]] = {
    ARCHITECTURES: draw_architecture_task,
    DRIFTING: draw_drifting_task,
}
"""Families whose models come with plans of their own."""


@dataclass(frozen=True)
class TaskSetSettings:
    """What to measure.

    Args:
        folder: made if it is not there; its parent must be.
        tasks: seeds, in the order measured.
        repeats: those of them to measure a second time, after all others.
        rounds, block: of each task, as `Job` has them.
        link_gbit_s: of the link between two hosts of a rank each; None: all ranks on one host.
        runtime: of the ranks.
        models: the family that models are drawn from.
        random_plans: how many a task has beside TorchRec's plan and ours; None: a dozen plans of
            every structure, or those of the family.
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
    random_plans: int | None = None
    warmup: int | None = None

    @property
    def local_world_size(self) -> int:
        """Ranks that count as one host."""
        return self.world_size if self.link_gbit_s is None else 1

    @property
    def topology(self) -> str:
        """As the file of the task set and reports call it."""
        return "loopback" if self.link_gbit_s is None else f"{self.link_gbit_s:g} Gbit/s"

    @property
    def link(self) -> Link | None:
        """What ranks are joined by."""
        return None if self.link_gbit_s is None else Link(self.link_gbit_s)


def measure_task_set(settings: TaskSetSettings, say: Say) -> None:
    """Calibrate, measure every task, then the repeats; whatever is not complete yet.

    Args:
        say: what is going on, a line at a time.

    Raises:
        InputError: nothing was started: a number is out of range, or the folder is another
            machine's or topology's.
        RankDiedError: tasks whose ranks died or did not fit; all others are measured by then.
    """
    _check(settings)
    _open(settings)
    _calibrate(settings, say)
    failed: dict[str, ShardoptError] = {}
    for title, seed, again in _runs(settings):
        try:
            if again:
                _repeat(settings, title, seed, say)
            else:
                _measure(settings, title, seed, say)
        except (RankDiedError, InfeasibleError) as error:
            failed[title] = error
            say(f"{title}: {error}")
    if failed:
        raise _failure(failed)


def _runs(settings: TaskSetSettings) -> list[tuple[str, int, bool]]:
    """Title, seed and whether it is a repeat, in order."""
    runs: list[tuple[str, int, bool]] = []
    for again, seeds in ((False, settings.tasks), (True, settings.repeats)):
        for at, seed in enumerate(seeds, start=1):
            title = f"task {seed}{' again' if again else ''} ({at} of {len(seeds)})"
            runs.append((title, seed, again))
    return runs


def _failure(failed: dict[str, ShardoptError]) -> RankDiedError:
    title, first = next(iter(failed.items()))
    others = list(failed)[1:]
    more = f"\nso did {', '.join(others)}" if others else ""
    return RankDiedError(f"{title} did not end well: {first}{more}", first.exit_code)


def _check(settings: TaskSetSettings) -> None:
    """Refuse what no task could run under, before minutes are spent on the calibration."""
    cores = len(os.sched_getaffinity(0))
    if not 2 <= settings.world_size <= cores:
        raise InputError(
            f"the number of ranks is {settings.world_size}; it must be at least 2 and at most "
            f"{cores}, the cores that this process may use",
            inputs=("ranks",),
        )
    if settings.link_gbit_s is not None and settings.world_size != HOSTS:
        raise InputError(
            f"a link joins {HOSTS} hosts of one rank, not {settings.world_size} ranks; choose "
            f"{HOSTS}, or leave the link out",
            inputs=("link", "ranks"),
        )
    check_family(settings.models)
    if settings.random_plans is not None:
        if settings.models in FAMILY_TASKS:
            raise InputError(
                f"models '{settings.models}' come with plans of their own, beside which no "
                f"planner's would tell anything; choose another of {', '.join(FAMILIES)}",
                inputs=("models",),
            )
        # a missing torchrec is told now, not after the minutes of the calibration
        from shardopt.training import torchrec_planner  # noqa: F401


def _open(settings: TaskSetSettings) -> None:
    """Write the file of the task set, or add the tasks to the one that is there.

    Raises:
        InputError: it is of another machine, other versions or other ranks; says what differs.
    """
    path = settings.folder / TASK_SET_FILE
    about: dict[str, Any] = {
        "schema": SCHEMA,
        "topology": settings.topology,
        "link_gbit_s": settings.link_gbit_s,
        "world_size": settings.world_size,
        "local_world_size": settings.local_world_size,
        "runtime": settings.runtime.value,
        "block": settings.block,
        "models": settings.models,
        "environment": environment(BACKEND),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "tasks": sorted(set(settings.tasks)),
    }
    if path.exists():
        old = read_json(path, "task set file", SCHEMA, KINDS, REMEDY).data
        _refuse_mixed(path, old, about)
        about = {**old, "tasks": sorted({*old["tasks"], *settings.tasks})}
    else:
        _make(settings.folder)
    unknown = [seed for seed in settings.repeats if seed not in about["tasks"]]
    if unknown:
        raise InputError(
            f"task {unknown[0]} is to be repeated, but it is none of the tasks of "
            f"{settings.folder}; measure it a first time as well",
            inputs=("repeat", "tasks"),
        )
    atomic_write_text(path, json.dumps(about, indent=1) + "\n", update=True)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder}: cannot make this folder: {error.strerror or error}; "
            "give one whose parent is there and writable"
        ) from None


def _refuse_mixed(path: Path, old: Mapping[str, Any], new: dict[str, Any]) -> None:
    keys = ("topology", "link_gbit_s", "world_size", "local_world_size", "block", *OLD_FILES)
    old = {**OLD_FILES, **old}
    was = {**{key: old.get(key) for key in keys}, **_machine(old["environment"])}
    now = {**{key: new[key] for key in keys}, **_machine(new["environment"])}
    for key in {**was, **now}:
        if was.get(key) != now.get(key):
            raise InputError(
                f"{path}: {key} was {was.get(key)!r}, now it is {now.get(key)!r}; one folder holds "
                "one machine, topology, runtime, family of models and set of versions: measure "
                "into another folder, or go back to what it was"
            )


def _machine(about: Mapping[str, Any]) -> dict[str, Any]:
    """An environment; memory in GiB, as some pages come and go from boot to boot."""
    memory = about.get("memory_bytes")
    whole = round(memory / GIB) if isinstance(memory, int) else memory
    rest = {key: value for key, value in about.items() if key != "memory_bytes"}
    return {**rest, "memory in GiB": whole}


def _calibrate(settings: TaskSetSettings, say: Say) -> None:
    """Measure what the calibration's rows lack."""
    from shardopt.extras import needs_torchrec

    with needs_torchrec():
        import fbgemm_gpu  # noqa: F401

        from shardopt.calibrate import points as design
        from shardopt.calibrate import run
    run.check_calibration(BACKEND, settings.world_size, settings.link)
    rows = settings.folder / CALIBRATION_FILE
    wanted = run.CalibrationSettings(
        BACKEND,
        settings.world_size,
        design.QUICK,
        rows,
        settings.link,
        runtime=settings.runtime,
    )
    run.measure(wanted, lambda text: say(f"calibration: {text}"))


def _measure(settings: TaskSetSettings, title: str, seed: int, say: Say) -> None:
    """Measure the rounds that the parts of a task lack."""
    name = task_name(seed)
    if not part_paths(settings.folder, name):
        _draw(settings, title, seed, say)
    paths = part_paths(settings.folder, name)
    for number, path in enumerate(paths, start=1):
        part = title if len(paths) == 1 else f"{title}, part {number} of {len(paths)}"
        _run(settings, part, seed, path, path, say)


def _repeat(settings: TaskSetSettings, title: str, seed: int, say: Say) -> None:
    """Measure the first part of a task again, in a file of its own."""
    first = part_path(settings.folder, task_name(seed), 1)
    if not first.exists() or not read_rows(first).rounds:
        say(f"{title}: left out, as it was never measured a first time")
        return
    _run(settings, title, seed, first, first.with_name(f"{task_name(seed)}.again.rows.json"), say)


def _run(
    settings: TaskSetSettings, title: str, seed: int, plans: Path, path: Path, say: Say
) -> None:
    """Run the plans of one rows file until another has all rounds; it may be the same."""
    if path.exists() and len(read_rows(path).rounds) >= settings.rounds:
        say(f"{title}: complete")
        return
    workload = load_model(settings.folder / f"{task_name(seed)}.yaml")
    found = read_rows(plans)
    chosen = {
        entry["name"]: plan_from_dict(entry["plan"], where=f"{plans}: plan '{entry['name']}'")
        for entry in found.plans
    }
    windows = load_windows(settings.folder, task_name(seed))
    job = _job(settings, seed, workload, chosen, architecture_of(found), windows)
    run_bench(job, path, say=lambda text: say(f"{title}: {text}"))


def _draw(settings: TaskSetSettings, title: str, seed: int, say: Say) -> None:
    """Draw a task, and write its model and its plans: rows files without any round.

    From then on the files say what the task is, since what is drawn changes with the calibration
    and with this code.
    """
    task_set = load_task_set(settings.folder)
    if settings.random_plans is not None:
        task = draw_planners_task(seed, task_set, settings.models, settings.random_plans)
    elif settings.models in FAMILY_TASKS:
        task = FAMILY_TASKS[settings.models](seed, task_set)
    else:
        task = draw_task(seed, task_set.ranks, settings.models)
    memory_bytes = environment(BACKEND)["memory_bytes"]
    parts, left_out = split_plans(task.workload, task.plans, memory_bytes)
    if left_out:
        say(
            f"{title}: left out {', '.join(left_out)}, which with {next(iter(task.plans))} need "
            "more than half of the memory"
        )
    write_model(settings.folder / f"{task_name(seed)}.yaml", task.workload)
    for number, window in enumerate(task.windows, start=2):
        write_model(window_path(settings.folder, task_name(seed), number), window)
    # the first part last: where it is there, all are
    for number, plans in reversed(list(enumerate(parts, start=1))):
        rows = new_rows(_job(settings, seed, task.workload, plans, task.architecture, task.windows))
        write_rows(part_path(settings.folder, task_name(seed), number), rows)


def _job(
    settings: TaskSetSettings,
    seed: int,
    workload: Workload,
    plans: dict[str, ShardingPlan],
    architecture: Architecture | None,
    windows: tuple[Workload, ...],
) -> Job:
    return Job(
        workload,
        plans,
        backend=BACKEND,
        rounds=settings.rounds,
        block=settings.block,
        warmup=settings.warmup,
        seed=seed,
        link=settings.link,
        runtime=settings.runtime,
        **_other_model(workload, architecture),
        data={
            plan: windows[number - 2]
            for plan in plans
            for number in (split_window(plan)[1],)
            if number > 1
        },
    )


def _other_model(workload: Workload, architecture: Architecture | None) -> dict[str, Any]:
    """What a job says of a model that is no DLRM."""
    if architecture is None:
        return {}
    from lab.rankers import RankerBuilder, model_facts

    return {"build": RankerBuilder(architecture), "facts": model_facts(workload, architecture)}
