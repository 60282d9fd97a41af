"""The tables of `python -m lab validate torchrec-cpu`, each as lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from lab.statistics import (
    coverage,
    faster_half,
    geomean,
    grouped,
    picks,
    regrets,
    relative_errors,
    shape_errors,
    spearman,
    wilson,
)
from lab.suites import Cell, Scores, Suite
from lab.tasks.task_set import TaskSet
from lab.validate.tasks.ablations import SUMS
from lab.validate.tasks.task_prediction import TaskPrediction, medians_ms
from shardopt.calibrate.fitting import Array, mape

Pair = tuple[Array, Array]
"""Measured and predicted times of one task's plans, ``[plans]``."""
Line = tuple[Cell, ...]

WITHIN = (0.0, 0.02, 0.05, 0.10)
"""Regrets up to which a picked plan counts."""
PICKED = 0.05
"""The same, for tables with a single figure."""
LOOKUPS_PLAN = "table_wise_by_lookups"
BALANCED = "balanced"
"""Plan of a crossed task with both kinds of tables on every rank."""
EDGES = (0.01, 0.05, 0.10)
"""Edges of the classes of plans by the predicted share of waiting."""
MINUTES = (30.0, 60.0, 120.0, 240.0)
"""Edges of the classes of time since the calibration."""
FEWEST_ROUNDS = 2
"""Least rounds of a task to split into odd and even ones."""
FRESH = "predicted, fresh batches"


def predicted_pairs(tasks: Sequence[TaskPrediction]) -> list[Pair]:
    return [(t.measured_ms, t.predicted_ms) for t in tasks]


def join_arrays(arrays: Sequence[Array]) -> Array:
    """Concatenate the arrays; empty without any."""
    return np.concatenate(arrays) if arrays else np.zeros(0)


def shared_tables(
    suite: Suite, tasks: Sequence[TaskPrediction], batches: Sequence[TaskSet]
) -> dict[str, Scores]:
    """Return the tables that every suite of single plans has, by name."""
    lines = {
        "ranking": ranking(tasks),
        "picking": picking(tasks),
        "90 % intervals": intervals(tasks),
        "truth against truth": truth(tasks),
        "held-out kernels": held_out(batches),
        "tasks": map(_task_line, tasks),
    }
    return {name: suite.table(name, table_lines) for name, table_lines in lines.items()}


def _fresh(tasks: Sequence[TaskPrediction]) -> list[list[TaskPrediction]]:
    """Return the fresh tasks, if only some are: no version of the predictor was chosen on them."""
    fresh = [t for t in tasks if t.fresh]
    return [fresh] if 0 < len(fresh) < len(tasks) else []


def ranking(tasks: Sequence[TaskPrediction]) -> Iterator[Line]:
    """Yield shape error and rank correlation within tasks."""
    yield order_line("predicted", predicted_pairs(tasks))
    for fresh in _fresh(tasks):
        yield order_line(FRESH, predicted_pairs(fresh))
    uncorrected = [(t.measured_ms, t.uncorrected_ms) for t in tasks]
    yield order_line("not corrected for drift", uncorrected)
    rated = order_line("TorchRec's estimator", [(t.measured_ms, t.ratings) for t in tasks])
    # a rating is no iteration time: only its order counts
    yield (*rated[:3], None, None, *rated[5:])


def order_line(name: str, pairs: Sequence[Pair]) -> Line:
    """Return the agreement of times over some tasks."""
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
    valid = [value for value in values if not math.isnan(value)]
    return (float(np.median(valid)), min(valid)) if valid else (math.nan, math.nan)


def picking(tasks: Sequence[TaskPrediction]) -> Iterator[Line]:
    """Yield the regret of the plan that each picker chooses."""

    def by(
        score: Callable[[TaskPrediction], Array], scored: Sequence[TaskPrediction]
    ) -> list[Pair]:
        return [(t.measured_ms, picks(score(t))) for t in scored]

    yield pick_line("predicted fastest", by(lambda t: t.predicted_ms, tasks))
    for fresh in _fresh(tasks):
        yield pick_line(FRESH, by(lambda t: t.predicted_ms, fresh))
    yield pick_line("not corrected for drift", by(lambda t: t.uncorrected_ms, tasks))
    by_lookups = []
    for task in tasks:
        first = [name.startswith(LOOKUPS_PLAN) for name in task.plans]
        if any(first):
            by_lookups.append((task.measured_ms, np.eye(len(first))[first.index(True)]))
    yield pick_line("table_wise by lookups", by_lookups)
    yield pick_line("TorchRec's estimator", by(lambda t: t.ratings, tasks))
    yield pick_line(
        "random", [(t.measured_ms, np.full(len(t.plans), 1 / len(t.plans))) for t in tasks]
    )


