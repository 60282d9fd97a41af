"""What waiting for each other costs ranks: predicted with it, predicted without it, measured.

Without: the largest sum of a rank's own operations (`ablations.SUMS`). In most plans the same rank
is busiest all the time, and then both agree; `lab.tasks.crossed` draws those that tell.

Why: docs/decisions/0039.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from lab.fit.scores import relative_errors
from lab.tasks.crossed import BALANCED
from lab.validate.report import Cell, Scores
from lab.validate.tasks.ablations import SUMS
from lab.validate.tasks.ranking import Array, join_arrays
from lab.validate.tasks.task_prediction import TaskPrediction
from shardopt.calibrate.fitting import mape

EDGES = (0.01, 0.05, 0.10)
"""Of the classes of plans, by the predicted share of waiting."""


def synchronisation(tasks: Sequence[TaskPrediction]) -> Scores:
    """Errors with and without synchronisation, by how much of the iteration it is predicted to
    be."""
    measured, predicted, sums = (
        join_arrays([of(task) for task in tasks])
        for of in (
            lambda task: task.measured_ms,
            lambda task: task.predicted_ms,
            lambda task: task.ablated_ms[SUMS],
        )
    )
    place = np.searchsorted(EDGES, 1 - sums / predicted, side="right")
    names = [f"{100 * low:.0f} to {100 * high:.0f} %" for low, high in pairwise(EDGES)]
    labels = [f"below {100 * EDGES[0]:.0f} %", *names, f"from {100 * EDGES[-1]:.0f} %"]
    rows = [
        (
            label,
            int((place == i).sum()),
            *_errors(measured[place == i], predicted[place == i]),
            *_errors(measured[place == i], sums[place == i]),
        )
        for i, label in enumerate(labels)
    ]
    columns = (
        *(("waiting", "text"), ("n", "count"), ("error", "share"), ("bias", "signed")),
        *(("error of sums", "share"), ("bias of sums", "signed")),
    )
    about = (
        "Waiting: share of the predicted iteration beyond the largest sum of a rank's own "
        "operations. Errors of the prediction, and of that sum in its place; bias is the mean with "
        "its sign."
    )
    return Scores("synchronisation", columns, tuple(rows), about)


def _errors(measured: Array, predicted: Array) -> tuple[float, float]:
    errors = relative_errors(measured, predicted)
    return mape(errors), float(errors.mean()) if errors.size else math.nan


def over_balanced(tasks: Sequence[TaskPrediction]) -> list[Scores]:
    """How much slower each plan of a crossed task is than its balanced one; no table without such
    tasks."""
    found: dict[str, list[Array]] = {}
    for task in tasks:
        if BALANCED not in task.plans:
            continue
        base = task.plans.index(BALANCED)
        times = np.array([task.measured_ms, task.predicted_ms, task.ablated_ms[SUMS]])
        for at, plan in enumerate(task.plans):
            if at != base:
                found.setdefault(plan, []).append(times[:, at] / times[:, base] - 1)
    columns = (
        *(("plan", "text"), ("n", "count"), ("measured", "signed"), ("predicted", "signed")),
        *(("sums", "signed"), ("distance", "share"), ("distance of sums", "share")),
    )
    about = (
        "Time over that of the same task's balanced plan, minus one, so that errors about the "
        "tables cancel; distance: mean of |predicted - measured|."
    )
    rows = [_over_row(plan, np.array(of)) for plan, of in sorted(found.items())]
    return [Scores("plans over the balanced one", columns, tuple(rows), about)] if rows else []


def _over_row(plan: str, times: Array) -> tuple[Cell, ...]:
    """Of ``times[tasks, 3]``: measured, predicted, sums."""
    measured, predicted, sums = times.T
    means = (float(of.mean()) for of in (measured, predicted, sums))
    return (plan, len(times), *means, mape(predicted - measured), mape(sums - measured))
