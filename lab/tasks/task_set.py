"""A set of measured tasks, with the calibration made just before it.

A task set is a folder, schema ``shardopt.lab-batch/1``: ``batch.json`` (topology, machine, tasks),
``calibration.rows.csv`` (`shardopt.calibrate.rows`), and for each task ``task-007.yaml`` (model),
``task-007.rows.json`` (`shardopt.bench.rows`), where there are more plans than run at once
``task-007.part-2.rows.json`` and so on, where a model has windows of data
``task-007.window-2.yaml`` and so on, and, where the plans of the first file were measured a
second time, ``task-007.again.rows.json``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import check_plan
from predictor.model.plan_json import plan_from_dict
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from predictor.units import GIB
from shardopt.bench.job import rank_bytes
from shardopt.bench.rows import BenchRows
from shardopt.bench.rows import read_rows as read_bench
from shardopt.calibrate.fitting import CalibratedProfile
from shardopt.calibrate.points import REFERENCE_KERNELS as KERNELS
from shardopt.calibrate.profile import build_profile
from shardopt.calibrate.rows import Measurement, Origin
from shardopt.calibrate.rows import read_rows as read_calibration
from shardopt.config import load_model
from shardopt.measure.store import read_json
from shardopt.ranks.realtime import Runtime

MEMORY_SHARE = 0.5
"""Of the machine's memory: what the plans of a part may need on all ranks."""
MAX_AT_ONCE = 25
"""Plans of a part, so that no plan is timed minutes from the first one."""


def split_plans(
    workload: Workload, plans: Mapping[str, ShardingPlan], memory_bytes: float
) -> tuple[list[dict[str, ShardingPlan]], list[str]]:
    """The parts, in the order of the plans, and the names of the plans that fit into none.

    Args:
        plans: the first is in every part.
        memory_bytes: of the machine.
    """
    limit = MEMORY_SHARE * memory_bytes
    first = next(iter(plans))
    needs = {name: _bytes(workload, plans[first], plan) for name, plan in plans.items()}
    # what a rank holds beside its plans, and the first plan, are counted once a part
    alone = needs.pop(first)
    parts: list[dict[str, ShardingPlan]] = []
    left_out: list[str] = []
    room = 0.0
    for name, extra in needs.items():
        if alone + extra > limit:
            left_out.append(name)
            continue
        if not parts or extra > room or len(parts[-1]) == MAX_AT_ONCE:
            parts.append({first: plans[first]})
            room = limit - alone
        parts[-1][name] = plans[name]
        room -= extra
    return parts or [{first: plans[first]}], left_out


def _bytes(workload: Workload, first: ShardingPlan, plan: ShardingPlan) -> int:
    """Of the first plan with all that a rank holds; of another, what it adds to that."""
    alone = sum(rank_bytes(workload, [first]))
    return alone if plan is first else sum(rank_bytes(workload, [first, plan])) - alone


def part_paths(folder: Path, name: str) -> list[Path]:
    """The rows files of a task that are there, first part first."""
    found = [path for path in [part_path(folder, name, 1)] if path.is_file()]
    while found and (path := part_path(folder, name, len(found) + 1)).is_file():
        found.append(path)
    return found


def part_path(folder: Path, name: str, number: int) -> Path:
    """``task-007.rows.json`` of the first part, ``task-007.part-2.rows.json`` of the second."""
    return folder / (f"{name}.rows.json" if number == 1 else f"{name}.part-{number}.rows.json")


SCHEMA = "shardopt.lab-batch/1"
"""Of the file that describes a task set."""
TASK_SET_FILE = "batch.json"
CALIBRATION_FILE = "calibration.rows.csv"
OLD_FILES = {"models": "random", "runtime": Runtime.TUNED.value}
"""What a file of a task set means that does not say it."""
BASE = "cpu-gloo"
FBGEMM = ("fbgemm_gpu", "fbgemm_gpu-cpu", "fbgemm-gpu-cpu", "fbgemm-gpu")
MACHINE = ("system", "processor", "machine", "torch", "torchrec", *FBGEMM)
"""What may not differ within a task set, apart from memory in whole GiB."""