def pick_line(name: str, picked: Sequence[Pair]) -> Line:
    """Return a line of `picking`, from measured times and the probability of every plan."""
    if not picked:
        return (name, 0, *(None,) * (len(WITHIN) + 2))
    lost = [(regrets(measured), chances) for measured, chances in picked]
    shares = [_share(lost, most) for most in WITHIN]
    worst = max(float(regret[chances > 0].max()) for regret, chances in lost)
    mean = float(np.mean([regret @ chances for regret, chances in lost]))
    n = len(lost)
    return (name, n, *((share, *wilson(share, n)) for share in shares), mean, worst)


def _share(lost: Sequence[Pair], most: float) -> float:
    return float(np.mean([chances[regret <= most].sum() for regret, chances in lost]))


def ablation_lines(tasks: Sequence[TaskPrediction]) -> Iterator[Line]:
    """Yield each predictor's agreement, and the share of tasks whose predicted fastest plan is at
    most `PICKED` slower than the fastest."""
    named = {"everything": predicted_pairs(tasks)}
    for name in tasks[0].ablated_ms if tasks else ():
        named[name] = [(t.measured_ms, t.ablated_ms[name]) for t in tasks]
    for name, pairs in named.items():
        lost = [(regrets(m), picks(p)) for m, p in pairs]
        within = _share(lost, PICKED) if pairs else math.nan
        yield (name, *order_line(name, pairs)[3:6], within)


def intervals(tasks: Sequence[TaskPrediction]) -> Iterator[Line]:
    """Yield the coverage and width of the 90 % intervals."""
    measured = join_arrays([t.measured_ms for t in tasks])
    low, high = (join_arrays([getattr(t, end) for t in tasks]) for end in ("low_ms", "high_ms"))
    middle = join_arrays([t.predicted_ms for t in tasks])
    width = float(np.median((high - low) / middle)) if len(middle) else math.nan
    yield ("all", len(measured), coverage(measured, low, high), width)


def truth(tasks: Sequence[TaskPrediction]) -> Iterator[Line]:
    """Yield measurement against measurement, which no prediction can beat."""
    halves, again = [], []
    for task in tasks:
        rows, second = task.task.rows, task.task.again
        if len(rows.rounds) >= FEWEST_ROUNDS:
            odd, even = (medians_ms(rows, task.plans, slice(at, None, 2)) for at in (1, 0))
            halves.append((odd, even))
        if second is not None:
            both = [name for name in task.plans if name in second.names]
            again.append((medians_ms(rows, both), medians_ms(second, both)))
    for name, pairs in (("even rounds against odd", halves), ("measured again", again)):
        picked = pick_line("", [(m, picks(p)) for m, p in pairs])
        yield order_line(name, pairs) + picked[2:]


def held_out(batches: Sequence[TaskSet]) -> Iterator[Line]:
    """Yield errors on held-out rows of the calibrations, pooled."""
    families = [item for batch in batches for item in batch.calibration.errors.items()]
    for family, members in grouped(families, lambda item: item[0]).items():
        errors = join_arrays([holdout.errors for _, holdout in members])
        if len(errors):
            bias = float(np.median(errors))
            yield (family, len(errors), mape(errors), geomean(errors), bias)


def _task_line(task: TaskPrediction) -> Line:
    measured, predicted = task.measured_ms, task.predicted_ms
    return (
        *(task.name, task.batch.topology, task.pipeline, round(task.minutes), len(task.plans)),
        *(float(measured.min()), float(measured.max())),
        mape(relative_errors(measured, predicted)),
        mape(shape_errors(measured, predicted)),
        spearman(measured, predicted),
        float(regrets(measured) @ picks(predicted)),
    )


