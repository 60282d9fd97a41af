"""Training steps of transformers on CPU ranks, against predictions from other shapes' steps.

Kernel models of ops are fitted on ops that were timed inside the steps of calibration shapes
(`lab.transformers`). A target's ops come from fake tensors, its time from the
kernel models and the sums of gradients. No target is run for its
prediction. The fit is made anew here, so that shapes can be held out.

A folder holds the ops of every shape (`OPS`), the buckets in which its gradients are summed
(`BUCKETS`), and rounds of times. docs/data.md says what measured them.
"""

from __future__ import annotations

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
from shardopt.formatting import plural
from shardopt.measure.store import Fields, RowKind, read_rows

RANKS = (1, 2)
LARGEST_GROUPS = 12
FEWER = (3, 6, 9, 12, 15, 18, 24)
"""Numbers of captured shapes that a fit is also made on; a third of them of each family."""
OPS, BUCKETS = "ops.csv", "buckets.csv"
TIMES = ("steps", "alone", "captured")
"""Of a round that counts: what was timed -> shape -> ms of every rank."""
KIB = 1024


def rounds_file(folder: Path, ranks: int) -> Path:
    return folder / f"rounds-{ranks}.jsonl"


def _parse_op(of: Fields) -> Fields:
    reuse = [0.0] * BINS
    for entry in of["reuse_kib"].split():
        at, size = entry.split(":")
        reuse[int(at)] = KIB * float(size)
    sizes = tuple(map(int, of["sizes"].split()))
    return {**of, "row": OpRow(of["kind"], sizes, tuple(reuse), int(of["count"]))}


ROUND = RowKind(
    what="round",
    keys=("round", "other_cores"),
    parse=lambda of: {key: of[key] for key in (TIMES if "steps" in of else ())},
    fields=dict,
    json_lines=True,
    remedy=f"a round holds {', '.join(TIMES)}, unless other work disturbed it; delete the line",
)
OP = RowKind(
    what="row of ops",
    keys=("shape", "part", "kind", "sizes", "count", "reuse_kib"),
    parse=_parse_op,
    fields=dict,
)
"""A line of `OPS`; shape and part stand in their first line only."""
BUCKET = RowKind(
    what="bucket",
    keys=("shape", "bucket", "gradients", "bytes"),
    parse=lambda of: {**of, "sum": Bucket(int(of["gradients"]), int(of["bytes"]))},
    fields=dict,
)


def read_ops(folder: Path) -> dict[str, TrainingStep]:
    """The step of every shape by its name, as `OPS` and `BUCKETS` have it.

    Raises:
        InputError: a file cannot be read, or a line of it.
    """
    rows: dict[str, list[OpRow]] = {}
    name = ""
    for line in read_rows(folder / OPS, OP):
        name = line["shape"] or name
        rows.setdefault(name, []).append(line["row"])
    buckets = grouped(read_rows(folder / BUCKETS, BUCKET), lambda of: of["shape"])
    return {
        name: TrainingStep(tuple(of), tuple(bucket["sum"] for bucket in buckets.get(name, ())))
        for name, of in rows.items()
    }


@dataclass(frozen=True)
class Rounds:
    """Medians over all rounds and steps, by the name of a shape, ms.

    Args:
        steps: of a step, the slowest rank's.
        alone: of a step that exchanges no gradients; of captured shapes only.
        captured: of each row of ops inside such a step.
        disturbed: further rounds, whose times were not kept as other work took a rank's core.
    """

    count: int
    disturbed: int
    steps: Mapping[str, float]
    alone: Mapping[str, float]
    captured: Mapping[str, tuple[float, ...]]


def read_rounds(folder: Path, ranks: int) -> Rounds:
    """All rounds of so many ranks.

    Raises:
        InputError: none was undisturbed, or a line is broken.
    """
    path = rounds_file(folder, ranks)
    rounds = read_rows(path, ROUND)
    kept = [each for each in rounds if each]
    if not kept:
        raise InputError(f"{path}: none of its {len(rounds)} rounds was undisturbed")

    def slowest(key: str) -> dict[str, float]:
        """Shape -> the median of the slowest rank."""
        names = dict.fromkeys(name for each in kept for name in each[key])
        return {
            name: max(
                statistics.median(ms for times in of_rank for ms in times)
                for of_rank in zip(
                    *(each[key][name] for each in kept if name in each[key]), strict=True
                )
            )
            for name in names
        }

    captured: dict[str, list[list[float]]] = {}
    for each in kept:
        for name, of in each["captured"].items():
            captured.setdefault(name, []).extend(of)
    rows_ms = {
        name: tuple(map(statistics.median, zip(*times, strict=True)))
        for name, times in captured.items()
    }
    disturbed = len(rounds) - len(kept)
    return Rounds(len(kept), disturbed, slowest("steps"), slowest("alone"), rows_ms)


