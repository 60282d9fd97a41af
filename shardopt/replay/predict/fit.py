"""Laws of the calls of benchmarks, fitted on replays of calibration models.

A replay has no modules and no autograd between its ops, so laws measured in training steps are not
its laws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from predictor.cost.cpu_ops import OpLaws, OpRow
from predictor.errors import InputError
from predictor.fit.cpu_ops import Captured, fit_laws
from shardopt.replay.predict.rows import FIT, ModelCalls, RankCalls, read_models

FILE = "calls.jsonl"
DEFAULT_FOLDER = Path(__file__).resolve().parents[3] / "configs" / "bench" / "replay"
"""Of a source checkout; an installed package has none."""
CALL_BYTES = 4096.0
"""What a core moves in the time that it takes to start an op, roughly."""


def read_replays(folder: Path) -> list[ModelCalls]:
    """The models of a folder.

    Raises:
        InputError: the folder is not what `shardopt bench mystique` writes.
    """
    path = folder / FILE
    if not path.is_file():
        raise InputError(
            f"{folder}: has no {FILE}; give --data DIR, a folder that shardopt bench mystique has "
            "written"
        )
    return read_models(path)


def replay_laws(models: Sequence[ModelCalls], ranks: int) -> OpLaws:
    """Laws fitted on the calibration models among these.

    Args:
        ranks: of the benchmark that is to be predicted; laws of ops that no model of as many was
            found to run are those of one rank.

    Raises:
        InputError: none of them is a calibration model that was timed.
    """
    fits = [model for model in models if model.part == FIT]
    pure = [step for model in fits if not _meets(model) for step in _steps(model)]
    if not pure:
        raise InputError(
            "no calibration model of one rank was timed; measure with shardopt bench mystique"
        )
    laws = fit_laws([step for model in fits for step in _steps(model)], pure)
    together = [step for model in fits if len(model.ranks) > 1 for step in _steps(model)]
    if ranks == 1 or not together:
        return laws
    shared = fit_laws(together, (), laws.caches)
    return replace(laws, laws={**laws.laws, **shared.laws})


def _meets(model: ModelCalls) -> bool:
    return any(rank.collectives for rank in model.ranks)


def _steps(model: ModelCalls) -> list[Captured]:
    return [step for step in (captured(rank, median(model.replay_ms)) for rank in model.ranks)]


def captured(rank: RankCalls, step_ms: float) -> Captured:
    """A rank's timed ops; the few calls of several ops are split by the bytes that these touch."""
    rows: list[OpRow] = []
    times: list[float] = []
    for call in rank.calls:
        if call.ms is not None:
            parts = [CALL_BYTES * row.count + sum(row.reuse) for row in call.rows]
            rows += call.rows
            times += [call.ms * part / sum(parts) for part in parts]
    return Captured(tuple(rows), tuple(times), step_ms)
