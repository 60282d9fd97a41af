"""Training steps of transformers on CPU ranks, against predictions from other shapes' steps.

Kernel models of ops are fitted on ops that were timed inside the steps of calibration shapes
(`lab.transformers`). A target's ops come from fake tensors, its time from the
kernel models and an iteration graph, as of a generated benchmark. No target is run for its
prediction. The fit is made anew here, so that shapes can be held out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.replay.op_fit import CapturedStep, errors_by_group, fit_models
from lab.transformers import (
    FAMILIES,
    OPS,
    GradientSync,
    Rounds,
    TransformerShape,
    fit_sync,
    parse_shape,
    read_ops,
    read_rounds,
    rounds_file,
)
from lab.validate.report import ComparedRow, Report, Scores, Summary, errors_by_ranks
from predictor.cost.ops.cpu_ops import OpModels
from predictor.errors import InputError
from predictor.iteration.op_graph import CollectiveStart, RankCalls, op_graph, rank_times
from predictor.iteration.timeline import simulate

NAME = "transformers-cpu"
RANKS = (1, 2)
LARGEST_GROUPS = 12
FEWER = (3, 6, 9, 12, 15, 18, 24)
"""Numbers of captured shapes that a fit is also made on; a third of them of each family."""


@dataclass(frozen=True)
class _Predictor:
    """What calibration on so many ranks has found."""

    ranks: int
    rounds: Rounds
    steps: Mapping[str, RankCalls]
    models: OpModels
    sync: GradientSync | None

    def ms(self, name: str) -> float:
        """Predicted time of a shape's step."""
        return step_ms(self.steps[name], self.models, self.sync, self.ranks)


def step_ms(step: RankCalls, models: OpModels, sync: GradientSync | None, ranks: int) -> float:
    """Predicted time of a step that all ranks run.

    Args:
        sync: None: the ranks do not sum their gradients.
    """

    def cost_ms(starts: Sequence[CollectiveStart]) -> float:
        return 0.0 if sync is None else sync.ms(starts[0].gradients, starts[0].bytes)

    times = rank_times(step, models)
    graph, _ = op_graph([times] * ranks, [step] * ranks, cost_ms, ranks)
    return float(simulate(graph).iteration_ms[0])


def validate_transformers_cpu(folder: Path) -> Report:
    """Fit on the calibration shapes of a folder and predict all others.

    Raises:
        InputError: the folder holds no measured transformers.
    """
    if not (folder / OPS).is_file():
        raise InputError(
            f"{folder}: has no {OPS}; give a folder like configs/bench/transformers-cpu"
        )
    steps = read_ops(folder)
    predictors = [
        _fit(_read_checked(folder, ranks, steps), steps, ranks)
        for ranks in RANKS
        if rounds_file(folder, ranks).exists()
    ]
    rows = [row for predictor in predictors for row in _compare(predictor)]
    naive = [row for predictor in predictors for row in _scale_by_flop(predictor)]
    held = [row for predictor in predictors for row in _held_out(predictor)]
    return Report(
        NAME,
        tuple(rows),
        headline="targets",
        notes=(
            "measured: the median of the slowest rank over all rounds",
            "kernel models are fitted on steps of other shapes; no target was run for its "
            "prediction: its ops come from fake tensors",
            *map(_noise_note, predictors),
        ),
        scores=(
            _summary_table(rows, naive, held),
            _target_table(rows, naive),
            _fewer_table(predictors),
            *(_group_table(predictor) for predictor in predictors),
        ),
    )


def _read_checked(folder: Path, ranks: int, steps: Mapping[str, RankCalls]) -> Rounds:
    """Rounds whose shapes and rows are those of the folder's ops."""
    rounds, where = read_rounds(folder, ranks), rounds_file(folder, ranks)
    for name in rounds.steps:
        if name not in steps:
            raise InputError(f"{where}: has a shape '{name}' that {folder / OPS} has no ops of")
        try:
            parse_shape(name)
        except ValueError as error:
            raise InputError(f"{where}: {error}") from error
    for name, spent in rounds.captured.items():
        count = sum(len(part.rows) for part in steps[name].calls)
        if len(spent) != count:
            raise InputError(
                f"{where}: has {len(spent)} times of '{name}', {folder / OPS} {count} rows; both "
                "must come from one measurement"
            )
    return rounds


def _fit(rounds: Rounds, steps: Mapping[str, RankCalls], ranks: int) -> _Predictor:
    return _Predictor(ranks, rounds, steps, *_fit_on(rounds, steps, ranks, list(rounds.captured)))


def _fit_on(
    rounds: Rounds, steps: Mapping[str, RankCalls], ranks: int, names: Sequence[str]
) -> tuple[OpModels, GradientSync | None]:
    models = fit_models([_captured(rounds, steps, name) for name in names])
    if ranks == 1:
        return models, None
    extra = [rounds.steps[name] - rounds.alone[name] for name in names]
    return models, fit_sync([steps[name].collectives for name in names], extra)


def _captured(rounds: Rounds, steps: Mapping[str, RankCalls], name: str) -> CapturedStep:
    rows = tuple(row for part in steps[name].calls for row in part.rows)
    return CapturedStep(rows, rounds.captured[name], rounds.alone[name])


def _targets(predictor: _Predictor) -> list[str]:
    return [name for name in predictor.rounds.steps if name not in predictor.rounds.captured]