def captured_step(rounds: Rounds, step: TrainingStep, name: str) -> CapturedStep:
    return CapturedStep(step.rows, rounds.captured[name], rounds.alone[name])


@dataclass(frozen=True)
class Calibrated:
    """What calibration on so many ranks has found.

    Args:
        steps: of every shape.
        sync: None: the ranks do not sum their gradients.
    """

    ranks: int
    rounds: Rounds
    steps: Mapping[str, TrainingStep]
    models: OpModels
    sync: GradientSync | None

    @classmethod
    def of(cls, folder: Path, ranks: int, steps: Mapping[str, TrainingStep]) -> Calibrated:
        """Fitted on all captured shapes.

        Raises:
            InputError: shapes or rows of the rounds are not those of the folder's ops.
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
        """Fitted on some of the captured shapes."""
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
        """Predicted time of a shape's step, which all ranks run."""
        return self.steps[name].ms(self.models, self.sync)

    def by_flop_ms(self, name: str) -> float:
        """FLOP over the rate of the family's captured shape whose FLOP are closest."""
        target = parse_shape(name)
        shapes = {of: parse_shape(of) for of in self.rounds.captured}
        alike = [of for of, shape in shapes.items() if shape.family == target.family]

        def distance(of: str) -> float:
            return abs(float(np.log(shapes[of].flop / target.flop)))

        near = min(alike, key=distance)
        return self.rounds.steps[near] * target.flop / shapes[near].flop

    def row(self, name: str, predicted_ms: float, part: str) -> ComparedRow:
        family = f"{parse_shape(name).family}, {plural(self.ranks, 'rank')}"
        named: dict[str, str | int | float] = {"ranks": self.ranks, "shape": name}
        return ComparedRow(named, self.rounds.steps[name], predicted_ms, family, part)

    def rows(self) -> list[ComparedRow]:
        """Every shape; those that were captured come last and are no part of the headline."""
        captured = self.rounds.captured

        def order(name: str) -> tuple[bool, int, str]:
            return name in captured, FAMILIES.index(parse_shape(name).family), name

        return [
            self.row(name, self.ms(name), "fit" if name in captured else "targets")
            for name in sorted(self.rounds.steps, key=order)
        ]

    def held_out(self) -> list[ComparedRow]:
        """Every captured shape, predicted from the others."""
        names = list(self.rounds.captured)
        fits = {name: self.fitted_on([other for other in names if other != name]) for name in names}
        return [self.row(name, fit.ms(name), "held out") for name, fit in fits.items()]

    def fewer(self) -> list[tuple[Cell, ...]]:
        """Errors of the targets if only the first shapes are captured."""
        # in the order of the design: one shape of each family, then the next of each
        names = [name for name in self.steps if name in self.rounds.captured]
        cells: list[tuple[Cell, ...]] = []
        for count in (n for n in FEWER if n <= len(names)):
            some = self.fitted_on(names[:count])
            found = Summary.of(some.row(name, some.ms(name), "targets") for name in some.targets)
            cells.append((self.ranks, count, found.mape, found.geomean, found.worst))
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
    found = [
        Calibrated.of(folder, ranks, steps)
        for ranks in RANKS
        if rounds_file(folder, ranks).exists()
    ]
    rows = [row for each in found for row in each.rows()]
    targets = [row for row in rows if row.part == "targets"]
    naive = [each.row(n, each.by_flop_ms(n), "targets") for each in found for n in each.targets]
    kinds = {
        "targets": targets,
        "targets, in proportion to FLOP": naive,
        "captured shapes, each from the others": [row for of in found for row in of.held_out()],
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
        suite.table("fewer_captures", [cells for each in found for cells in each.fewer()]),
    ]
    for each in found:
        captured = [captured_step(each.rounds, steps[n], n) for n in each.rounds.captured]
        groups = largest_groups(captured, each.models, LARGEST_GROUPS)
        said = {"call_us": 1e3 * each.models.op_ms, "stretch": each.models.stretch - 1}
        tables.append(suite.table("ops", groups, ranks=each.ranks, **said))
    notes = [
        f"{of.ranks} rank(s): {of.rounds.count} rounds, and {of.rounds.disturbed} left out because "
        "other work took the ranks' cores"
        for of in found
    ]
    return suite.report(rows, scores=tables, notes=notes)


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
