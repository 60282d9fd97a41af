"""A task's plans predicted, measured, and rated by other pickers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lab.planners.published import TorchRecObjective
from lab.suites import ComparedRow
from lab.tasks.task_set import MeasuredTask, TaskSet, task_reference
from lab.validate.tasks.ablations import FULL, Ablation
from predictor.errors import InputError, ShardoptError
from predictor.hardware.schema import CpuEmbedding, Curve, HardwareProfile, LinkCurves, StrictModel
from predictor.model.plan import ShardingType
from predictor.predict import predict
from shardopt.bench.rows import BenchRows
from shardopt.bench.summary import flat
from shardopt.calibrate.fitting import Array
from shardopt.calibrate.points import REFERENCE_KERNELS as KERNELS

FACTORS = ("backward_stateless", "backward_weighted")
"""Fields of the embedding model that are not times."""
SMALL_MOVES = (
    *("floor_us", "ramp_us", "bucketize_ns_per_id", "gather_ns_per_element"),
    *("math_ns_per_element", "random_ns_per_element", "sliced_ns_per_element"),
    "turned_ns_per_element",
)
RATES = ("hbm_gb_s", "l2_gb_s", "host_link_gb_s", "ddr_gb_s")
Ratios = Mapping[str, float]
"""Reference kernel -> its time in the task over its time in the calibration."""


def drift_ratios(task: Mapping[str, float], calibration: Mapping[str, float]) -> dict[str, float]:
    """Return the `Ratios` of two sets of reference times."""
    return {kernel: task[kernel] / calibration[kernel] for kernel in KERNELS}


def correct_drift(profile: HardwareProfile, ratios: Ratios) -> HardwareProfile:
    """Return the profile of the machine while the task ran.

    Embedding constants scale with their lookups, collectives with the all-to-all, and all else with
    the GEMM, the only reference that depends on the core's clock alone.

    Args:
        profile: of CPU ranks.
    """
    clock, lookups = ratios["gemm"], profile.embedding
    if not isinstance(lookups, CpuEmbedding):
        raise InputError(f"{profile.name}: drift is corrected in profiles of CPU ranks only")
    gemm, moves, host = profile.gemm, profile.elementwise, profile.overheads
    by_name = {"forward_": ratios["lookup_forward"], "backward_": ratios["lookup_backward"]}
    host_us = [name for name, v in host if name.endswith("_us") and isinstance(v, float)]
    changed = {
        "embedding": {
            name: value * ratio
            for prefix, ratio in by_name.items()
            for name, value in lookups
            if name.startswith(prefix) and name not in FACTORS
        },
        "gemm": {
            **_scaled(gemm, ("floor_us", "batched_us"), clock),
            "tflops": {kind: rate / clock for kind, rate in gemm.tflops.items()},
            "batches": {
                layout: tuple(ns * clock for ns in layout_ns)
                for layout, layout_ns in gemm.batches.items()
            },
            "attention_head_us": tuple(us * clock for us in gemm.attention_head_us),
        },
        "memory": {
            **_scaled(profile.memory, RATES, 1 / clock),
            **_scaled(profile.memory, ("host_link_latency_us",), clock),
        },
        "elementwise": {
            **_scaled(moves, SMALL_MOVES, clock),
            "math_ns": _each(moves.math_ns, clock),
        },
        "overheads": {**_scaled(host, host_us, clock), "step_us": _each(host.step_us, clock)},
        "collectives": {
            link: _slower_link(getattr(profile.collectives, link), ratios["all_to_all"])
            for link in ("intra", "inter")
        },
    }
    return profile.model_copy(
        update={
            name: getattr(profile, name).model_copy(update=group) for name, group in changed.items()
        }
    )


def _scaled(group: StrictModel, names: Sequence[str], factor: float) -> dict[str, float]:
    return {name: getattr(group, name) * factor for name in names}


def _each(costs: Mapping[str, float], factor: float) -> dict[str, float]:
    return {name: cost * factor for name, cost in costs.items()}


def _slower_link(link: LinkCurves, factor: float) -> LinkCurves:
    """Multiply every curve of a link by a factor."""
    curves = {
        name: curve.model_copy(
            update={
                **_scaled(curve, ("latency_us", "latency_per_doubling_us"), factor),
                "us_per_mib": tuple(cost * factor for cost in curve.us_per_mib),
            }
        )
        for name, curve in link
        if isinstance(curve, Curve)
    }
    return link.model_copy(update=curves)


DEVELOPED_ON = tuple(f"2026-11-21-{name}" for name in ("a", "b", "c-link-1", "d-link-0.5"))
"""Batches on which versions of the predictor were compared; all others are fresh."""


@dataclass(frozen=True)
class TaskOfSet:
    """Measured task with its task set."""

    batch: TaskSet
    task: MeasuredTask

    @property
    def name(self) -> str:
        """``batch task-007``."""
        return f"{self.batch.name} {self.task.name}"


@dataclass(frozen=True)
class TaskPrediction(TaskOfSet):
    """Predictions of one task's plans; arrays are ``[plans]``, in the order of the rows.

    Args:
        predicted_ms: from the batch's calibration, corrected for drift.
        uncorrected_ms: from the calibration without correction.
        low_ms, high_ms: the 90 % interval of ``predicted_ms``.
        ablated_ms: `Ablation.name` -> its times.
        ratings: TorchRec's own cost of each plan.
        minutes: from the end of the calibration to the task.
    """

    predicted_ms: Array
    uncorrected_ms: Array
    low_ms: Array
    high_ms: Array
    ablated_ms: dict[str, Array]
    ratings: Array
    minutes: float

    @property
    def plans(self) -> list[str]:
        return self.task.rows.names

    @property
    def fresh(self) -> bool:
        """True if no version of the predictor was chosen on the task."""
        return self.batch.name not in DEVELOPED_ON

    @property
    def pipeline(self) -> str:
        return self.task.workload.train_pipeline

    @cached_property
    def measured_ms(self) -> Array:
        """Median over all iterations of rank 0."""
        return medians_ms(self.task.rows, self.plans)

    def types(self, plan: str) -> str:
        """Return the sharding types that a plan mixes, e.g. ``TW+RW``."""
        used = {table.sharding_type for table in self.task.plans[plan].tables.values()}
        return "+".join(kind.short for kind in _ORDER if kind in used)

    def rows(self) -> list[ComparedRow]:
        return [
            ComparedRow(
                {
                    "batch": self.batch.name,
                    "topology": self.batch.topology,
                    "task": self.task.number,
                    "plan": plan,
                    "types": self.types(plan),
                    "pipeline": self.pipeline,
                    "minutes": round(self.minutes, 1),
                    "uncorrected_ms": float(self.uncorrected_ms[i]),
                },
                measured_ms=float(self.measured_ms[i]),
                predicted_ms=float(self.predicted_ms[i]),
                interval_ms=(float(self.low_ms[i]), float(self.high_ms[i])),
                family=self.batch.topology,
                part="plans",
                source=f"{self.batch.name}/{self.task.name}.rows.json",
            )
            for i, plan in enumerate(self.plans)
        ]


_ORDER = (
    ShardingType.TABLE_WISE,
    ShardingType.ROW_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.TABLE_COLUMN_WISE,
    ShardingType.TABLE_ROW_WISE,
    ShardingType.GRID_SHARD,
    ShardingType.DATA_PARALLEL,
)


def medians_ms(rows: BenchRows, plans: Iterable[str], part: slice = slice(None)) -> Array:
    """Return the median of every plan's samples of rank 0, over all rounds or some."""
    return np.array([statistics.median(flat(rows.samples_ms(plan)[part])) for plan in plans])


