"""Set of measured tasks, with the calibration made just before it.

A task set is a folder, schema ``shardopt.lab-batch/1``: ``batch.json`` (topology, machine, tasks),
``calibration.rows.csv`` (`shardopt.calibrate.rows`), and for each task ``task-007.yaml`` (model),
``task-007.rows.json`` (`shardopt.bench.rows`). Further files: ``task-007.part-2.rows.json`` and so
on for more plans than run at once, ``task-007.window-2.yaml`` and so on for windows of data, and
``task-007.again.rows.json`` for a second measurement of the first file's plans.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count, takewhile
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

SCHEMA = "shardopt.lab-batch/1"
"""Schema of the file that describes a task set."""
TASK_SET_FILE = "batch.json"
CALIBRATION_FILE = "calibration.rows.csv"
OLD_FILES = {"models": "random", "runtime": Runtime.TUNED.value}
"""Defaults of keys that old files of task sets lack."""
BASE = "cpu-gloo"
FBGEMM = ("fbgemm_gpu", "fbgemm_gpu-cpu", "fbgemm-gpu-cpu", "fbgemm-gpu")
MACHINE = ("system", "processor", "machine", "torch", "torchrec", *FBGEMM)
"""Facts that may not differ within a task set, beside memory in whole GiB."""
MEMORY_SHARE = 0.5
"""Share of the machine's memory for the plans of a part on all ranks."""
MAX_AT_ONCE = 25
"""Most plans of a part, so that no plan is timed minutes from the first one."""
_WINDOW = " @"


def split_plans(
    workload: Workload, plans: Mapping[str, ShardingPlan], memory_bytes: float
) -> tuple[list[dict[str, ShardingPlan]], list[str]]:
    """Split plans into parts, in order; return the parts, and the names of plans too large.

    Args:
        plans: the first is in every part.
        memory_bytes: memory of the machine.
    """
    first, *candidates = plans
    # a rank's memory beside its plans, and the first plan, count once for each part
    alone = sum(rank_bytes(workload, [plans[first]]))
    limit = MEMORY_SHARE * memory_bytes - alone
    parts: list[dict[str, ShardingPlan]] = []
    left_out: list[str] = []
    room = 0.0
    for name in candidates:
        extra = sum(rank_bytes(workload, [plans[first], plans[name]])) - alone
        if extra > limit:
            left_out.append(name)
            continue
        if not parts or extra > room or len(parts[-1]) == MAX_AT_ONCE:
            parts.append({first: plans[first]})
            room = limit
        parts[-1][name] = plans[name]
        room -= extra
    return parts or [{first: plans[first]}], left_out


def task_name(seed: int) -> str:
    """Return the name of a task's files, such as ``task-007``."""
    return f"task-{seed:03d}"


def part_path(folder: Path, name: str, number: int) -> Path:
    """Return a part's path: ``task-007.rows.json``, then ``task-007.part-2.rows.json``."""
    return folder / (f"{name}.rows.json" if number == 1 else f"{name}.part-{number}.rows.json")


def part_paths(folder: Path, name: str) -> list[Path]:
    """Return the existing rows files of a task, first part first."""
    return [*takewhile(Path.is_file, (part_path(folder, name, n) for n in count(1)))]


def load_windows(folder: Path, name: str) -> tuple[Workload, ...]:
    """Load the windows of a task's model after the first."""
    paths = (folder / f"{name}.window-{n}.yaml" for n in count(2))
    return tuple(map(load_model, takewhile(Path.is_file, paths)))


def in_window(name: str, number: int) -> str:
    """Return a plan's name on the batches of a window, from 1, such as ``nominal @2``."""
    return f"{name}{_WINDOW}{number}"


def split_window(name: str) -> tuple[str, int]:
    """Split off a plan's window; it is 1 if the name has none."""
    plain, mark, number = name.rpartition(_WINDOW)
    return (plain, int(number)) if mark and number.isdecimal() else (name, 1)


