"""Training steps of transformers on CPU ranks, against predictions from other shapes' steps.

Kernel models of ops are fitted on ops timed inside the steps of calibration shapes
(`lab.transformers`). A target's ops come from fake tensors, its time from the kernel models and the
gradient all-reduce. No target runs for its prediction. The fit is repeated here, so that shapes can
be held out.

A folder has the ops of every shape (`OPS`), its gradient buckets (`BUCKETS`), and rounds of times;
docs/data.md describes their measurement.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.op_fit import CapturedStep, errors_by_group, fit_models
from lab.statistics import grouped
from lab.suites import SUITES, Cell, ComparedRow, Report, Summary
from lab.transformers import (
    FAMILIES,
    Bucket,
    GradientSync,
    TrainingStep,
    fit_sync,
    parse_shape,
)
from predictor.cost.ops.cpu_ops import BINS, OpModels, OpRow
from predictor.errors import InputError
from shardopt.files import decode, read_bytes
from shardopt.formatting import plural
from shardopt.measure.store import Fields, RowKind, read_rows

RANKS = (1, 2)
LARGEST_GROUPS = 12
FEWER = (3, 6, 9, 12, 15, 18, 24)
"""Numbers of captured shapes for further fits; a third of each are of one family."""
OPS, BUCKETS = "ops.csv", "buckets.csv"
TIMES = ("steps", "alone", "captured")
"""Keys of a round that counts; each has shape -> ms of every rank."""
KIB = 1024


def rounds_file(folder: Path, ranks: int) -> Path:
    return folder / f"rounds-{ranks}.jsonl"


def _parse_op(cells: Fields) -> Fields:
    reuse = [0.0] * BINS
    for entry in cells["reuse_kib"].split():
        at, size = entry.split(":")
        reuse[int(at)] = KIB * float(size)
    sizes = tuple(map(int, cells["sizes"].split()))
    row = OpRow(cells["kind"], sizes, tuple(reuse), int(cells["count"]))
    return {**cells, "row": row}


OP = RowKind(
    what="row of ops",
    keys=("shape", "part", "kind", "sizes", "count", "reuse_kib"),
    parse=_parse_op,
    fields=dict,
)
"""Kind of a line of `OPS`; shape and part are in their first line only."""
BUCKET = RowKind(
    what="bucket",
    keys=("shape", "bucket", "gradients", "bytes"),
    parse=lambda row: {**row, "sum": Bucket(int(row["gradients"]), int(row["bytes"]))},
    fields=dict,
)


def read_ops(folder: Path) -> dict[str, TrainingStep]:
    """Read the step of every shape by name from `OPS` and `BUCKETS`.

    Raises:
        InputError: a file or one of its lines cannot be read.
    """
    rows: dict[str, list[OpRow]] = {}
    name = ""
    for line in read_rows(folder / OPS, OP):
        name = line["shape"] or name
        rows.setdefault(name, []).append(line["row"])
    buckets = grouped(read_rows(folder / BUCKETS, BUCKET), lambda op_rows: op_rows["shape"])
    return {
        name: TrainingStep(tuple(op_rows), tuple(bucket["sum"] for bucket in buckets.get(name, ())))
        for name, op_rows in rows.items()
    }


@dataclass(frozen=True)
class Rounds:
    """Medians over all rounds and steps in ms, by the name of a shape.

    Args:
        steps: time of a step of the slowest rank.
        alone: time of a step without gradient exchange; captured shapes only.
        captured: time of each row of ops inside such a step.
        disturbed: number of rounds without times, because other work took a rank's core.
    """

    count: int
    disturbed: int
    steps: Mapping[str, float]
    alone: Mapping[str, float]
    captured: Mapping[str, tuple[float, ...]]


def read_rounds(folder: Path, ranks: int) -> Rounds:
    """Read all rounds of a number of ranks.

    Raises:
        InputError: no round was undisturbed, or a line is broken.
    """
    path = rounds_file(folder, ranks)
    rounds = []
    text = decode(read_bytes(path, "file of rounds"), path)
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            entry = json.loads(line)
            _ = entry["round"], entry["other_cores"]
            rounds.append({key: entry[key] for key in (TIMES if "steps" in entry else ())})
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}:{number}: not a round: {type(error).__name__}: {error}; a round holds "
                f"{', '.join(TIMES)}, unless other work disturbed it; delete the line"
            ) from None
    undisturbed = [each for each in rounds if each]
    if not undisturbed:
        raise InputError(f"{path}: none of its {len(rounds)} rounds was undisturbed")

    def slowest(key: str) -> dict[str, float]:
        """Return shape -> median ms of the slowest rank."""
        names = dict.fromkeys(name for each in undisturbed for name in each[key])
        return {
            name: max(
                statistics.median(ms for times in of_rank for ms in times)
                for of_rank in zip(
                    *(each[key][name] for each in undisturbed if name in each[key]), strict=True
                )
            )
            for name in names
        }

    captured: dict[str, list[list[float]]] = {}
    for each in undisturbed:
        for name, row_times in each["captured"].items():
            captured.setdefault(name, []).extend(row_times)
    rows_ms = {
        name: tuple(map(statistics.median, zip(*times, strict=True)))
        for name, times in captured.items()
    }
    disturbed = len(rounds) - len(undisturbed)
    return Rounds(len(undisturbed), disturbed, slowest("steps"), slowest("alone"), rows_ms)


def captured_step(rounds: Rounds, step: TrainingStep, name: str) -> CapturedStep:
    return CapturedStep(step.rows, rounds.captured[name], rounds.alone[name])


@dataclass(frozen=True)
class Calibrated:
    """Calibration on a number of ranks.

    Args:
        steps: ops of every shape's step.
        sync: gradient all-reduce; None if the ranks do not sum their gradients.
    """

    ranks: int
    rounds: Rounds
    steps: Mapping[str, TrainingStep]
    models: OpModels
    sync: GradientSync | None

    @classmethod
    def of(cls, folder: Path, ranks: int, steps: Mapping[str, TrainingStep]) -> Calibrated:
        """Fit on all captured shapes.

        Raises:
            InputError: shapes or rows of the rounds do not match the folder's ops.
        """
        rounds, where = read_rounds(folder, ranks), rounds_file(folder, ranks)
        for name in rounds.steps:
            if name not in steps:
                raise InputError(f"{where}: has a shape '{name}' that {folder / OPS} has no ops of")
            try:
                parse_shape(name)
            except ValueError as error:
                raise InputError(f"{where}: {error}") from error
        for name, spent in rounds.captured.items():
            count = len(steps[name].rows)
            if len(spent) != count:
                raise InputError(
                    f"{where}: has {len(spent)} times of '{name}', {folder / OPS} {count} rows; "
                    "both must come from one measurement"
                )
        return cls.fitted(ranks, rounds, steps, list(rounds.captured))

    @classmethod
    def fitted(
        cls, ranks: int, rounds: Rounds, steps: Mapping[str, TrainingStep], names: Sequence[str]
    ) -> Calibrated:
        """Fit on some of the captured shapes."""
        models = fit_models([captured_step(rounds, steps[name], name) for name in names])
        if ranks == 1:
            return cls(ranks, rounds, steps, models, None)
        extra = [rounds.steps[name] - rounds.alone[name] for name in names]
        sync = fit_sync([steps[name].buckets for name in names], extra)
        return cls(ranks, rounds, steps, models, sync)

    def fitted_on(self, names: Sequence[str]) -> Calibrated:
        return self.fitted(self.ranks, self.rounds, self.steps, names)

    @property
    def targets(self) -> list[str]:
        """Shapes that were not captured."""
        return [name for name in self.rounds.steps if name not in self.rounds.captured]

    def ms(self, name: str) -> float:
        """Return the predicted time of a shape's step, which all ranks run."""
        return self.steps[name].ms(self.models, self.sync)

    def by_flop_ms(self, name: str) -> float:
        """Return FLOP over the rate of the family's captured shape closest in FLOP."""
        target = parse_shape(name)
        shapes = {candidate: parse_shape(candidate) for candidate in self.rounds.captured}
        same_family = [
            candidate for candidate, shape in shapes.items() if shape.family == target.family
        ]

        def distance(candidate: str) -> float:
            return abs(float(np.log(shapes[candidate].flop / target.flop)))

        near = min(same_family, key=distance)
        return self.rounds.steps[near] * target.flop / shapes[near].flop

    def row(self, name: str, predicted_ms: float, part: str) -> ComparedRow:
        family = f"{parse_shape(name).family}, {plural(self.ranks, 'rank')}"
        named: dict[str, str | int | float] = {"ranks": self.ranks, "shape": name}
        return ComparedRow(named, self.rounds.steps[name], predicted_ms, family, part)

    def rows(self) -> list[ComparedRow]:
        """Return every shape; captured ones come last and do not count for the headline."""
        captured = self.rounds.captured

        def order(name: str) -> tuple[bool, int, str]:
            return name in captured, FAMILIES.index(parse_shape(name).family), name

        return [
            self.row(name, self.ms(name), "fit" if name in captured else "targets")
            for name in sorted(self.rounds.steps, key=order)
        ]

    def held_out(self) -> list[ComparedRow]:
        """Return every captured shape, predicted from the others."""
        names = list(self.rounds.captured)
        fits = {name: self.fitted_on([other for other in names if other != name]) for name in names}
        return [self.row(name, fit.ms(name), "held out") for name, fit in fits.items()]

    def fewer(self) -> list[tuple[Cell, ...]]:
        """Return the errors of the targets if only the first shapes are captured."""
        # in the order of the design: one shape of each family, then the next of each
        names = [name for name in self.steps if name in self.rounds.captured]
        cells: list[tuple[Cell, ...]] = []
        for count in (n for n in FEWER if n <= len(names)):
            fit = self.fitted_on(names[:count])
            summary = Summary.of(fit.row(name, fit.ms(name), "targets") for name in fit.targets)
            cells.append((self.ranks, count, summary.mape, summary.geomean, summary.worst))
        return cells


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
    calibrations = [
        Calibrated.of(folder, ranks, steps)
        for ranks in RANKS
        if rounds_file(folder, ranks).exists()
    ]
    rows = [row for fit in calibrations for row in fit.rows()]
    targets = [row for row in rows if row.part == "targets"]
    naive = [
        fit.row(name, fit.by_flop_ms(name), "targets")
        for fit in calibrations
        for name in fit.targets
    ]
    kinds = {
        "targets": targets,
        "targets, in proportion to FLOP": naive,
        "captured shapes, each from the others": [
            row for fit in calibrations for row in fit.held_out()
        ],
    }
    by_flop = {tuple(row.name.values()): row.error for row in naive}
    suite = SUITES["transformers-cpu"]
    tables = [
        suite.table("steps", errors_by_ranks(kinds)),
        suite.table(
            "targets",
            [
                (
                    *(row.name["shape"], row.name["ranks"], row.measured_ms, row.predicted_ms),
                    *(row.error, by_flop[tuple(row.name.values())]),
                )
                for row in targets
            ],
        ),
        suite.table("fewer_captures", [cells for fit in calibrations for cells in fit.fewer()]),
    ]
    for fit in calibrations:
        captured = [captured_step(fit.rounds, steps[n], n) for n in fit.rounds.captured]
        groups = largest_groups(captured, fit.models, LARGEST_GROUPS)
        host = {"call_us": 1e3 * fit.models.op_ms, "stretch": fit.models.stretch - 1}
        tables.append(suite.table("ops", groups, ranks=fit.ranks, **host))
    notes = [
        f"{fit.ranks} rank(s): {fit.rounds.count} rounds, and {fit.rounds.disturbed} left out "
        "because other work took the ranks' cores"
        for fit in calibrations
    ]
    return suite.report(rows, scores=tables, notes=notes)


def errors_by_ranks(
    kinds: Mapping[str, Sequence[ComparedRow]],
) -> Iterator[tuple[Cell, ...]]:
    """Yield the errors of each kind of rows, by the number of ranks."""
    for kind, rows in kinds.items():
        for ranks in sorted({int(row.name["ranks"]) for row in rows}):
            summary = Summary.of(row for row in rows if row.name["ranks"] == ranks)
            yield kind, ranks, summary.n, summary.mape, summary.geomean, summary.worst


def largest_groups(
    steps: Sequence[CapturedStep], models: OpModels, most: int
) -> list[tuple[Cell, ...]]:
    """Return the ops of the largest share of some steps, with the error of their kernel model."""
    groups = sorted(errors_by_group(steps, models).items(), key=lambda item: -item[1][0])
    return [(group, share, error) for group, (share, error) in groups[:most]]