def _compare(predictor: _Predictor) -> list[ComparedRow]:
    """Every shape; those that were captured are no part of the headline."""
    names = sorted(predictor.rounds.steps, key=lambda name: _order(name, predictor))
    return [
        _row(predictor, name, predictor.ms(name), "fit" if name in captured else "targets")
        for captured in [predictor.rounds.captured]
        for name in names
    ]


def _order(name: str, predictor: _Predictor) -> tuple[bool, int, str]:
    return name in predictor.rounds.captured, FAMILIES.index(parse_shape(name).family), name


def _row(predictor: _Predictor, name: str, predicted_ms: float, part: str) -> ComparedRow:
    shape = parse_shape(name)
    return ComparedRow(
        {"ranks": predictor.ranks, "shape": name},
        predictor.rounds.steps[name],
        predicted_ms,
        f"{shape.family}, {predictor.ranks} rank{'' if predictor.ranks == 1 else 's'}",
        part,
    )


def _scale_by_flop(predictor: _Predictor) -> list[ComparedRow]:
    """FLOP over the rate of the family's captured shape whose FLOP are closest."""
    shapes = {name: parse_shape(name) for name in predictor.rounds.steps}
    return [
        _row(predictor, name, _scale(shapes[name], shapes, predictor.rounds), "targets")
        for name in _targets(predictor)
    ]


def _scale(
    target: TransformerShape, shapes: Mapping[str, TransformerShape], rounds: Rounds
) -> float:
    known = [name for name in rounds.captured if shapes[name].family == target.family]
    near = min(known, key=lambda name: abs(np.log(shapes[name].flop / target.flop)))
    return rounds.steps[near] * target.flop / shapes[near].flop


def _held_out(predictor: _Predictor) -> list[ComparedRow]:
    """Every captured shape, predicted from the others."""
    rounds, steps, ranks = predictor.rounds, predictor.steps, predictor.ranks
    found = []
    for name in rounds.captured:
        others = [other for other in rounds.captured if other != name]
        predicted_ms = step_ms(steps[name], *_fit_on(rounds, steps, ranks, others), ranks)
        found.append(_row(predictor, name, predicted_ms, "held out"))
    return found


def _noise_note(predictor: _Predictor) -> str:
    rounds = predictor.rounds
    return (
        f"{predictor.ranks} rank(s): {rounds.count} rounds, and {rounds.disturbed} left out "
        "because other work took the ranks' cores"
    )


def _summary_table(
    rows: Sequence[ComparedRow], naive: Sequence[ComparedRow], held: Sequence[ComparedRow]
) -> Scores:
    kinds = (
        ("targets", [row for row in rows if row.part == "targets"]),
        ("targets, in proportion to FLOP", naive),
        ("captured shapes, each from the others", held),
    )
    return errors_by_ranks("steps", "shapes", kinds, "errors of step times")


def _target_table(rows: Sequence[ComparedRow], naive: Sequence[ComparedRow]) -> Scores:
    by_flop = {tuple(row.name.values()): row.error for row in naive}
    return Scores(
        "targets",
        (
            ("shape", "text"),
            ("ranks", "count"),
            ("measured", "ms"),
            ("predicted", "ms"),
            ("error", "signed"),
            ("by FLOP", "signed"),
        ),
        tuple(
            (
                str(row.name["shape"]),
                int(row.name["ranks"]),
                row.measured_ms,
                row.predicted_ms,
                row.error,
                by_flop[tuple(row.name.values())],
            )
            for row in rows
            if row.part == "targets"
        ),
        "every target; by FLOP: scaled by FLOP from the closest captured shape of its family",
    )


def _fewer_table(predictors: Sequence[_Predictor]) -> Scores:
    """What the targets are predicted to within from the first captured shapes alone."""
    cells = []
    for predictor in predictors:
        # in the order of the design: one shape of each family, then the next of each
        names = [name for name in predictor.steps if name in predictor.rounds.captured]
        for count in (n for n in FEWER if n <= len(names)):
            some = _Predictor(
                predictor.ranks,
                predictor.rounds,
                predictor.steps,
                *_fit_on(predictor.rounds, predictor.steps, predictor.ranks, names[:count]),
            )
            targets = _targets(predictor)
            found = Summary.of(_row(some, name, some.ms(name), "targets") for name in targets)
            cells.append((predictor.ranks, count, found.mape, found.geomean, found.worst))
    return Scores(
        "fewer_captures",
        (
            ("ranks", "count"),
            ("captured", "count"),
            ("MAPE", "share"),
            ("geomean", "share"),
            ("worst", "share"),
        ),
        tuple(cells),
        "errors of the targets if only the first shapes are captured, the same number of each "
        "family",
    )


def _group_table(predictor: _Predictor) -> Scores:
    """The ops that take most of the captured steps, and how well their kernel model fits."""
    names = predictor.rounds.captured
    steps = [_captured(predictor.rounds, predictor.steps, name) for name in names]
    found = sorted(errors_by_group(steps, predictor.models).items(), key=lambda item: -item[1][0])
    return Scores(
        f"ops_{predictor.ranks}",
        (("op", "text"), ("share of step", "share"), ("model against time", "signed")),
        tuple((group, share, error) for group, (share, error) in found[:LARGEST_GROUPS]),
        f"ops of captured steps, {predictor.ranks} rank(s); on top of them a step takes "
        f"{1e3 * predictor.models.op_ms:.1f} us a call and "
        f"{predictor.models.stretch - 1:+.1%}",
    )
