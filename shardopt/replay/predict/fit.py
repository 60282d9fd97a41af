"""Kernel models of the calls of benchmarks, fitted on replays of calibration models.

A replay runs no modules and no autograd between its ops, so models that were fitted on training
steps do not fit it. `shardopt bench predict` uses the fit that is stored with a profile
(`predictor.hardware.loader`); this module fits anew, on a user's folder or for held-out errors.

Why: docs/decisions/0031.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from predictor.cost.ops.cpu_ops import OpModels, OpRow
from predictor.errors import InputError
from predictor.fit.cpu_ops import CapturedStep, fit_models
from predictor.iteration.op_graph import RankCalls
from shardopt.replay.predict.rows import FILE, FIT, ModelCalls, read_models

CALL_BYTES = 4096.0
"""What a core moves in the time that it takes to start an op, roughly."""


def read_replays(folder: Path) -> list[ModelCalls]:
    """The models of a folder.

    Raises:
        InputError: the folder is not what `python -m lab compare` writes.
    """
    path = folder / FILE
    if not path.is_file():
        raise InputError(
            f"{folder}: has no {FILE}; give a folder that python -m lab compare has written"
        )
    return read_models(path)


def fit_replays(models: Sequence[ModelCalls], ranks: int) -> OpModels:
    """Kernel models fitted on the calibration models among these.

    Args:
        ranks: of the benchmark that is to be predicted. Ops that no calibration model of several
            ranks runs are priced as on one rank.

    Raises:
        InputError: none of them is a calibration model that was timed.
    """
    fits = [model for model in models if model.part == FIT]
    pure = [step for model in fits if not _has_collectives(model) for step in _steps(model)]
    if not pure:
        raise InputError(
            "no calibration model of one rank was timed; measure with python -m lab compare"
        )
    alone = fit_models([step for model in fits for step in _steps(model)], pure)
    together = [step for model in fits if len(model.ranks) > 1 for step in _steps(model)]
    if ranks == 1 or not together:
        return alone
    shared = fit_models(together, (), alone.caches)
    return replace(alone, coefficients={**alone.coefficients, **shared.coefficients})


def _has_collectives(model: ModelCalls) -> bool:
    return any(rank.collectives for rank in model.ranks)


def _steps(model: ModelCalls) -> list[CapturedStep]:
    return [captured_step(rank, median(model.replay_ms)) for rank in model.ranks]


def captured_step(rank: RankCalls, step_ms: float) -> CapturedStep:
    """A rank's timed ops; the few calls of several ops are split by the bytes that these touch."""
    rows: list[OpRow] = []
    times: list[float] = []
    for call in rank.calls:
        if call.ms is not None:
            parts = [CALL_BYTES * row.count + sum(row.reuse) for row in call.rows]
            rows += call.rows
            times += [call.ms * part / sum(parts) for part in parts]
    return CapturedStep(tuple(rows), tuple(times), step_ms)
