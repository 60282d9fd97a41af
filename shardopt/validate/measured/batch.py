"""A committed batch of measured tasks, with the calibration made just before it.

A batch is a folder, schema ``shardopt.lab-batch/1``: ``batch.json`` (topology, machine, tasks),
``calibration.rows.csv`` (`shardopt.calibrate.rows`), and for each task ``task-007.yaml`` (model),
``task-007.rows.json`` (`shardopt.bench.rows`) and, where the plans were measured a second time,
``task-007.again.rows.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.model.plan import ShardingPlan
from predictor.model.plan_json import check_plan, plan_from_dict
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from predictor.units import GIB
from shardopt.bench.rows import BenchRows
from shardopt.bench.rows import read_rows as read_bench
from shardopt.bench.tasks.batch_files import BATCH_FILE, CALIBRATION_FILE, SCHEMA, task_name
from shardopt.calibrate.profile.build import Calibrated, build_profile
from shardopt.calibrate.rows import Measured, Origin
from shardopt.calibrate.rows import read_rows as read_calibration
from shardopt.config import load_model
from shardopt.files import decode, read_bytes
from shardopt.validate.measured.drift import calibration_reference

BASE = "cpu-gloo"
FBGEMM = ("fbgemm_gpu", "fbgemm_gpu-cpu", "fbgemm-gpu-cpu", "fbgemm-gpu")
MACHINE = ("system", "processor", "machine", "torch", "torchrec", *FBGEMM)
"""What may not differ within a batch, beside memory in whole GiB."""


@dataclass(frozen=True)
class Task:
    """One model with its plans, measured side by side.

    Args:
        again: the same plans measured a second time; None where they were not.
    """

    number: int
    workload: Workload
    plans: dict[str, ShardingPlan]
    rows: BenchRows
    again: BenchRows | None

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
class Batch:
    """Tasks of one machine, one topology and one calibration.

    Args:
        topology: as batch.json calls it.
        made: profile of the calibration, with its held-out errors.
        reference_ms: reference kernels during the calibration.
        calibrated: when the calibration ended.
        skipped: tasks left out, a line each.
    """

    name: str
    topology: str
    ranks: Topology
    made: Calibrated
    reference_ms: dict[str, float]
    calibrated: datetime
    tasks: tuple[Task, ...]
    skipped: tuple[str, ...]


def batch_folders(folder: Path) -> list[Path]:
    """Sub-folders that hold a batch, sorted by name."""
    return sorted(path.parent for path in folder.glob(f"*/{BATCH_FILE}"))


def load_batches(folder: Path, hint: str) -> list[Batch]:
    """Every batch in a folder, in the order of their names.

    Args:
        hint: what ``--data`` should be, for the message where there is none.

    Raises:
        InputError: there is no batch, or a file of one is broken, or of another machine.
    """
    folders = batch_folders(folder)
    if not folders:
        found = "holds no batch" if folder.is_dir() else "no such directory"
        raise InputError(f"{folder}: {found}; give --data DIR, {hint}")
    return [load_batch(path) for path in folders]


def load_batch(folder: Path) -> Batch:
    """Read and check a batch, and fit its profile.

    Raises:
        InputError: a file is missing or broken, or rows are of another machine or model.
    """
    about = _read_about(folder / BATCH_FILE)
    environment = about["environment"]
    path = folder / CALIBRATION_FILE
    if not path.is_file():
        raise InputError(f"{path}: no such file; a batch has the calibration made before it")
    origin, measured = read_calibration(path)
    _refuse_mixed(path, origin, environment)
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
    return Batch(
        folder.name,
        about["topology"],
        topology,
        made,
        _reference(path, measured, link),
        max(_time(row.date, f"{path}: date") for row in measured),
        tuple(tasks),
        tuple(skipped),
    )


def _reference(path: Path, measured: list[Measured], link_gbit_s: float | None) -> dict[str, float]:
    try:
        return calibration_reference(measured, link_gbit_s)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _read_about(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(decode(read_bytes(path, "batch file"), path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise InputError(f"{path}: is no '{SCHEMA}' file")
    kinds = {
        "topology": str,
        "world_size": int,
        "local_world_size": int,
        "environment": dict,
        "tasks": list,
    }
    for key, kind in kinds.items():
        if not isinstance(data.get(key), kind):
            raise InputError(f"{path}: '{key}' is missing or malformed")
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
            f"{path}: calibrated on '{origin.machine}' with {origin.versions}, but {BATCH_FILE} "
            f"says '{processor}', {memory}, {versions}; rows of different machines or versions "
            "are never mixed: calibrate again where the tasks ran"
        )


def _tasks(folder: Path, about: Mapping[str, Any]) -> tuple[list[Task], list[str]]:
    tasks: list[Task] = []
    skipped = []
    for number in about["tasks"]:
        path = folder / f"{task_name(number)}.rows.json"
        if not path.is_file():
            skipped.append(f"{folder.name} {task_name(number)}: not measured")
            continue
        rows = _read_rows(path, about)
        if not rows.rounds:
            skipped.append(f"{folder.name} {task_name(number)}: no round was finished")
            continue
        tasks.append(_task(folder, number, rows, about))
    return tasks, skipped


def _task(folder: Path, number: int, rows: BenchRows, about: Mapping[str, Any]) -> Task:
    path = folder / f"{task_name(number)}.rows.json"
    model = folder / f"{task_name(number)}.yaml"
    workload = load_model(model)
    digest = rows.model.get("sha256")
    if digest and digest != workload.sha256:
        raise InputError(f"{path}: its rows are of another version of {model.name}")
    plans = {}
    for entry in rows.plans:
        where = f"{path}: plan '{entry['name']}'"
        plan = check_plan(plan_from_dict(entry["plan"], where=where), workload, where=where)
        plans[entry["name"]] = plan
    again = folder / f"{task_name(number)}.again.rows.json"
    second = _read_rows(again, about) if again.is_file() else None
    return Task(number, workload, plans, rows, second if second and second.rounds else None)


def _read_rows(path: Path, about: Mapping[str, Any]) -> BenchRows:
    """Rows of a task, if the batch's machine measured them on the batch's ranks."""
    rows = read_bench(path)
    ranks = rows.settings.get("world_size")
    if ranks != about["world_size"]:
        raise InputError(f"{path}: {ranks} ranks, but {BATCH_FILE} says {about['world_size']}")
    wanted = _machine(about["environment"])
    for session in rows.sessions:
        found = _machine(session["environment"])
        if found != wanted:
            key = next(k for k in wanted if found[k] != wanted[k])
            raise InputError(
                f"{path}: {key} is {found[key]!r}, but {BATCH_FILE} says {wanted[key]!r}; rows of "
                "different machines or versions are never mixed: measure the task again"
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