def _mean(errors: Array) -> float:
    return float(errors.mean()) if errors.size else math.nan


def synchronisation(tasks: Sequence[TaskPrediction]) -> Iterator[Line]:
    """Yield errors with and without synchronisation, by its predicted share of the iteration."""
    measured = join_arrays([task.measured_ms for task in tasks])
    predicted = join_arrays([task.predicted_ms for task in tasks])
    sums = join_arrays([task.ablated_ms[SUMS] for task in tasks])
    place = np.searchsorted(EDGES, 1 - sums / predicted, side="right")
    names = [f"{100 * low:.0f} to {100 * high:.0f} %" for low, high in pairwise(EDGES)]
    labels = [f"below {100 * EDGES[0]:.0f} %", *names, f"from {100 * EDGES[-1]:.0f} %"]
    for at, label in enumerate(labels):
        here = place == at
        errors = [relative_errors(measured[here], times[here]) for times in (predicted, sums)]
        figures = (
            figure
            for class_errors in errors
            for figure in (mape(class_errors), _mean(class_errors))
        )
        yield (label, int(here.sum()), *figures)


def over_balanced(tasks: Sequence[TaskPrediction]) -> list[Line]:
    """Return each plan's relative slowdown over the balanced plan of its crossed task."""
    slowdowns: dict[str, list[Array]] = {}
    for task in (task for task in tasks if BALANCED in task.plans):
        base = task.plans.index(BALANCED)
        times = np.array([task.measured_ms, task.predicted_ms, task.ablated_ms[SUMS]])
        for at, plan in enumerate(task.plans):
            if at != base:
                slowdowns.setdefault(plan, []).append(times[:, at] / times[:, base] - 1)
    lines: list[Line] = []
    for plan, samples in sorted(slowdowns.items()):
        measured, predicted, sums = np.array(samples).T
        means = (float(times.mean()) for times in (measured, predicted, sums))
        apart = mape(predicted - measured), mape(sums - measured)
        lines.append((plan, len(samples), *means, *apart))
    return lines


def absolute(tasks: Sequence[TaskPrediction]) -> Iterator[Line]:
    """Yield errors of all plans, and by class."""
    errors = join_arrays([relative_errors(t.measured_ms, t.predicted_ms) for t in tasks])
    raw = join_arrays([relative_errors(t.measured_ms, t.uncorrected_ms) for t in tasks])
    names = [f"{t.name} {plan}" for t in tasks for plan in t.plans]
    labels = [labels_of(t, plan) for t in tasks for plan in t.plans]
    yield _error_line("all", errors, names, raw)
    yield _error_line("all, not corrected for drift", raw, names, None)
    for kind in labels[0] if labels else ():
        classes: dict[str, list[int]] = {}
        for at, label in enumerate(labels):
            classes.setdefault(label[kind], []).append(at)
        order = _by_minutes if kind == MINUTES_LABEL else str
        for value in sorted(classes, key=order):
            keep = classes[value]
            chosen = [names[at] for at in keep]
            yield _error_line(f"{kind} {value}", errors[keep], chosen, raw[keep])


MINUTES_LABEL = "minutes after calibration"


def labels_of(task: TaskPrediction, plan: str) -> dict[str, str]:
    """Return the classes of a plan."""
    place = sum(edge <= task.minutes for edge in MINUTES)
    last = place == len(MINUTES)
    return {
        "batches": "fresh" if task.fresh else "developed on",
        "batch": task.batch.name,
        "types": task.types(plan),
        "topology": task.batch.topology,
        "pipeline": task.pipeline,
        MINUTES_LABEL: f"from {MINUTES[-1]:.0f}" if last else f"up to {MINUTES[place]:.0f}",
    }


def _by_minutes(text: str) -> tuple[bool, float]:
    return text.startswith("from"), float(text.split()[-1])


def _error_line(name: str, errors: Array, names: Sequence[str], raw: Array | None) -> Line:
    if not len(errors):
        return (name, 0, None, None, None, None, "", None)
    worst = int(np.abs(errors).argmax())
    figures = (mape(errors), geomean(errors), float(errors.mean()), float(errors[worst]))
    return (name, len(errors), *figures, names[worst], None if raw is None else mape(raw))