@dataclass(frozen=True)
class MeasuredTask:
    """Model with its plans, measured side by side.

    Args:
        plans: plans of all parts.
        rows: rows of the first part.
        again: second measurement of its plans; None without one.
        more: rows of further parts, each with the first plan and others.
        windows: the same model with other data, in which plans ran too.
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
        return task_name(self.number)

    @property
    def at(self) -> datetime:
        """Start of the middle round."""
        middle = len(self.rows.rounds) // 2
        return _time(self.rows.rounds[middle]["at"], f"{self.name}.rows.json: rounds[{middle}]: at")


@dataclass(frozen=True)
class TaskSet:
    """Tasks of one machine, one topology and one calibration.

    Args:
        topology: name of the topology in batch.json.
        models: family of the tasks' models.
        runtime: runtime of the ranks.
        calibration: profile of the calibration, with its held-out errors.
        reference_ms: times of reference kernels during the calibration, which show drift.
        calibrated: time of the calibration's last reference kernel.
        skipped: a message for each task left out.
    """

    name: str
    topology: str
    models: str
    runtime: str
    ranks: Topology
    calibration: CalibratedProfile
    reference_ms: dict[str, float]
    calibrated: datetime
    tasks: tuple[MeasuredTask, ...]
    skipped: tuple[str, ...]


def task_set_folders(folder: Path) -> list[Path]:
    """Return the sub-folders with a task set, sorted by name."""
    return sorted(path.parent for path in folder.glob(f"*/{TASK_SET_FILE}"))


def load_task_sets(folder: Path, hint: str) -> list[TaskSet]:
    """Load every task set in a folder, in the order of their names.

    Args:
        hint: description of the folder to give, for the message where there is none.

    Raises:
        InputError: there is no task set, or a file of one is broken, or of another machine.
    """
    folders = task_set_folders(folder)
    if not folders:
        problem = "holds no task set" if folder.is_dir() else "no such directory"
        raise InputError(f"{folder}: {problem}; give {hint}", inputs=("data",))
    return [load_task_set(path) for path in folders]


def load_task_set(folder: Path) -> TaskSet:
    """Read and check a task set, and fit its profile.

    Raises:
        InputError: a file is missing or broken, or rows are of another machine or model.
    """
    about = read_about(folder)
    path = folder / CALIBRATION_FILE
    if not path.is_file():
        raise InputError(f"{path}: no such file; a task set has the calibration made before it")
    origin, measured = read_calibration(path)
    _check_calibration(path, origin, measured, about)
    ranks, link = about["world_size"], about.get("link_gbit_s")
    gib = about["environment"]["memory_bytes"] / GIB
    calibration = build_profile(
        measured, origin, load_hardware(BASE), folder.name, ranks, gib, link
    )
    topology = Topology.uniform(
        ranks,
        about["local_world_size"],
        hbm_bytes=calibration.profile.hbm_bytes,
        ddr_bytes=calibration.profile.ddr_bytes,
    )
    reference = [row for row in measured if row.point.family == "reference"]
    tasks: list[MeasuredTask] = []
    skipped: list[str] = []
    for number in about["tasks"]:
        task, left_out = _task(folder, number, about)
        skipped += left_out
        tasks += [task] if task is not None else []
    return TaskSet(
        folder.name,
        about["topology"],
        about["models"],
        about["runtime"],
        topology,
        calibration,
        _medians(
            (
                (row.point.params.get("kernel"), row.median_us * 1e-3)
                for row in reference
                if row.point.params.get("link_gbit_s") == link
            ),
            f"{path}: the calibration",
        ),
        max(_time(row.date, f"{path}: date") for row in reference),
        tuple(tasks),
        tuple(skipped),
    )


def read_about(folder: Path) -> dict[str, Any]:
    """Read the file that describes a task set.

    Raises:
        InputError: it cannot be read, or contradicts itself.
    """
    path = folder / TASK_SET_FILE
    kinds = {
        **{"topology": str, "world_size": int, "local_world_size": int},
        **{"environment": dict, "tasks": list},
    }
    remedy = "restore it, or measure into another folder"
    data = {**OLD_FILES, **read_json(path, "task set file", SCHEMA, kinds, remedy).data}
    if not isinstance(data["environment"].get("memory_bytes"), int):
        raise InputError(f"{path}: environment: 'memory_bytes' is missing or malformed")
    apart = data["world_size"] > data["local_world_size"]
    if apart != isinstance(data.get("link_gbit_s"), int | float):
        raise InputError(
            f"{path}: link_gbit_s is {data.get('link_gbit_s')!r} with {data['local_world_size']} "
            f"of {data['world_size']} ranks a host; ranks on several hosts alone have a link"
        )
    return data


def _check_calibration(
    path: Path, origin: Origin, measured: Sequence[Measurement], about: Mapping[str, Any]
) -> None:
    """Refuse a calibration of another machine, version or runtime than the tasks."""
    environment = about["environment"]
    processor = environment.get("processor") or environment.get("machine")
    memory = f"{environment['memory_bytes'] / GIB:.0f} GiB"
    fbgemm = next((environment[name] for name in FBGEMM if name in environment), "none")
    versions = f"torch {environment.get('torch', 'none')}, fbgemm {fbgemm}"
    same_machine = origin.machine.startswith(f"{processor}, ")
    same_machine = same_machine and memory in origin.machine.split(", ")
    if not same_machine or origin.versions != versions:
        raise InputError(
            f"{path}: calibrated on '{origin.machine}' with {origin.versions}, but {TASK_SET_FILE} "
            f"says '{processor}', {memory}, {versions}; rows of different machines or versions "
            "are never mixed: calibrate again where the tasks ran"
        )
    other = next((row.runtime for row in measured if row.runtime != about["runtime"]), None)
    if other is not None:
        raise InputError(
            f"{path}: calibrated in the {other} runtime, but {TASK_SET_FILE} says "
            f"{about['runtime']}; times of one hold for that one alone: measure into another folder"
        )


def _task(
    folder: Path, number: int, about: Mapping[str, Any]
) -> tuple[MeasuredTask | None, list[str]]:
    """Load a task, None where its first part has no round, and messages on left-out files."""
    name = task_name(number)
    parts = [(path, _read_rows(path, about)) for path in part_paths(folder, name)]
    skipped = [
        f"{folder.name} {path.name.removesuffix('.rows.json')}: no round was finished"
        for path, rows in parts
        if not rows.rounds
    ]
    if not parts:
        return None, [f"{folder.name} {name}: not measured"]
    if not parts[0][1].rounds:
        return None, skipped
    workload = load_model(folder / f"{name}.yaml")
    measured = [(path, rows) for path, rows in parts if rows.rounds]
    plans = {key: p for at in measured for key, p in read_plans(*at, workload).items()}
    path = folder / f"{name}.again.rows.json"
    again = _read_rows(path, about) if path.is_file() else None
    first, *more = (rows for _, rows in measured)
    second = again if again and again.rounds else None
    windows = load_windows(folder, name)
    return MeasuredTask(number, workload, plans, first, second, tuple(more), windows), skipped


def read_plans(path: Path, rows: BenchRows, workload: Workload) -> dict[str, ShardingPlan]:
    """Read the plans of a rows file by name.

    Raises:
        InputError: they do not match the model, or it has changed.
    """
    digest = rows.model.get("sha256")
    if digest and digest != workload.sha256:
        model = f"{path.name.partition('.')[0]}.yaml"
        raise InputError(f"{path}: its rows are of another version of {model}")
    plans = {}
    for entry in rows.plans:
        where = f"{path}: plan '{entry['name']}'"
        plan = plan_from_dict(entry["plan"], where=where)
        plans[entry["name"]] = check_plan(plan, workload, where=where)
    return plans


def _read_rows(path: Path, about: Mapping[str, Any]) -> BenchRows:
    """Read rows of a task; refuse those of other machines, ranks or runtimes."""
    rows = read_bench(path)
    actual = rows.settings.get("world_size"), rows.settings["runtime"]
    expected = about["world_size"], about["runtime"]
    if actual != expected:
        raise InputError(
            f"{path}: {actual[0]} ranks in the {actual[1]} runtime, but {TASK_SET_FILE} says "
            f"{expected[0]} in the {expected[1]} one; measure the task again"
        )
    was = machine_of(about["environment"])
    for session in rows.sessions:
        machine = machine_of(session["environment"])
        for key in (*MACHINE, MEMORY):
            if machine.get(key) != was.get(key):
                raise InputError(
                    f"{path}: {key} is {machine.get(key)!r}, but {TASK_SET_FILE} says "
                    f"{was.get(key)!r}; rows of different machines or versions are never mixed: "
                    "measure the task again"
                )
    return rows


MEMORY = "memory in GiB"


def machine_of(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return an environment with memory in GiB, as some pages vary from boot to boot."""
    memory = environment.get("memory_bytes")
    gib = round(memory / GIB) if isinstance(memory, int | float) else memory
    return {**{k: v for k, v in environment.items() if k != "memory_bytes"}, MEMORY: gib}


def _time(text: str, where: str) -> datetime:
    try:
        parsed = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise InputError(f"{where}: {text!r} is no time as 2026-01-31T12:00:00Z") from None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def task_reference(rows: BenchRows) -> dict[str, float]:
    """Return reference kernel -> median ms over all rounds, ranks and repeats of a task.

    Raises:
        InputError: a kernel has no times.
    """
    samples = (
        (kernel, sample)
        for measured in rows.rounds
        for kernel, ranks in measured["reference_ms"].items()
        for rank in ranks
        for sample in rank
    )
    return _medians(samples, "the task")


def _medians(samples: Iterable[tuple[Any, float]], where: str) -> dict[str, float]:
    times: dict[str, list[float]] = {kernel: [] for kernel in KERNELS}
    for kernel, ms in samples:
        if kernel in times:
            times[kernel].append(ms)
    lacks = [kernel for kernel, kernel_ms in times.items() if not kernel_ms]
    if lacks:
        raise InputError(
            f"{where} has no times of the reference kernel '{lacks[0]}', which tell how the "
            "machine's speed changed; measure again with this version"
        )
    return {kernel: statistics.median(kernel_ms) for kernel, kernel_ms in times.items()}
