"""How plans are ordered and picked within tasks: rank correlation, regret, other pickers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from lab.fit.scores import (
    faster_half,
    picks,
    regrets,
    relative_errors,
    shape_errors,
    spearman,
    wilson,
)
from lab.validate.report import Cell, Scores
from lab.validate.tasks.task_prediction import TaskPrediction
from shardopt.calibrate.fitting import mape

Array = NDArray[np.float64]
Pair = tuple[Array, Array]
"""Measured and predicted times of one task's plans."""

WITHIN = (0.0, 0.02, 0.05, 0.10)
"""A picked plan counts when it is at most so much slower than the fastest."""
PICKED = 0.05
"""The same, where one figure stands for all."""
LOOKUPS_PLAN = "table_wise_by_lookups"

ORDER_COLUMNS = (
    *(("what", "text"), ("tasks", "count"), ("plans", "count")),
    *(("error", "share"), ("shape error", "share")),
    *(("Spearman median", "figure"), ("Spearman min", "figure")),
    *(("faster half median", "figure"), ("faster half min", "figure")),
)


FRESH = "predicted, fresh batches"


def _fresh(tasks: Sequence[TaskPrediction]) -> list[list[TaskPrediction]]:
    """The tasks on which no version of the predictor was chosen, where they are not all."""
    found = [t for t in tasks if t.fresh]
    return [found] if 0 < len(found) < len(tasks) else []


def ranking(tasks: Sequence[TaskPrediction]) -> Scores:
    """Shape error and rank correlation within tasks."""
    fresh = _fresh(tasks)
    rated = order_row("TorchRec's estimator", [(t.measured_ms, t.ratings) for t in tasks])
    rows = [
        order_row("predicted", [(t.measured_ms, t.predicted_ms) for t in tasks]),
        *(order_row(FRESH, [(t.measured_ms, t.predicted_ms) for t in some]) for some in fresh),
        order_row("not corrected for drift", [(t.measured_ms, t.uncorrected_ms) for t in tasks]),
        # a rating is no iteration time: only its order counts
        (*rated[:3], None, None, *rated[5:]),
    ]
    return Scores(
        "ranking",
        ORDER_COLUMNS,
        tuple(rows),
        "Error: mean of |predicted / measured - 1|; shape error: the same once each task's median "
        "ratio is divided out; Spearman: over a task's plans, and over its faster half.",
    )


def order_row(name: str, pairs: Sequence[Pair]) -> tuple[Cell, ...]:
    """A line of how well times agree over some tasks."""
    halves = [(m[faster_half(m)], p[faster_half(m)]) for m, p in pairs]
    return (
        name,
        len(pairs),
        sum(len(m) for m, _ in pairs),
        mape(join_arrays([relative_errors(m, p) for m, p in pairs])),
        mape(join_arrays([shape_errors(m, p) for m, p in pairs])),
        *_median_and_min([spearman(m, p) for m, p in pairs]),
        *_median_and_min([spearman(m, p) for m, p in halves]),
    )


def _median_and_min(values: Sequence[float]) -> tuple[float, float]:
    known = [value for value in values if not math.isnan(value)]
    return (float(np.median(known)), min(known)) if known else (math.nan, math.nan)


PICK_COLUMNS = (
    *(("picker", "text"), ("tasks", "count"), ("fastest", "interval")),
    *((f"within {100 * most:.0f} %", "interval") for most in WITHIN[1:]),
    *(("mean regret", "share"), ("max regret", "share")),
)


def picking(tasks: Sequence[TaskPrediction]) -> Scores:
    """How good the plan is that each picker takes."""
    by_lookups = [t for t in tasks if _lookups_plan(t) is not None]
    rows = [
        pick_row("predicted fastest", _by_score(tasks, lambda t: t.predicted_ms)),
        *(pick_row(FRESH, _by_score(some, lambda t: t.predicted_ms)) for some in _fresh(tasks)),
        pick_row("not corrected for drift", _by_score(tasks, lambda t: t.uncorrected_ms)),
        pick_row("table_wise by lookups", [(t.measured_ms, _only_lookups(t)) for t in by_lookups]),
        pick_row("TorchRec's estimator", _by_score(tasks, lambda t: t.ratings)),
        pick_row(
            "random", [(t.measured_ms, np.full(len(t.plans), 1 / len(t.plans))) for t in tasks]
        ),
    ]
    return Scores(
        "picking",
        PICK_COLUMNS,
        tuple(rows),
        "Share of tasks in which the picked plan is the fastest measured, or at most so much "
        "slower, with Wilson's 95 % interval; regret is how much slower it is. Random, and ties: "
        "expected values; their max regret is the worst that can happen.",
    )


def pick_row(name: str, picked: Sequence[Pair]) -> tuple[Cell, ...]:
    """A line of `picking`; each pair is measured times and the chances of every plan."""
    if not picked:
        return (name, 0, *(None,) * (len(PICK_COLUMNS) - 2))
    lost = [(regrets(measured), chances) for measured, chances in picked]
    shares = [_share(lost, most) for most in WITHIN]
    worst = max(float(regret[chances > 0].max()) for regret, chances in lost)
    mean = float(np.mean([regret @ chances for regret, chances in lost]))
    n = len(lost)
    return (name, n, *((share, *wilson(share, n)) for share in shares), mean, worst)


def _share(lost: Sequence[Pair], most: float) -> float:
    return float(np.mean([chances[regret <= most].sum() for regret, chances in lost]))


def within(pairs: Sequence[Pair], most: float = PICKED) -> float:
    """Share of tasks whose predicted fastest is at most so much slower than the fastest."""
    return _share([(regrets(m), picks(p)) for m, p in pairs], most) if pairs else math.nan


def _by_score(
    tasks: Sequence[TaskPrediction], score: Callable[[TaskPrediction], Array]
) -> list[Pair]:
    return [(t.measured_ms, picks(score(t))) for t in tasks]


def _lookups_plan(task: TaskPrediction) -> int | None:
    return next((i for i, name in enumerate(task.plans) if name.startswith(LOOKUPS_PLAN)), None)


def _only_lookups(task: TaskPrediction) -> Array:
    chances = np.zeros(len(task.plans))
    chances[_lookups_plan(task)] = 1.0
    return chances


def join_arrays(arrays: Sequence[Array]) -> Array:
    """One array of all; empty of none."""
    return np.concatenate(arrays) if arrays else np.zeros(0)
