"""The figures of `python -m lab validate torchrec-cpu`, a table each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from lab.fit.scores import (
    coverage,
    geomean,
    picks,
    regrets,
    relative_errors,
    shape_errors,
    spearman,
)
from lab.tasks.task_set import TaskSet
from lab.validate.report import Cell, Scores
from lab.validate.tasks.ranking import (
    ORDER_COLUMNS,
    PICK_COLUMNS,
    PICKED,
    Array,
    Pair,
    join_arrays,
    order_row,
    pick_row,
    picking,
    ranking,
    within,
)
from lab.validate.tasks.synchronisation import over_balanced, synchronisation
from lab.validate.tasks.task_prediction import TaskPrediction, medians_ms
from shardopt.calibrate.fitting import mape

MINUTES = (30.0, 60.0, 120.0, 240.0)
"""Edges of the classes of time since the calibration."""
FEWEST_ROUNDS = 2
"""Of a task that is halved into odd and even ones."""


def all_scores(tasks: Sequence[TaskPrediction], batches: Sequence[TaskSet]) -> tuple[Scores, ...]:
    """Every table, in the order shown."""
    return (
        absolute(tasks),
        ranking(tasks),
        picking(tasks),
        intervals(tasks),
        truth(tasks),
        ablations(tasks),
        synchronisation(tasks),
        *over_balanced(tasks),
        held_out(batches),
        by_task(tasks),
    )


def absolute(tasks: Sequence[TaskPrediction]) -> Scores:
    """Errors of plans, all and by what they are."""
    errors = [relative_errors(t.measured_ms, t.predicted_ms) for t in tasks]
    raw = [relative_errors(t.measured_ms, t.uncorrected_ms) for t in tasks]
    names = [[f"{t.name} {plan}" for plan in t.plans] for t in tasks]
    labels = [[labels_of(t, plan) for plan in t.plans] for t in tasks]
    flat_errors, flat_raw = join_arrays(errors), join_arrays(raw)
    flat_names = [name for of in names for name in of]
    flat_labels = [label for of in labels for label in of]
    rows = [
        _error_row("all", flat_errors, flat_names, flat_raw),
        _error_row("all, not corrected for drift", flat_raw, flat_names, None),
    ]
    for kind in (label for label in _LABELS if flat_labels):
        for value in _in_order(kind, {label[kind] for label in flat_labels}):
            keep = [i for i, label in enumerate(flat_labels) if label[kind] == value]
            chosen = [flat_names[i] for i in keep]
            name = f"{kind} {value}"
            rows.append(_error_row(name, flat_errors[keep], chosen, flat_raw[keep]))
    return Scores(
        "absolute error",
        (
            *(("plans", "text"), ("n", "count"), ("mean", "share"), ("geomean", "share")),
            *(("bias", "signed"), ("worst", "signed"), ("worst plan", "text")),
            ("mean, no drift correction", "share"),
        ),
        tuple(rows),
        "Predicted / measured - 1 of single plans; bias is the mean with its sign.",
    )


_LABELS = ("batches", "batch", "types", "topology", "pipeline", "minutes after calibration")


def labels_of(task: TaskPrediction, plan: str) -> dict[str, str]:
    """The classes that a plan counts in."""
    edges = (0.0, *MINUTES, math.inf)
    place = sum(edge <= task.minutes for edge in MINUTES)
    low, high = edges[place], edges[place + 1]
    minutes = f"from {low:.0f}" if math.isinf(high) else f"up to {high:.0f}"
    kind = "fresh" if task.fresh else "developed on"
    values = (kind, task.batch.name, task.types(plan), task.batch.topology, task.pipeline, minutes)
    return dict(zip(_LABELS, values, strict=True))


def _in_order(kind: str, values: Iterable[str]) -> list[str]:
    if kind != _LABELS[-1]:
        return sorted(values)
    return sorted(values, key=lambda text: (text.startswith("from"), float(text.split()[-1])))


def _error_row(
    name: str, errors: Array, names: Sequence[str], raw: Array | None
) -> tuple[Cell, ...]:
    if not len(errors):
        return (name, 0, None, None, None, None, "", None)
    worst = int(np.abs(errors).argmax())
    figures = (mape(errors), geomean(errors), float(errors.mean()), float(errors[worst]))
    return (name, len(errors), *figures, names[worst], None if raw is None else mape(raw))


def intervals(tasks: Sequence[TaskPrediction]) -> Scores:
    """What the 90 % intervals hold."""
    measured, low, high, middle = (
        join_arrays([of(t) for t in tasks])
        for of in (
            lambda t: t.measured_ms,
            lambda t: t.low_ms,
            lambda t: t.high_ms,
            lambda t: t.predicted_ms,
        )
    )
    width = float(np.median((high - low) / middle)) if len(middle) else math.nan
    row = ("all", len(measured), coverage(measured, low, high), width)
    columns = (("plans", "text"), ("n", "count"), ("covered", "share"), ("median width", "share"))
    return Scores("90 % intervals", columns, (row,), "Width: (high - low) / predicted.")


def truth(tasks: Sequence[TaskPrediction]) -> Scores:
    """Measurement against measurement: what no prediction can beat."""
    halved = [t for t in tasks if len(t.task.rows.rounds) >= FEWEST_ROUNDS]
    halves = [(_half_ms(t, 1), _half_ms(t, 0)) for t in halved]
    again = [pair for pair in map(_again, tasks) if pair is not None]
    named: dict[str, list[Pair]] = {"even rounds against odd": halves, "measured again": again}
    columns = (*ORDER_COLUMNS, *PICK_COLUMNS[2:])
    rows = [order_row(name, p) + _pick_cells(p) for name, p in named.items()]
    about = (
        "The same plans twice, scored as if the second were a prediction of the first; `error` is "
        "the change of absolute times."
    )
    return Scores("truth against truth", columns, tuple(rows), about)


def _half_ms(task: TaskPrediction, start: int) -> Array:
    """Medians of every second round."""
    return medians_ms(task.task.rows, task.plans, slice(start, None, 2))


def _pick_cells(pairs: Sequence[Pair]) -> tuple[Cell, ...]:
    return pick_row("", [(m, picks(p)) for m, p in pairs])[2:]


def _again(task: TaskPrediction) -> Pair | None:
    """The first and the second measurement of the plans that both have."""
    second = task.task.again
    if second is None:
        return None
    both = [name for name in task.plans if name in second.names]
    return medians_ms(task.task.rows, both), medians_ms(second, both)


def ablations(tasks: Sequence[TaskPrediction]) -> Scores:
    """What each idea of the predictor is worth."""
    named: dict[str, list[Pair]] = {"everything": [(t.measured_ms, t.predicted_ms) for t in tasks]}
    for name in tasks[0].ablated_ms if tasks else ():
        named[name] = [(t.measured_ms, t.ablated_ms[name]) for t in tasks]
    rows = []
    for name, pairs in named.items():
        line = order_row(name, pairs)
        rows.append((name, *line[3:6], within(pairs)))
    columns = (
        *(("predictor", "text"), ("error", "share"), ("shape error", "share")),
        *(("Spearman median", "figure"), (f"within {100 * PICKED:.0f} %", "share")),
    )
    return Scores("ablations", columns, tuple(rows), "One idea taken out at a time.")


def held_out(batches: Sequence[TaskSet]) -> Scores:
    """Rows of the calibrations that no fit has seen, pooled."""
    pooled: dict[str, list[Array]] = {}
    for batch in batches:
        for family, errors in batch.made.errors.items():
            pooled.setdefault(family, []).append(errors.errors)
    rows = [_kernel_row(family, join_arrays(errors)) for family, errors in pooled.items()]
    columns = (
        *(("family", "text"), ("n", "count"), ("mean", "share")),
        *(("geomean", "share"), ("bias", "signed")),
    )
    return Scores(
        "held-out kernels", columns, tuple(row for row in rows if row[1]), "Of all calibrations."
    )


def _kernel_row(family: str, errors: Array) -> tuple[Cell, ...]:
    bias = float(np.median(errors)) if len(errors) else math.nan
    return (family, len(errors), mape(errors), geomean(errors), bias)


def by_task(tasks: Sequence[TaskPrediction]) -> Scores:
    """A line a task."""
    columns = (
        *(("task", "text"), ("topology", "text"), ("pipeline", "text"), ("minutes", "count")),
        *(("plans", "count"), ("fastest ms", "ms"), ("slowest ms", "ms"), ("error", "share")),
        *(("shape error", "share"), ("Spearman", "figure"), ("regret", "share")),
    )
    return Scores("tasks", columns, tuple(map(_task_row, tasks)), "")


def _task_row(task: TaskPrediction) -> tuple[Cell, ...]:
    measured, predicted = task.measured_ms, task.predicted_ms
    return (
        *(task.name, task.batch.topology, task.pipeline, round(task.minutes), len(task.plans)),
        *(float(measured.min()), float(measured.max())),
        mape(relative_errors(measured, predicted)),
        mape(shape_errors(measured, predicted)),
        spearman(measured, predicted),
        float(regrets(measured) @ picks(predicted)),
    )
