"""Whole TorchRec steps on one GPU: GPU time, wall time, the order of plans, and peak memory.

Each machine has a folder named after its GPU, with steps of models under the plan with every table
in `fused`, of some under other plans, and of some with one OpenMP thread. Models, batches and the
training loop were written outside this project. Every row is predicted twice: by the shipped
profile, and with the host constants that ``calibrate --only host`` measured on that machine. GPU
time is the sum over the rank's kernels and copies.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from lab.statistics import coverage, geomean, grouped
from lab.suites import SUITES, Cell, ComparedRow, Report
from lab.validate.tables import ranks_of
from predictor.errors import InputError, ShardoptError
from predictor.hardware.device_names import profile_of_device
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.plan_json import load_plan
from predictor.model.workload import Workload
from predictor.predict import Prediction, predict
from predictor.units import GIB
from shardopt.calibrate import Group
from shardopt.calibrate.fitting import mape
from shardopt.calibrate.profile import build_profile
from shardopt.calibrate.rows import read_rows
from shardopt.config import load_model
from shardopt.files import decode, read_bytes

STEPS, ONE_THREAD, PLACEMENTS = "steps.jsonl", "one_thread.jsonl", "placements.jsonl"
KINDS = {STEPS: "whole steps", ONE_THREAD: "one OpenMP thread", PLACEMENTS: "placements"}
"""File of a folder -> description of its rows."""
HOST_ROWS = "host.rows.csv"
GPU_TIME, WALL, CALIBRATED = "GPU time", "wall time", "wall time, calibrated host"
APART = (0.02, 0.03)
"""Relative differences of measured times from which the order of two plans counts."""
SMALL_BYTES = 1.5 * GIB
"""Peak memory below which CUDA libraries hold much of it."""

Line = tuple[Cell, ...]


@dataclass(frozen=True)
class Step:
    """Measured step.

    Args:
        gpu: name of the folder.
        file: name of the file.
        line: line of the file, from 1.
        plan: name of a file in ``plans``; empty if every table is in `fused`.
        threads: OpenMP threads; empty where they are not stated.
    """

    gpu: str
    file: str
    line: int
    model: str
    plan: str
    threads: int | str
    wall_ms: float
    gpu_ms: float
    peak_bytes: float


@dataclass(frozen=True)
class PredictedStep:
    """Measured step with its predictions.

    Args:
        calibrated: prediction with the machine's own host constants; None without them.
        cached: a table has a UVM cache.
    """

    step: Step
    shipped: Prediction
    calibrated: Prediction | None
    cached: bool

    @property
    def gpu_ms(self) -> float:
        """Predicted time of the rank's kernels and copies."""
        return sum(self.shipped.per_rank[0].busy_ms.values())

    @property
    def peak_bytes(self) -> float:
        """Predicted peak of the memory that PyTorch's allocator has allocated."""
        peak = self.shipped.memory[0].peak
        assert peak is not None, "`predict` counts the peak"
        return peak.allocated_bytes

    def times(self) -> Iterator[tuple[str, float, float, tuple[float, float] | None]]:
        """Yield each kind of time: its name, measured, predicted, and the 90 % interval."""
        step = self.step
        if step.file != ONE_THREAD:
            yield GPU_TIME, step.gpu_ms, self.gpu_ms, None
        predictions = {WALL: self.shipped, CALIBRATED: self.calibrated}
        for name, prediction in predictions.items():
            if prediction is not None:
                yield name, step.wall_ms, prediction.iteration_ms, prediction.interval_ms


def validate_gpu_steps(folder: Path) -> Report:
    steps: list[PredictedStep] = []
    skipped: list[str] = []
    for place, hardware in machines(folder, (STEPS,), skipped.append):
        steps += _machine(place, hardware, skipped.append)
    suite = SUITES["gpu-steps"]
    rows = [row for step in steps for row in _rows(step)]
    return suite.report(
        rows,
        skipped,
        scores=(
            suite.table("by machine", _by_machine(rows)),
            suite.table("order of plans of one model", order_lines(rows)),
            suite.table("peak memory", memory_lines(steps)),
            suite.table("peak memory of every row, GiB", map(_memory_line, steps)),
        ),
    )