def task_name(seed: int) -> str:
    """``task-007``, as the files of a task are called."""
    return f"task-{seed:03d}"


@dataclass(frozen=True)
class MeasuredTask:
    """One model with its plans, measured side by side.

    Args:
        plans: of all parts.
        rows: of the first part.
        again: its plans measured a second time; None where they were not.
        more: rows of further parts, each with the first plan and others.
        windows: the same model with other data, which plans were run in too.
    """

    number: int
    workload: Workload
    plans: dict[str, ShardingPlan]
    rows: BenchRows
    again: BenchRows | None
    more: tuple[BenchRows, ...] = ()
    windows: tuple[Workload, ...] = ()

    @property
    def name(self) -> str:
        """As its files are called."""
        return task_name(self.number)

    @property
    def at(self) -> datetime:
        """When the middle round started."""
        middle = len(self.rows.rounds) // 2
        return _time(self.rows.rounds[middle]["at"], f"{self.name}.rows.json: rounds[{middle}]: at")


@dataclass(frozen=True)
class TaskSet:
    """Tasks of one machine, one topology and one calibration.

    Args:
        topology: as batch.json calls it.
        models: the family of the tasks' models.
        runtime: what the ranks ran in.
        made: profile of the calibration, with its held-out errors.
        reference_ms: reference kernels during the calibration.
        calibrated: when the calibration ran the last reference kernel, which tell of drift.
        skipped: tasks left out, a line each.
    """

    name: str
    topology: str
    models: str
    runtime: str
    ranks: Topology
    made: CalibratedProfile
    reference_ms: dict[str, float]
    calibrated: datetime
    tasks: tuple[MeasuredTask, ...]
    skipped: tuple[str, ...]


def task_set_folders(folder: Path) -> list[Path]:
    """Sub-folders that hold a task set, sorted by name."""
    return sorted(path.parent for path in folder.glob(f"*/{TASK_SET_FILE}"))


def load_task_sets(folder: Path, hint: str) -> list[TaskSet]:
    """Every task set in a folder, in the order of their names.

    Args:
        hint: which folder to give, for the message where there is none.

    Raises:
        InputError: there is no task set, or a file of one is broken, or of another machine.
    """
    folders = task_set_folders(folder)
    if not folders:
        found = "holds no task set" if folder.is_dir() else "no such directory"
        raise InputError(f"{folder}: {found}; give {hint}", inputs=("data",))
    return [load_task_set(path) for path in folders]


def load_task_set(folder: Path) -> TaskSet:
    """Read and check a task set, and fit its profile.

    Raises:
        InputError: a file is missing or broken, or rows are of another machine or model.
    """
    about = _read_about(folder / TASK_SET_FILE)
    environment = about["environment"]
    path = folder / CALIBRATION_FILE
    if not path.is_file():
        raise InputError(f"{path}: no such file; a task set has the calibration made before it")
    origin, measured = read_calibration(path)
    _refuse_mixed(path, origin, environment)
    _refuse_runtimes(path, measured, about["runtime"])
    ranks, memory_bytes = about["world_size"], environment["memory_bytes"]
    base = load_hardware(BASE)
    link = about.get("link_gbit_s")
    made = build_profile(measured, origin, base, folder.name, ranks, memory_bytes / GIB, link)
    topology = Topology.uniform(
        ranks,
        about["local_world_size"],
        hbm_bytes=made.profile.hbm_bytes,
        ddr_bytes=made.profile.ddr_bytes,
    )
    tasks, skipped = _tasks(folder, about)
    return TaskSet(
        folder.name,
        about["topology"],
        about["models"],
        about["runtime"],
        topology,
        made,
        _reference(path, measured, link),
        max(_time(r.date, f"{path}: date") for r in measured if r.point.family == "reference"),
        tuple(tasks),
        tuple(skipped),
    )


