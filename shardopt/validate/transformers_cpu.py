"""Training steps of transformers on CPU ranks, against predictions from other shapes' steps.

Laws of ops are fitted on ops timed inside the steps of calibration shapes
(`shardopt.bench.transformers.design`); a target's ops come from fake tensors, its time from the
laws and an iteration graph. No target is run for its prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from predictor.cost.cpu_ops import OpLaws
from predictor.errors import InputError
from predictor.fit.cpu_ops import Captured, by_group, fit_laws, fit_sync
from predictor.iteration.op_graph import OpStep, SyncLaw, step_ms
from predictor.model.transformer import FAMILIES, TransformerShape, parse_shape
from shardopt.bench.transformers.files import (
    OPS,
    Rounds,
    read_ops,
    read_rounds,
    read_traces,
    rounds_file,
)
from shardopt.validate.report import Compared, Report, Scores, Summary, errors_by_ranks

NAME = "transformers-cpu"
RANKS = (1, 2)
LARGEST_GROUPS = 12
FEWER = (3, 6, 9, 12, 15, 18, 24)
"""Numbers of captured shapes that laws are also fitted on; three families take turns."""


@dataclass(frozen=True)
class _Predictor:
    """What calibration on so many ranks has found."""

    ranks: int
    rounds: Rounds
    steps: Mapping[str, OpStep]
    laws: OpLaws
    sync: SyncLaw | None

    def ms(self, name: str, *, sync: bool = True) -> float:
        """Predicted time of a shape's step."""
        return step_ms(self.steps[name], self.laws, self.sync if sync else None, self.ranks)


def has_transformers(folder: Path) -> bool:
    """Whether a folder holds measured transformers."""
    return (folder / OPS).is_file()


def validate_transformers_cpu(folder: Path) -> Report:
    """Fit on the calibration shapes of a folder and predict all others.

    Raises:
        InputError: the folder is not what `shardopt bench transformers` writes.
    """
    if not has_transformers(folder):
        raise _no_data(folder)
    steps = read_ops(folder)
    predictors = [
        _fitted(_checked(folder, ranks, steps), steps, ranks)
        for ranks in RANKS
        if rounds_file(folder, ranks).exists()
    ]
    rows = [row for predictor in predictors for row in _compared(predictor)]
    naive = [row for predictor in predictors for row in _naive(predictor)]
    held = [row for predictor in predictors for row in _held_out(predictor)]
    return Report(
        NAME,
        tuple(rows),
        headline="targets",
        notes=(
            "measured: the median over all rounds, of the slowest rank",
            "kernel models are fitted on steps of other shapes; no target was run for its "
            "prediction, its ops come from fake tensors",
            *map(_noise_note, predictors),
            *_trace_notes(folder),
        ),
        scores=(
            _summary_table(rows, naive, held),
            _target_table(rows, naive),
            _fewer_table(predictors),
            *(_group_table(predictor) for predictor in predictors),
        ),
    )


def _no_data(folder: Path) -> InputError:
    return InputError(
        f"{folder}: has no {OPS}; give --data DIR, a folder that shardopt bench transformers "
        "has written"
    )


def _checked(folder: Path, ranks: int, steps: Mapping[str, OpStep]) -> Rounds:
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
        count = sum(map(len, steps[name].parts.values()))
        if len(spent) != count:
            raise InputError(
                f"{where}: has {len(spent)} times of '{name}', {folder / OPS} {count} rows; both "
                "must come from one run of shardopt bench transformers"
            )
    return rounds


def _fitted(rounds: Rounds, steps: Mapping[str, OpStep], ranks: int) -> _Predictor:
    return _Predictor(ranks, rounds, steps, *_laws(rounds, steps, ranks, list(rounds.captured)))


def _laws(
    rounds: Rounds, steps: Mapping[str, OpStep], ranks: int, names: Sequence[str]
) -> tuple[OpLaws, SyncLaw | None]:
    laws = fit_laws([_captured(rounds, steps, name) for name in names])
    if ranks == 1:
        return laws, None
    extra = [rounds.steps[name] - rounds.alone[name] for name in names]
    return laws, fit_sync([steps[name].buckets for name in names], extra)


def _captured(rounds: Rounds, steps: Mapping[str, OpStep], name: str) -> Captured:
    rows = tuple(row for of_part in steps[name].parts.values() for row in of_part)
    return Captured(rows, rounds.captured[name], rounds.alone[name])


