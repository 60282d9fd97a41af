"""Predictions of generated benchmarks against their replays.

Kernel models are fitted on calls that were timed inside replays of calibration models
(`lab.replay.models.CALIBRATIONS`); collectives are those of a profile. No other
model was run for its prediction. The fit is made anew, so that a calibration model can be held out;
of the committed rows it is the one that `shardopt bench predict` loads from the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from lab.replay.calls import FIT, TEST, ModelCalls, captured_step, fit_replays, read_replays
from lab.replay.op_fit import CapturedStep, errors_by_group
from lab.suites import SUITES, Cell, ComparedRow, Report, Summary
from predictor.cost.ops.cpu_ops import OpModels
from predictor.hardware.loader import load_hardware
from shardopt.formatting import plural
from shardopt.replay.predict import OP_MODELS, predict_ranks

LARGEST_GROUPS = 14
PARTS = {TEST: "models", FIT: "calibration"}
FRESH = frozenset(
    {"bert medium", "gpt2 medium", "convnet medium", "dlrm 1 rank", "dlrm 2 ranks middle"}
    | {"mlp narrow"}
)
"""Models that were added, and first measured, after the form of the kernel models was fixed."""


def validate_replay(folder: Path) -> Report:
    """Fit on the calibration models of a folder and predict all others.

    Raises:
        InputError: the folder is not what `python -m lab compare` writes.
    """
    every = read_replays(folder)
    fits = {n: fit_replays(every, n) for n in sorted({len(model.ranks) for model in every})}
    found = [(model, _predict(model, fits[len(model.ranks)])) for model in every]
    rows = [_compared(model, of["predicted_ms"], PARTS[model.part]) for model, of in found]
    models = [row for row in rows if row.part == PARTS[TEST]]
    suite = SUITES["replay"]
    kinds = {
        "models": models,
        "of these, first measured after the kernel models were fixed": [
            row for row in models if row.name["model"] in FRESH
        ],
        "calibration models, each from the others": predict_held_out(every),
    }
    tables = [
        suite.table("iterations", errors_by_ranks(kinds)),
        suite.table("models", [_model_row(*one) for one in found if one[0].part == TEST]),
    ]
    for ranks, fit in fits.items():
        steps = [
            captured_step(rank, median(model.replay_ms))
            for model in every
            if model.part == TEST and len(model.ranks) == ranks
            for rank in model.ranks
        ]
        said = {"ranks": ranks, "call_us": 1e3 * fit.op_ms, "stretch": fit.stretch - 1}
        tables.append(suite.table("ops", largest_groups(steps, fit, LARGEST_GROUPS), **said))
    return suite.report(rows, scores=tables)


def errors_by_ranks(
    kinds: Mapping[str, Sequence[ComparedRow]],
) -> Iterator[tuple[Cell, ...]]:
    """Errors of rows of each kind, by the number of ranks that names them."""
    for kind, rows in kinds.items():
        for ranks in sorted({int(row.name["ranks"]) for row in rows}):
            found = Summary.of(row for row in rows if row.name["ranks"] == ranks)
            yield kind, ranks, found.n, found.mape, found.geomean, found.worst


def largest_groups(
    steps: Sequence[CapturedStep], models: OpModels, most: int
) -> list[tuple[Cell, ...]]:
    """The ops that take most of some steps, and how well their kernel model fits there."""
    found = sorted(errors_by_group(steps, models).items(), key=lambda item: -item[1][0])
    return [(group, share, error) for group, (share, error) in found[:most]]


def _predict(model: ModelCalls, models: OpModels) -> dict[str, float]:
    return predict_ranks(model.ranks, models, load_hardware(OP_MODELS))


def _compared(model: ModelCalls, predicted_ms: float, part: str) -> ComparedRow:
    ranks = len(model.ranks)
    return ComparedRow(
        {"model": model.name, "ranks": ranks},
        median(model.replay_ms),
        predicted_ms,
        f"{model.name.split()[0]}, {plural(ranks, 'rank')}",
        part,
    )


def predict_held_out(models: Sequence[ModelCalls]) -> list[ComparedRow]:
    """Every calibration model, predicted from the others."""
    found = []
    for model in (model for model in models if model.part == FIT):
        others = [other for other in models if other is not model]
        fit = fit_replays(others, len(model.ranks))
        found.append(_compared(model, _predict(model, fit)["predicted_ms"], "held out"))
    return found


def _model_row(model: ModelCalls, of: Mapping[str, float]) -> tuple[Cell, ...]:
    measured, predicted_ms = median(model.replay_ms), of["predicted_ms"]
    apart = median(abs(ms / measured - 1) for ms in model.replay_ms)
    error = predicted_ms / measured - 1
    return model.name, measured, predicted_ms, error, of["recorded_share"], apart