def _reference(
    path: Path, measured: list[Measurement], link_gbit_s: float | None
) -> dict[str, float]:
    try:
        return calibration_reference(measured, link_gbit_s)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _read_about(path: Path) -> Mapping[str, Any]:
    kinds = {
        "topology": str,
        "world_size": int,
        "local_world_size": int,
        "environment": dict,
        "tasks": list,
    }
    data = {**OLD_FILES, **read_json(path, "task set file", SCHEMA, kinds, "restore it").data}
    if not isinstance(data["environment"].get("memory_bytes"), int):
        raise InputError(f"{path}: environment: 'memory_bytes' is missing or malformed")
    apart = data["world_size"] > data["local_world_size"]
    if apart != isinstance(data.get("link_gbit_s"), int | float):
        raise InputError(
            f"{path}: link_gbit_s is {data.get('link_gbit_s')!r} with {data['local_world_size']} "
            f"of {data['world_size']} ranks a host; ranks on several hosts alone have a link"
        )
    return data


def _refuse_mixed(path: Path, origin: Origin, environment: Mapping[str, Any]) -> None:
    """The calibration must be of the machine and the versions that measured the tasks."""
    processor = environment.get("processor") or environment.get("machine")
    memory = f"{environment['memory_bytes'] / GIB:.0f} GiB"
    fbgemm = next((environment[name] for name in FBGEMM if name in environment), "none")
    versions = f"torch {environment.get('torch', 'none')}, fbgemm {fbgemm}"
    machine = origin.machine.split(", ")
    same_machine = origin.machine.startswith(f"{processor}, ") and memory in machine
    if not same_machine or origin.versions != versions:
        raise InputError(
            f"{path}: calibrated on '{origin.machine}' with {origin.versions}, but {TASK_SET_FILE} "
            f"says '{processor}', {memory}, {versions}; rows of different machines or versions "
            "are never mixed: calibrate again where the tasks ran"
        )


def _refuse_runtimes(path: Path, measured: Sequence[Measurement], runtime: str) -> None:
    """The calibration must be of the runtime that the tasks ran in."""
    other = next((row.runtime for row in measured if row.runtime != runtime), None)
    if other is not None:
        raise InputError(
            f"{path}: calibrated in the {other} runtime, but {TASK_SET_FILE} says {runtime}; times "
            "of one hold for that one alone: measure into another folder"
        )


def _tasks(folder: Path, about: Mapping[str, Any]) -> tuple[list[MeasuredTask], list[str]]:
    tasks: list[MeasuredTask] = []
    skipped = []
    for number in about["tasks"]:
        paths = part_paths(folder, task_name(number))
        parts = [(path, _read_rows(path, about)) for path in paths]
        if not parts:
            skipped.append(f"{folder.name} {task_name(number)}: not measured")
        skipped += [
            f"{folder.name} {path.name.removesuffix('.rows.json')}: no round was finished"
            for path, rows in parts
            if not rows.rounds
        ]
        if parts and parts[0][1].rounds:
            measured = [(path, rows) for path, rows in parts if rows.rounds]
            tasks.append(_task(folder, number, measured, about))
    return tasks, skipped


def _task(
    folder: Path, number: int, parts: list[tuple[Path, BenchRows]], about: Mapping[str, Any]
) -> MeasuredTask:
    workload = load_model(folder / f"{task_name(number)}.yaml")
    plans: dict[str, ShardingPlan] = {}
    for path, rows in parts:
        plans |= read_plans(path, rows, workload)
    again = folder / f"{task_name(number)}.again.rows.json"
    second = _read_rows(again, about) if again.is_file() else None
    second = second if second and second.rounds else None
    first, *more = (rows for _, rows in parts)
    windows = load_windows(folder, task_name(number))
    return MeasuredTask(number, workload, plans, first, second, tuple(more), windows)


def load_windows(folder: Path, name: str) -> tuple[Workload, ...]:
    """The windows of a task's model after the first."""
    found: list[Workload] = []
    while (path := folder / f"{name}.window-{len(found) + 2}.yaml").is_file():
        found.append(load_model(path))
    return tuple(found)


