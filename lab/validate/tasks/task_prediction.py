"""A task's plans predicted, measured, and rated by other pickers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lab.tasks.task_set import MeasuredTask, TaskSet, task_reference
from lab.validate.report import ComparedRow
from lab.validate.tasks.ablations import ABLATIONS, FULL
from lab.validate.tasks.drift import correct_drift, drift_ratios
from predictor.errors import ShardoptError
from predictor.model.plan import ShardingPlan, ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from predictor.predict import predict
from search.baselines.torchrec_planner import CostModel
from search.space.option import Option
from shardopt.bench.rows import BenchRows
from shardopt.bench.summary import flat

Array = NDArray[np.float64]


DEVELOPED_ON = tuple(f"2026-11-21-{name}" for name in ("a", "b", "c-link-1", "d-link-0.5"))
"""Batches on which versions of the predictor were compared; all others are fresh."""


@dataclass(frozen=True)
class TaskPrediction:
    """All that is known of one task's plans; arrays are ``[plans]``, in the order of the rows.

    Args:
        predicted_ms: from the batch's calibration, corrected for drift.
        uncorrected_ms: from the calibration as it is.
        low_ms, high_ms: the 90 % interval of ``predicted_ms``.
        ablated_ms: `Ablation.name` -> its times.
        ratings: TorchRec's own cost of each plan.
        minutes: from the end of the calibration to the task.
    """

    batch: TaskSet
    task: MeasuredTask
    predicted_ms: Array
    uncorrected_ms: Array
    low_ms: Array
    high_ms: Array
    ablated_ms: dict[str, Array]
    ratings: Array
    minutes: float

    @property
    def name(self) -> str:
        """``batch task-007``."""
        return f"{self.batch.name} {self.task.name}"

    @property
    def plans(self) -> list[str]:
        """Names, in the order of the arrays."""
        return self.task.rows.names

    @property
    def fresh(self) -> bool:
        """No version of the predictor was chosen on it."""
        return self.batch.name not in DEVELOPED_ON

    @property
    def pipeline(self) -> str:
        """The task's train pipeline."""
        return self.task.workload.train_pipeline

    @cached_property
    def measured_ms(self) -> Array:
        """Median over all iterations, as rank 0 saw them."""
        return medians_ms(self.task.rows, self.plans)

    def types(self, plan: str) -> str:
        """The sharding types that a plan mixes, e.g. ``TW+RW``."""
        used = {table.sharding_type for table in self.task.plans[plan].tables.values()}
        return "+".join(kind.short for kind in _ORDER if kind in used)

    def rows(self) -> list[ComparedRow]:
        """A row a plan."""
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
    """Median of every plan's samples of rank 0, of all rounds or some."""
    return np.array([statistics.median(flat(rows.samples_ms(plan)[part])) for plan in plans])


def predict_task(batch: TaskSet, task: MeasuredTask) -> TaskPrediction:
    """Predict and rate every plan of a task; no sample of its iterations is looked at.

    Raises:
        ShardoptError: a plan cannot be predicted; names batch and task.
    """
    try:
        return _predict(batch, task)
    except ShardoptError as error:
        raise type(error)(f"{batch.name} {task.name}: {error}") from None


def _predict(batch: TaskSet, task: MeasuredTask) -> TaskPrediction:
    ratios = drift_ratios(task_reference(task.rows), batch.reference_ms)
    hardware = correct_drift(batch.made.profile, ratios)
    workload, ranks = task.workload, batch.ranks
    plans = [task.plans[name] for name in task.rows.names]
    found = [predict(workload, ranks, hardware, plan) for plan in plans]
    low, high = np.array([p.interval_ms for p in found]).T
    return TaskPrediction(
        batch,
        task,
        np.array([p.iteration_ms for p in found]),
        FULL.times(workload, ranks, batch.made.profile, plans),
        low,
        high,
        {a.name: a.times(workload, ranks, hardware, plans) for a in ABLATIONS},
        np.array([torchrec_rating(workload, ranks, plan) for plan in plans]),
        (task.at - batch.calibrated).total_seconds() / 60,
    )


def torchrec_rating(workload: Workload, topology: Topology, plan: ShardingPlan) -> float:
    """What TorchRec's planner minimises, ms: the largest sum of its shard costs on a rank.

    `NoopPerfModel` (planner/perf_models.py) over the costs of
    `search.baselines.torchrec_planner`, on CPU.
    """
    model = CostModel(replace(workload, train_pipeline="base"), topology, "cpu")
    load = [0.0] * topology.world_size
    for index, key in enumerate(workload.keys):
        table = plan.tables[key]
        option = Option(
            index,
            table.sharding_type,
            table.compute_kernel,
            tuple(shard.size for shard in table.shards),
            tuple(shard.offset for shard in table.shards),
        )
        cost = model.shard_perf(option).total
        for rank in table.ranks:
            load[rank] += cost
    return max(load)