def _targets(predictor: _Predictor) -> list[str]:
    return [name for name in predictor.rounds.steps if name not in predictor.rounds.captured]


def _compared(predictor: _Predictor) -> list[Compared]:
    """Every shape; those that were captured are no part of the headline."""
    names = sorted(predictor.rounds.steps, key=lambda name: _order(name, predictor))
    return [
        _row(predictor, name, predictor.ms(name), "fit" if name in captured else "targets")
        for captured in [predictor.rounds.captured]
        for name in names
    ]


def _order(name: str, predictor: _Predictor) -> tuple[bool, int, str]:
    return name in predictor.rounds.captured, FAMILIES.index(parse_shape(name).family), name


def _row(predictor: _Predictor, name: str, predicted_ms: float, part: str) -> Compared:
    shape = parse_shape(name)
    return Compared(
        {"ranks": predictor.ranks, "shape": name},
        predictor.rounds.steps[name],
        predicted_ms,
        f"{shape.family}, {predictor.ranks} rank{'' if predictor.ranks == 1 else 's'}",
        part,
    )


def _naive(predictor: _Predictor) -> list[Compared]:
    """FLOP over the rate of the family's captured shape whose FLOP are closest."""
    shapes = {name: parse_shape(name) for name in predictor.rounds.steps}
    return [
        _row(predictor, name, _scaled(shapes[name], shapes, predictor.rounds), "targets")
        for name in _targets(predictor)
    ]


def _scaled(
    target: TransformerShape, shapes: Mapping[str, TransformerShape], rounds: Rounds
) -> float:
    known = [name for name in rounds.captured if shapes[name].family == target.family]
    near = min(known, key=lambda name: abs(np.log(shapes[name].flop / target.flop)))
    return rounds.steps[near] * target.flop / shapes[near].flop


def _held_out(predictor: _Predictor) -> list[Compared]:
    """Every captured shape, predicted from the others."""
    rounds, steps, ranks = predictor.rounds, predictor.steps, predictor.ranks
    found = []
    for name in rounds.captured:
        others = [other for other in rounds.captured if other != name]
        laws, sync = _laws(rounds, steps, ranks, others)
        predicted = step_ms(steps[name], laws, sync, ranks)
        found.append(_row(predictor, name, predicted, "held out"))
    return found


def _trace_notes(folder: Path) -> list[str]:
    traced = read_traces(folder)
    if traced is None:
        return []
    steps, ops, found = traced
    return [
        f"execution and Kineto traces of {steps} steps hold {found} of the {ops} ops of their "
        "lists, in order"
    ]


def _noise_note(predictor: _Predictor) -> str:
    rounds = predictor.rounds
    spread = float(np.median(list(rounds.spread.values())))
    return (
        f"{predictor.ranks} rank(s): {rounds.count} rounds, {rounds.disturbed} more left out as "
        f"other work took the ranks' cores; median half range between quartiles {spread:.1%}"
    )


def _summary_table(
    rows: Sequence[Compared], naive: Sequence[Compared], held: Sequence[Compared]
) -> Scores:
    kinds = (
        ("targets", [row for row in rows if row.part == "targets"]),
        ("targets, in proportion to FLOP", naive),
        ("captured shapes, each from the others", held),
    )
    return errors_by_ranks("steps", "shapes", kinds, "errors of step times")


def _target_table(rows: Sequence[Compared], naive: Sequence[Compared]) -> Scores:
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
        # in the order of the design, which takes the families in turns
        names = [name for name in predictor.steps if name in predictor.rounds.captured]
        for count in (n for n in FEWER if n <= len(names)):
            some = _Predictor(
                predictor.ranks,
                predictor.rounds,
                predictor.steps,
                *_laws(predictor.rounds, predictor.steps, predictor.ranks, names[:count]),
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
    """The ops that take most of the captured steps, and how well their law fits them."""
    names = predictor.rounds.captured
    steps = [_captured(predictor.rounds, predictor.steps, name) for name in names]
    found = sorted(by_group(steps, predictor.laws).items(), key=lambda item: -item[1][0])
    return Scores(
        f"ops_{predictor.ranks}",
        (("op", "text"), ("share of step", "share"), ("law against time", "signed")),
        tuple((group, share, error) for group, (share, error) in found[:LARGEST_GROUPS]),
        f"ops of captured steps, {predictor.ranks} rank(s); on top of them a step takes "
        f"{1e3 * predictor.laws.op_ms:.1f} us a call and "
        f"{predictor.laws.stretch - 1:+.1%}",
    )