_MARK = " @"


def in_window(name: str, number: int) -> str:
    """A plan's name on the batches of a window, from 1, such as ``nominal @2``."""
    return f"{name}{_MARK}{number}"


def split_window(name: str) -> tuple[str, int]:
    """A plan's own name and its window; without one it is the first."""
    plain, mark, number = name.rpartition(_MARK)
    return (plain, int(number)) if mark and number.isdecimal() else (name, 1)


def read_plans(path: Path, rows: BenchRows, workload: Workload) -> dict[str, ShardingPlan]:
    """The plans of a rows file by name.

    Raises:
        InputError: they do not fit the model, or it has changed since.
    """
    digest = rows.model.get("sha256")
    if digest and digest != workload.sha256:
        model = f"{path.name.partition('.')[0]}.yaml"
        raise InputError(f"{path}: its rows are of another version of {model}")
    found = {}
    for entry in rows.plans:
        where = f"{path}: plan '{entry['name']}'"
        found[entry["name"]] = check_plan(
            plan_from_dict(entry["plan"], where=where), workload, where=where
        )
    return found


def _read_rows(path: Path, about: Mapping[str, Any]) -> BenchRows:
    """Rows of a task, if the task set's machine measured them on its ranks in its runtime."""
    rows = read_bench(path)
    found = rows.settings.get("world_size"), rows.settings["runtime"]
    wanted = about["world_size"], about["runtime"]
    if found != wanted:
        raise InputError(
            f"{path}: {found[0]} ranks in the {found[1]} runtime, but {TASK_SET_FILE} says "
            f"{wanted[0]} in the {wanted[1]} one; measure the task again"
        )
    machine = _machine(about["environment"])
    for session in rows.sessions:
        of = _machine(session["environment"])
        if of != machine:
            key = next(k for k in machine if of[k] != machine[k])
            raise InputError(
                f"{path}: {key} is {of[key]!r}, but {TASK_SET_FILE} says {machine[key]!r}; rows "
                "of different machines or versions are never mixed: measure the task again"
            )
    return rows


def _machine(environment: Mapping[str, Any]) -> dict[str, object]:
    memory = environment.get("memory_bytes")
    gib = round(memory / GIB) if isinstance(memory, int | float) else memory
    return {**{key: environment.get(key) for key in MACHINE}, "memory in GiB": gib}


def _time(text: str, where: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise InputError(f"{where}: {text!r} is no time as 2026-01-31T12:00:00Z") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def calibration_reference(
    rows: Sequence[Measurement], link_gbit_s: float | None = None
) -> dict[str, float]:
    """Median over start, middle and end of the calibration, ms, by kernel.

    Args:
        link_gbit_s: of the link whose rows count; None: those within the machine.

    Raises:
        InputError: a kernel is not there.
    """
    found = [
        (row.point.params.get("kernel"), row.median_us * 1e-3)
        for row in rows
        if row.point.family == "reference" and row.point.params.get("link_gbit_s") == link_gbit_s
    ]
    by_kernel = {kernel: [ms for name, ms in found if name == kernel] for kernel in KERNELS}
    return _medians(by_kernel, "the calibration")


def task_reference(rows: BenchRows) -> dict[str, float]:
    """Median over all rounds, ranks and repeats of a task, ms, by kernel.

    Raises:
        InputError: a kernel is not there.
    """
    by_kernel = {
        kernel: [
            sample
            for measured in rows.rounds
            for rank in measured["reference_ms"].get(kernel, [])
            for sample in rank
        ]
        for kernel in KERNELS
    }
    return _medians(by_kernel, "the task")


def _medians(samples: Mapping[str, Sequence[float]], where: str) -> dict[str, float]:
    lacks = [kernel for kernel, times in samples.items() if not times]
    if lacks:
        raise InputError(
            f"{where} has no times of the reference kernel '{lacks[0]}', which tell how the "
            "machine's speed changed; measure again with this version"
        )
    return {kernel: statistics.median(times) for kernel, times in samples.items()}
