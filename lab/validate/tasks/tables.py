"""The figures of `python -m lab validate torchrec-cpu`, a table each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lab.tasks.task_set import TaskSet
from lab.validate.report import (
    Cell,
    Scores,
    coverage,
    faster_half,
    geomean,
    picks,
    regrets,
    relative_errors,
    shape_errors,
    spearman,
    wilson,
)
from lab.validate.tasks.ablations import SUMS
from lab.validate.tasks.task_prediction import TaskPrediction, medians_ms
from shardopt.calibrate.fitting import mape

Array = NDArray[np.float64]
Pair = tuple[Array, Array]
"""Measured and predicted times of one task's plans."""

WITHIN = (0.0, 0.02, 0.05, 0.10)
"""A picked plan counts when it is at most so much slower than the fastest."""
PICKED = 0.05
"""The same, where one figure stands for all."""
LOOKUPS_PLAN = "table_wise_by_lookups"
BALANCED = "balanced"
"""Of a crossed task: both kinds of tables on every rank."""

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
