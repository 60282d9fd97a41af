"""Kernel models of CPU ops, fitted on ops timed inside steps of calibration models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from predictor import units
from predictor.cost.ops.cpu_ops import (
    GEMMS,
    VIEW,
    Caches,
    OpModels,
    OpRow,
    group_of,
    name_of,
    plain_work,
)

Array = NDArray[np.float64]

NEAR_BYTES = (1.0 * units.MIB, 2.0 * units.MIB)
FAR_BYTES = tuple(size * units.MIB for size in (24.0, 64.0, 160.0))
"""Candidate cache sizes: the core's own is 2 MiB, its part of the shared one may vary."""
ROUNDS = 6
OUTLIER = 0.1
"""Relative error above which a row's weight falls as its inverse root."""


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """Calibration step.

    Args:
        rows: ops of the step, with views.
        ms: time of all calls of each row, measured inside the step.
        step_ms: time of the step without timing inside.
    """

    rows: tuple[OpRow, ...]
    ms: tuple[float, ...]
    step_ms: float


def fit_models(
    steps: Sequence[CapturedStep],
    alone: Sequence[CapturedStep] | None = None,
    caches: Caches | None = None,
) -> OpModels:
    """Fit all kernel models, and the time of a step beyond its ops.

    Non-negative least squares on relative errors, each row weighted by its share of its step, with
    the caches of the smallest residual.

    Args:
        alone: steps without anything but their ops, which give `OpModels.stretch` and
            `OpModels.op_ms`; all steps if None. If empty, these two are not fitted.
        caches: known cache sizes.
    """
    groups = _group_rows(steps)
    candidates = [Caches(near, far) for near in NEAR_BYTES for far in FAR_BYTES]
    candidates = candidates if caches is None else [caches]
    fits = [_fit(groups, caches) for caches in candidates]
    models, _ = min(fits, key=lambda fit: fit[1])
    alone = steps if alone is None else alone
    return _with_host(models, alone) if alone else models


@dataclass(frozen=True, eq=False)
class _Points:
    """Rows of one group: work without misses, bytes by reuse distance, ms a call, and shares."""

    plain: Array
    reuse: Array
    ms: Array
    shares: Array


def _group_rows(steps: Sequence[CapturedStep]) -> dict[str, _Points]:
    """Return the rows of each group, and of each op over all its layouts."""
    rows_of: dict[str, list[tuple[OpRow, float, float]]] = defaultdict(list)
    for step in steps:
        for row, spent in zip(step.rows, step.ms, strict=True):
            if row.kind != VIEW:
                for group in {group_of(row.kind), name_of(row.kind)}:
                    rows_of[group].append((row, spent / row.count, spent / step.step_ms))
    return {
        group: _Points(
            np.array([plain_work(row) for row, _, _ in points]),
            np.array([np.array(row.reuse) / row.count for row, _, _ in points]),
            np.array([ms for _, ms, _ in points]),
            np.array([share for _, _, share in points]),
        )
        for group, points in rows_of.items()
    }


def _fit(groups: Mapping[str, _Points], caches: Caches) -> tuple[OpModels, float]:
    coefficients: dict[str, Array] = {}
    total = 0.0
    for group, points in groups.items():
        coefficients[group], residual = _fit_group(points, caches)
        # the model of an op over all its layouts is a fallback: its error does not count
        total += residual if " " in group or group in GEMMS.values() else 0.0
    return OpModels(coefficients, caches), total


def _fit_group(points: _Points, caches: Caches) -> tuple[Array, float]:
    """Return the coefficients, and the squared errors as shares of the steps."""
    from scipy.optimize import nnls

    works = np.concatenate([points.plain, caches.misses(points.reuse)], axis=1)
    rows = works / points.ms[:, None]
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    base = np.sqrt(points.shares / points.shares.sum())
    weights = base
    solution, errors = np.zeros(rows.shape[1]), np.zeros(len(rows))
    for _ in range(ROUNDS):
        solution, _ = nnls(rows / scale * weights[:, None], weights)
        errors = np.abs(rows / scale @ solution - 1)
        weights = base / np.sqrt(np.maximum(errors / OUTLIER, 1.0))
    return solution / scale, float(np.square(errors * points.shares).sum())


def _with_host(models: OpModels, steps: Sequence[CapturedStep]) -> OpModels:
    """Add the time of steps beyond their ops: in proportion, and per call."""
    from scipy.optimize import nnls

    ops = np.array([sum(map(models.row_ms, step.rows)) for step in steps])
    calls = np.array([float(sum(row.count for row in step.rows)) for step in steps])
    whole = np.array([step.step_ms for step in steps])
    solution, _ = nnls(np.stack([ops, calls], axis=1) / whole[:, None], np.ones(len(steps)))
    return replace(models, stretch=float(solution[0]), op_ms=float(solution[1]))


def errors_by_group(
    steps: Sequence[CapturedStep], models: OpModels
) -> Mapping[str, tuple[float, float]]:
    """Return group -> its share of the steps, and its relative error."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for step in steps:
        for row, ms in zip(step.rows, step.ms, strict=True):
            if row.kind != VIEW:
                both = spent[group_of(row.kind)]
                both[0] += ms
                both[1] += models.row_ms(row)
    whole = sum(step.step_ms for step in steps)
    return {group: (ms / whole, model / ms - 1) for group, (ms, model) in spent.items()}
