"""The calls of a benchmark's ranks, files of them, and kernel models fitted on timed ones.

A file has a line of JSON per model; a prediction from it needs no benchmark. A replay runs no
modules and no autograd between its ops, so models that were fitted on training steps do not fit it.
`shardopt bench predict` uses the fit that is stored with a profile
(`predictor.hardware.loader`); here it is made anew, on measured rows or for held-out errors.

Why: docs/decisions/0020-benchmarks-from-traces.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from lab.replay.op_fit import CapturedStep, fit_models
from predictor.cost.ops.cpu_ops import BINS, OpModels, OpRow
from predictor.errors import InputError
from predictor.iteration.op_graph import CallGroup, CollectiveWait, RankCalls
from shardopt.measure.store import Fields, RowKind, read_rows, write_rows
from shardopt.replay.predict import events_of

FILE = "calls.jsonl"
FIT, TEST = "fit", "test"
KIB = 1024
CALL_BYTES = 4096.0
"""What a core moves in the time that it takes to start an op, roughly."""


@dataclass(frozen=True)
class ModelCalls:
    """A model's benchmark.

    Args:
        part: `FIT` if kernel models are fitted on it, else `TEST`.
        replay_ms: of an iteration, the median of each round, of the slowest rank.
    """

    name: str
    part: str
    replay_ms: tuple[float, ...]
    ranks: tuple[RankCalls, ...]


def write_models(path: Path, models: Sequence[ModelCalls]) -> None:
    """A line per model; times to four digits.

    Raises:
        InputError: the file cannot be written.
    """
    write_rows(path, MODEL, models)


def _parse_model(fields: Fields) -> ModelCalls:
    ranks = tuple(map(_parse_rank, fields["ranks"]))
    ms = tuple(map(float, fields["replay_ms"]))
    if fields["part"] not in (FIT, TEST) or not ranks or not ms or min(ms) <= 0:
        raise ValueError("a model needs a part (fit or test), ranks and times above 0")
    return ModelCalls(str(fields["model"]), fields["part"], ms, ranks)


def _model_fields(model: ModelCalls) -> Fields:
    return {
        "model": model.name,
        "part": model.part,
        "replay_ms": list(map(_round, model.replay_ms)),
        "ranks": list(map(_rank_object, model.ranks)),
    }


MODEL = RowKind(
    what="model with its calls",
    keys=("model", "part", "replay_ms", "ranks"),
    parse=_parse_model,
    fields=_model_fields,
    json_lines=True,
    remedy="write the file again with python -m lab compare",
)


def _rank_object(rank: RankCalls) -> dict[str, Any]:
    calls = [
        [c.segment, c.op, c.count, _round(c.us), _round(c.ms), list(map(_row_object, c.rows))]
        for c in rank.calls
    ]
    events = [
        {"waits_for": event.start}
        if isinstance(event, CollectiveWait)
        else {"kind": event.kind, "bytes": event.bytes, "group": event.group}
        for event in rank.events
    ]
    return {"events": events, "left_out": rank.left_out, "calls": calls}


def _row_object(row: OpRow) -> list[Any]:
    """Kind, sizes, and bin and KiB of those bins of reuse that are not empty."""
    reuse = {at: _round(size / KIB) for at, size in enumerate(row.reuse) if size}
    return [row.kind, row.sizes, reuse]


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _parse_rank(of: Mapping[str, Any]) -> RankCalls:
    calls = tuple(
        CallGroup(
            int(segment), str(op), tuple(_parse_row(row, count) for row in rows), int(count), us, ms
        )
        for segment, op, count, us, ms, rows in of["calls"]
    )
    for call in calls:
        if not all(math.isfinite(value or 0.0) for value in (call.us, call.ms)):
            raise ValueError(f"a time of {call.op} is not a number")
    left_out = tuple((str(op), us) for op, us in of["left_out"])
    return RankCalls(calls, events_of(of["events"]), left_out)


def _parse_row(of: Sequence[Any], count: int) -> OpRow:
    kind, sizes, bins = of
    reuse = [0.0] * BINS
    for at, size in bins.items():
        reuse[int(at)] = KIB * float(size)
    return OpRow(str(kind), tuple(map(int, sizes)), tuple(reuse), count)


def read_replays(folder: Path) -> list[ModelCalls]:
    """The models of a folder that `python -m lab compare` wrote.

    Raises:
        InputError: it is no such folder, or a line of the file cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        raise InputError(
            f"{folder}: has no {FILE}; give a folder that python -m lab compare has written"
        )
    return read_rows(path, MODEL)


def fit_replays(models: Sequence[ModelCalls], ranks: int) -> OpModels:
    """Kernel models fitted on the calibration models among these.

    Args:
        ranks: of the benchmark that is to be predicted. Ops that no calibration model of several
            ranks runs are priced as on one rank.

    Raises:
        InputError: none of them is a calibration model that was timed.
    """
    fits = [model for model in models if model.part == FIT]
    pure = [
        step
        for model in fits
        if not any(rank.collectives for rank in model.ranks)
        for step in _steps(model)
    ]
    if not pure:
        raise InputError(
            "no calibration model of one rank was timed; measure with python -m lab compare"
        )
    every = fit_models([step for model in fits for step in _steps(model)], pure)
    together = [step for model in fits if len(model.ranks) > 1 for step in _steps(model)]
    if ranks == 1 or not together:
        return every
    shared = fit_models(together, (), every.caches)
    return replace(every, coefficients={**every.coefficients, **shared.coefficients})


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