def predict_task(
    batch: TaskSet, task: MeasuredTask, ablations: Sequence[Ablation] = ()
) -> TaskPrediction:
    """Predict and rate every plan of a task, without its measured iterations.

    Raises:
        ShardoptError: a plan cannot be predicted; names batch and task.
    """
    try:
        return _predict(batch, task, ablations)
    except ShardoptError as error:
        raise type(error)(f"{batch.name} {task.name}: {error}") from None


def _predict(batch: TaskSet, task: MeasuredTask, ablations: Sequence[Ablation]) -> TaskPrediction:
    ratios = drift_ratios(task_reference(task.rows), batch.reference_ms)
    hardware = correct_drift(batch.calibration.profile, ratios)
    workload, ranks = task.workload, batch.ranks
    plans = [task.plans[name] for name in task.rows.names]
    predictions = [predict(workload, ranks, hardware, plan) for plan in plans]
    low, high = np.array([p.interval_ms for p in predictions]).T
    rating = TorchRecObjective(workload, ranks, "cpu")
    return TaskPrediction(
        batch,
        task,
        np.array([p.iteration_ms for p in predictions]),
        FULL.times(workload, ranks, batch.calibration.profile, plans),
        low,
        high,
        {a.name: a.times(workload, ranks, hardware, plans) for a in ablations},
        np.array([rating.rating_ms([plan.tables[k] for k in workload.keys]) for plan in plans]),
        (task.at - batch.calibrated).total_seconds() / 60,
    )
