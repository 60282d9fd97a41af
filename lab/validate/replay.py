"""Predictions of generated benchmarks against their replays.

Kernel models are fitted on calls that were timed inside replays of calibration models
(`lab.replay.originals.CALIBRATIONS`); collectives are those of a profile. No other
model was run for its prediction. The fit is made anew, so that a calibration model can be held out;
of the committed rows it is the one that `shardopt bench predict` loads from the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from lab.replay.calls import FIT, TEST, ModelCalls, captured_step, fit_replays, read_replays
from lab.replay.op_fit import errors_by_group
from lab.validate.report import ComparedRow, Report, Scores, errors_by_ranks
from predictor.cost.ops.cpu_ops import OpModels
from predictor.hardware.loader import load_hardware
from shardopt.replay.predict import OP_MODELS, predict_ranks

NAME = "replay"
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
    models = read_replays(folder)
    counts = sorted({len(model.ranks) for model in models})
    fits = {ranks: fit_replays(models, ranks) for ranks in counts}
    found = [(model, _predict(model, fits[len(model.ranks)])) for model in models]
    rows = [_compare(model, of["predicted_ms"], PARTS[model.part]) for model, of in found]
    return Report(
        NAME,
        tuple(rows),
        headline=PARTS[TEST],
        notes=(
            "measured: the median over rounds of the slowest rank; each round runs in new "
            "processes",
            "kernel models are fitted on calls inside replays of other benchmarks; no model of the "
            "headline was run for its prediction",
        ),
        scores=(
            _summary_table(rows, predict_held_out(models)),
            _model_table(found),
            *(_group_table(models, ranks, of) for ranks, of in fits.items()),
        ),
    )


def _predict(model: ModelCalls, models: OpModels) -> dict[str, float]:
    return predict_ranks(model.ranks, models, load_hardware(OP_MODELS))


def _compare(model: ModelCalls, predicted_ms: float, part: str) -> ComparedRow:
    count = len(model.ranks)
    return ComparedRow(
        {"model": model.name, "ranks": count},
        median(model.replay_ms),
        predicted_ms,
        f"{model.name.split()[0]}, {count} rank{'' if count == 1 else 's'}",
        part,
    )


def predict_held_out(models: Sequence[ModelCalls]) -> list[ComparedRow]:
    """Every calibration model, predicted from the others."""
    found = []
    for model in models:
        if model.part == FIT:
            count = len(model.ranks)
            fit = fit_replays([other for other in models if other is not model], count)
            found.append(_compare(model, _predict(model, fit)["predicted_ms"], "held out"))
    return found


def _summary_table(rows: Sequence[ComparedRow], held: Sequence[ComparedRow]) -> Scores:
    models = [row for row in rows if row.part == PARTS[TEST]]
    kinds = (
        ("models", models),
        (
            "of these, first measured after the kernel models were fixed",
            [r for r in models if r.name["model"] in FRESH],
        ),
        ("calibration models, each from the others", held),
    )
    return errors_by_ranks("iterations", "benchmarks of", kinds, "errors of iteration times")


def _model_table(found: Sequence[tuple[ModelCalls, Mapping[str, float]]]) -> Scores:
    cells = []
    for model, of in found:
        if model.part == TEST:
            measured, predicted_ms = median(model.replay_ms), of["predicted_ms"]
            apart = [abs(ms / measured - 1) for ms in model.replay_ms]
            error = predicted_ms / measured - 1
            cells.append(
                (model.name, measured, predicted_ms, error, of["recorded_share"], median(apart))
            )
    return Scores(
        "models",
        (
            ("model", "text"),
            ("replayed", "ms"),
            ("predicted", "ms"),
            ("error", "signed"),
            ("recorded times", "share"),
            ("between processes", "share"),
        ),
        tuple(cells),
        "every model; recorded times: the share of the prediction that is recorded time, of ops "
        "without a kernel model; between processes: the median distance of a round from the median "
        "of all rounds",
    )


def _group_table(models: Sequence[ModelCalls], count: int, fit: OpModels) -> Scores:
    """The ops that take most of the models' replays, and how well their kernel model fits there."""
    steps = [
        captured_step(rank, median(model.replay_ms))
        for model in models
        if model.part == TEST and len(model.ranks) == count
        for rank in model.ranks
    ]
    found = sorted(errors_by_group(steps, fit).items(), key=lambda item: -item[1][0])
    return Scores(
        f"ops_{count}",
        (("op", "text"), ("share of replays", "share"), ("model against time", "signed")),
        tuple((group, share, error) for group, (share, error) in found[:LARGEST_GROUPS]),
        f"ops of the models' replays, {count} rank(s); on top of them a replay takes "
        f"{1e3 * fit.op_ms:.1f} us a call and {fit.stretch - 1:+.1%}",
    )