def machines(
    folder: Path, files: Sequence[str], skip: Callable[[str], None]
) -> Iterator[tuple[Path, HardwareProfile]]:
    """Yield the folder and shipped profile of every machine that has one of the files.

    Args:
        skip: receives a line for each machine that no profile describes.
    """
    for place in sorted({path.parent for name in files for path in folder.glob(f"*/{name}")}):
        name = profile_of_device(place.name)
        if name is None:
            skip(f"{place.name}: no shipped profile describes a GPU of this name ({place})")
        else:
            yield place, load_hardware(name)


def objects_of(path: Path, skip: Callable[[str], None]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the JSON objects of a file, one a line, with their line numbers.

    Args:
        skip: receives a message for each line that is not an object.
    """
    try:
        lines = decode(read_bytes(path, "file of measurements"), path).splitlines()
    except InputError as error:
        skip(str(error))
        return
    for number, text in enumerate(lines, start=1):
        try:
            entry = json.loads(text)
        except ValueError as error:
            skip(f"{place_of(path, number)}: {error}")
            continue
        if isinstance(entry, dict):
            yield number, entry
        else:
            skip(f"{place_of(path, number)}: the line is no JSON object")


def place_of(path: Path, number: int) -> str:
    """Name a line of a machine's file for messages."""
    return f"{path.parent.name}/{path.name}:{number}"


def _machine(
    folder: Path, shipped: HardwareProfile, skip: Callable[[str], None]
) -> Iterator[PredictedStep]:
    """Yield the steps of one machine."""
    calibrated = None
    try:
        calibrated = _with_own_host(folder / HOST_ROWS, shipped)
    except ShardoptError as error:
        skip(f"{folder.name}: no wall times of a calibrated host: {error}")
    for path in (folder / file for file in KINDS if (folder / file).is_file()):
        for number, entry in objects_of(path, skip):
            try:
                step = _read(folder.name, path.name, number, entry)
                yield _predict(folder, step, shipped, calibrated)
            except (ShardoptError, ValueError) as error:
                skip(f"{place_of(path, number)}: {error}")


def _with_own_host(rows: Path, shipped: HardwareProfile) -> HardwareProfile:
    """Return the profile with the host constants measured on the machine."""
    origin, measured = read_rows(rows)
    built = build_profile(
        measured, origin, shipped, shipped.name, 1, shipped.ddr_bytes / GIB, only=Group.HOST
    )
    return built.profile


def _read(gpu: str, file: str, number: int, entry: Mapping[str, Any]) -> Step:
    """Parse a measured step.

    Raises:
        ValueError: the line lacks a key, or a value cannot be used.
    """
    times = (positive(entry, key) for key in ("ms", "gpu_busy_ms", "peak_allocated"))
    names = _name(entry, "name"), _name(entry, "plan", "")
    return Step(gpu, file, number, *names, entry.get("omp", ""), *times)


def positive(entry: Mapping[str, Any], key: str) -> float:
    """Return the number above 0 of a key.

    Raises:
        ValueError: the value is not such a number.
    """
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
        raise ValueError(f"'{key}' is {value!r}; it must be a number above 0")
    return float(value)


def _name(entry: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = entry.get(key, default)
    if not isinstance(value, str) or value != Path(value).name:
        raise ValueError(f"'{key}' is {value!r}; it must be the name of a file without its suffix")
    return value


def _predict(
    folder: Path, step: Step, shipped: HardwareProfile, calibrated: HardwareProfile | None
) -> PredictedStep:
    workload = load_model(folder / "models" / f"{step.model}.yaml")
    plan = load_plan(folder / "plans" / f"{step.plan}.json") if step.plan else _fused(workload)

    def on(hardware: HardwareProfile) -> Prediction:
        return predict(workload, ranks_of(hardware, 1), hardware, plan)

    cached = any(t.compute_kernel.is_cached for t in plan.tables.values())
    own_host = None if calibrated is None else on(calibrated)
    return PredictedStep(step, on(shipped), own_host, cached)


def _fused(workload: Workload) -> ShardingPlan:
    """Return the plan with every table whole on the one rank."""

    def whole(rows: int, dim: int, module: str) -> TablePlan:
        shards = (Shard(0, (0, 0), (rows, dim)),)
        return TablePlan(ShardingType.TABLE_WISE, ComputeKernel.FUSED, shards, module)

    tables = {
        key: whole(table.num_embeddings, table.embedding_dim, table.module)
        for key, table in zip(workload.keys, workload.tables, strict=True)
    }
    return ShardingPlan(tables, 1, 1)


def _rows(predicted: PredictedStep) -> Iterator[ComparedRow]:
    """Yield a row for each kind of time."""
    step = predicted.step
    for time, measured_ms, predicted_ms, interval_ms in predicted.times():
        yield ComparedRow(
            {
                "gpu": step.gpu,
                "model": step.model,
                "plan": step.plan.removeprefix(f"{step.model}.") or "fused",
                "threads": step.threads,
                "time": time,
            },
            measured_ms,
            predicted_ms,
            family=step.gpu,
            part=f"{time}, {KINDS[step.file]}",
            source=f"{step.gpu}/{step.file}:{step.line}",
            interval_ms=interval_ms,
        )


def _by_machine(rows: Sequence[ComparedRow]) -> Iterator[Line]:
    """Yield mean, geometric mean and signed errors, by part and machine."""
    for (part, gpu), machine_rows in grouped(rows, lambda row: (row.part, row.family)).items():
        errors = [row.error for row in machine_rows]
        spans = [(r.measured_ms, *r.interval_ms) for r in machine_rows if r.interval_ms is not None]
        covered = coverage(*zip(*spans, strict=True)) if spans else None
        figures = mape(errors), geomean(errors), statistics.fmean(errors)
        yield (part, gpu, len(machine_rows), *figures, covered)


def order_lines(rows: Sequence[ComparedRow]) -> Iterator[Line]:
    """Yield how often the faster of two plans of a model was predicted, and the regret of the plan
    predicted fastest."""
    for time in (GPU_TIME, WALL, CALIBRATED):
        models = [
            plans
            for plans in _plans_by_model(rows, time).values()
            if len(plans) > 1 and any(row.name["plan"] != "fused" for row in plans)
        ]
        if not models:
            continue
        costs = [_cost_of_choice(plans) for plans in models]
        for apart in APART:
            right = [
                (a.measured_ms < b.measured_ms) == (a.predicted_ms < b.predicted_ms)
                for plans in models
                for a, b in combinations(plans, 2)
                if _apart(a, b) > apart
            ]
            share = sum(right) / len(right) if right else None
            best_found = sum(cost == 0 for cost in costs)
            figures = statistics.fmean(costs), max(costs)
            yield (time, apart, len(right), sum(right), share, len(models), best_found, *figures)


def _apart(a: ComparedRow, b: ComparedRow) -> float:
    """Return the relative difference of two measured times."""
    low, high = sorted((a.measured_ms, b.measured_ms))
    return high / low - 1


def _plans_by_model(
    rows: Sequence[ComparedRow], time: str
) -> dict[tuple[Any, Any], list[ComparedRow]]:
    """Group the plans by machine and model, by one kind of time.

    Runs with one OpenMP thread have other host times and are left out.
    """
    parts = [f"{time}, {KINDS[file]}" for file in (STEPS, PLACEMENTS)]
    chosen = [row for row in rows if row.part in parts]
    return grouped(chosen, lambda row: (row.name["gpu"], row.name["model"]))


def _cost_of_choice(plans: Sequence[ComparedRow]) -> float:
    """Return the regret of the plan predicted fastest, relative to the fastest one."""
    chosen = min(plans, key=lambda row: row.predicted_ms)
    return chosen.measured_ms / min(row.measured_ms for row in plans) - 1


def memory_lines(steps: Sequence[PredictedStep]) -> Iterator[Line]:
    """Yield errors of the peak that PyTorch's allocator has allocated."""
    kinds = grouped((s for s in steps if s.step.file != ONE_THREAD), _memory_kind)
    for kind, kind_steps in kinds.items():
        errors = [_memory_error(step) for step in kind_steps]
        worst = max(errors, key=abs)
        yield (
            kind,
            len(kind_steps),
            mape(errors),
            geomean(errors),
            statistics.fmean(errors),
            worst,
        )


def _memory_kind(predicted: PredictedStep) -> str:
    if predicted.cached:
        return "with UVM caches"
    small = predicted.step.peak_bytes < SMALL_BYTES
    return f"without caches, {'below' if small else 'from'} {SMALL_BYTES / GIB:g} GiB"


def _memory_error(predicted: PredictedStep) -> float:
    return predicted.peak_bytes / predicted.step.peak_bytes - 1


def _memory_line(predicted: PredictedStep) -> Line:
    step = predicted.step
    plan = step.plan.removeprefix(f"{step.model}.") or "fused"
    sizes = step.peak_bytes / GIB, predicted.peak_bytes / GIB
    return (step.gpu, step.model, plan, *sizes, _memory_error(predicted))
