"""Suites of `validate`, described by suites.yaml, and their reports.

A suite has rows with their source and part, a builder from row to prediction, and the history of
its fits. Each suite has its own builder; scoring, headline and layout are common to all and are
here and in the data.

Why: docs/decisions/0005-profiles-intervals-labels.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from lab.statistics import coverage, geomean, grouped
from predictor.document import SAFE_LOADER
from predictor.errors import InputError, did_you_mean
from shardopt.calibrate.fitting import mape

COMMITTED = Path(__file__).resolve().parents[1] / "configs" / "bench"
ALL = "all"
GAVE = "gave constants"
"""Part of the rows behind a profile's constants."""


@dataclass(frozen=True)
class ComparedRow:
    """Measurement with the prediction made without it.

    Args:
        name: identifying columns of the row, in display order.
        family: rows of one family share a line of the console table.
        part: part of the suite that the row counts in, e.g. ``test`` or ``fit``.
        source: publication of the measurement.
        interval_ms: the prediction's 90 % interval ``(low, high)``; None where it has none.
    """

    name: Mapping[str, str | int | float]
    measured_ms: float
    predicted_ms: float
    family: str
    part: str = "test"
    source: str = ""
    interval_ms: tuple[float, float] | None = None

    @property
    def error(self) -> float:
        """``predicted / measured - 1``."""
        return self.predicted_ms / self.measured_ms - 1.0


@dataclass(frozen=True)
class Summary:
    """Errors of some rows as fractions; NaN where there are none.

    Args:
        covered: share of rows inside their interval, among those with one.
    """

    n: int
    mape: float
    geomean: float
    worst: float
    covered: float = math.nan

    @classmethod
    def of(cls, rows: Iterable[ComparedRow]) -> Summary:
        listed = list(rows)
        pairs = [(r.measured_ms, *r.interval_ms) for r in listed if r.interval_ms is not None]
        covered = coverage(*zip(*pairs, strict=True)) if pairs else math.nan
        return cls.of_errors([row.error for row in listed], covered)

    @classmethod
    def of_errors(cls, errors: Sequence[float], covered: float = math.nan) -> Summary:
        worst = max((abs(error) for error in errors), default=math.nan)
        return cls(len(errors), mape(errors), geomean(errors), worst, covered)

    @property
    def figures(self) -> tuple[float, float, float, float]:
        """Mean, geometric mean, worst, covered."""
        return self.mape, self.geomean, self.worst, self.covered


def noise_of(measured: Iterable[tuple[Hashable, float]]) -> Summary:
    """Summarise the errors of repeats of one measurement against the median of the others.

    Args:
        measured: key of the measurement, and its time.
    """
    errors = []
    for repeats in grouped(measured, lambda pair: pair[0]).values():
        times = [time for _, time in repeats]
        for i, time in enumerate(times if len(times) > 1 else ()):
            errors.append(statistics.median(times[:i] + times[i + 1 :]) / time - 1.0)
    return Summary.of_errors(errors)


Interval = tuple[float, float, float]
"""A value with the bounds of its interval."""
Cell = str | int | float | Interval | None


@dataclass(frozen=True)
class Scores:
    """Table of figures from the rows.

    Args:
        name: key of the table in JSON and its title.
        columns: ``(title, kind)``: ``text``, ``count``, ``ms``, ``figure`` (a plain number),
            ``share`` (a fraction, shown in %), ``signed`` (the same with its sign) or
            ``interval`` (three fractions).
        rows: a cell a column; None or NaN where there is no figure.
        about: description of the figures, one line.
    """

    name: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[Cell, ...], ...]
    about: str = ""


@dataclass(frozen=True)
class Report:
    """Results of one suite.

    Args:
        rows: every comparison, hard ones included.
        headline: name of the part behind ``mape`` and ``geomean``.
        held_out: further parts that nothing was fitted on; JSON lists them with the headline.
        skipped: one message with the reason for each row left out.
        notes: caveats of the figures.
        parts: further parts of the same rows: name -> their rows.
        scores: further figures; pages show them in place of the rows.
        noise: name -> errors between repeats of one measurement, which no prediction can beat.
    """

    suite: str
    rows: tuple[ComparedRow, ...]
    headline: str
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    parts: Mapping[str, Sequence[ComparedRow]] = field(default_factory=dict)
    held_out: tuple[str, ...] = ()
    scores: tuple[Scores, ...] = ()
    noise: Mapping[str, Summary] = field(default_factory=dict)

    @property
    def counted(self) -> list[ComparedRow]:
        """Rows behind the headline."""
        return [row for row in self.rows if row.part == self.headline]

    @property
    def listed(self) -> list[ComparedRow]:
        """Rows that nothing was fitted on."""
        return [row for row in self.rows if row.part == self.headline or row.part in self.held_out]

    @property
    def summary(self) -> Summary:
        return Summary.of(self.counted)

    def by_part(self) -> dict[str, Summary]:
        """Return part -> summary, in the order of the rows, further parts last."""
        parts = {**grouped(self.rows, lambda row: row.part), **self.parts}
        return {name: Summary.of(rows) for name, rows in parts.items()}

    def by_family(self) -> dict[tuple[str, str], Summary]:
        """Return (part, family) -> summary, in the order of the rows."""
        groups = grouped(self.rows, lambda row: (row.part, row.family))
        return {key: Summary.of(rows) for key, rows in groups.items()}


@dataclass(frozen=True)
class Suite:
    """Predictions of one kind against measurements of one source; suites.yaml explains the keys.

    Args:
        lead: rows of the README's first table: ``what``, and names of ``first`` scores.
        readme: rows of the README: ``parts`` of the report, ``what`` they are, what the figures are
            ``called``, and names of their ``first`` scores.
    """

    name: str
    about: str
    builder: str
    text: str
    headline: str
    held_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    tables: Mapping[str, Sequence[str]] = field(default_factory=dict)
    every_table: bool = False
    scores: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gave: tuple[Mapping[str, str | int | float], ...] = ()
    committed: bool = False
    lead: tuple[Mapping[str, Any], ...] = ()
    readme: tuple[Mapping[str, Any], ...] = ()

    def run(self, data: Path | None = None) -> Report:
        """Predict and compare.

        Args:
            data: folder with the measurements; None for the committed ones.

        Raises:
            InputError: there are no such files, or they cannot be used.
        """
        if data is None and not self.committed:
            raise InputError(
                f"{self.name} reads public files; give their folder (docs/data.md lists the files "
                "and where they are published)",
                inputs=("data",),
            )
        folder = data or COMMITTED / self.name
        self._check(folder)
        build = getattr(import_module(self.builder), f"validate_{self.name.replace('-', '_')}")
        report: Report = build(folder)
        return report

    def _check(self, folder: Path) -> None:
        """Refuse a folder that lacks all public files, or any if the suite needs every one."""
        if self.tables and not folder.is_dir():
            raise InputError(
                f"{folder}: no such directory; docs/data.md lists the public files that the suites "
                f"read and where they are published (here: {', '.join(self.tables)})",
                inputs=("data",),
            )
        missing = [name for name in self.tables if not (folder / name).is_file()]
        if missing and (self.every_table or len(missing) == len(self.tables)):
            raise InputError(
                f"{folder}: holds no {' and no '.join(missing)}; docs/data.md says where to get it",
                inputs=("data",),
            )

    def part_of(self, named: Mapping[str, object], usual: str) -> str:
        """Return `GAVE` or the usual part of a row, by its cells or its name."""
        return GAVE if any(cells.items() <= named.items() for cells in self.gave) else usual

    def table(self, name: str, rows: Iterable[Sequence[Cell]], **about: object) -> Scores:
        """Return one of the suite's further tables.

        Args:
            about: values for the placeholders of its description.
        """
        entry = self.scores[name]
        title, text = (entry.get(key, "").format(**about) for key in ("title", "about"))
        cells = tuple(map(tuple, rows))
        return Scores(title or name, tuple(entry["columns"].items()), cells, text)

    def report(
        self,
        rows: Iterable[ComparedRow],
        skipped: Iterable[str] = (),
        *,
        headline: str | None = None,
        parts: Mapping[str, Sequence[ComparedRow]] | None = None,
        scores: Iterable[Scores] = (),
        noise: Mapping[str, Summary] | None = None,
        notes: Iterable[str] = (),
        **values: object,
    ) -> Report:
        """Return the suite's report; further tables without rows are left out.

        Args:
            headline: headline in place of the usual one, whose file is missing.
            notes: notes beside those of the suite.
            values: values for the placeholders of the suite's notes.
        """
        leads = headline or self.headline
        return Report(
            self.name,
            tuple(rows),
            leads,
            tuple(skipped),
            (*(note.format(**values) for note in self.notes), *notes),
            {} if parts is None else parts,
            tuple(part for part in self.held_out if part != leads),
            tuple(table for table in scores if table.rows),
            {} if noise is None else noise,
        )


def _suite(entry: Mapping[str, Any]) -> Suite:
    lists = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
    return Suite(**{**entry, **lists})


SUITES: Mapping[str, Suite] = {
    entry["name"]: _suite(entry)
    for entry in yaml.load(
        Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"), Loader=SAFE_LOADER
    )
}
COLUMNS = {name: columns for suite in SUITES.values() for name, columns in suite.tables.items()}
"""Public table -> columns that are read."""


def find_suites(name: str) -> list[Suite]:
    """Return the suite of a name, or every suite for ``all``.

    Raises:
        InputError: there is no such suite.
    """
    if name != ALL and name not in SUITES:
        raise InputError(
            f"there is no suite '{name}'{did_you_mean(name, [*SUITES, ALL])}; there are "
            f"{', '.join([*SUITES, ALL])}"
        )
    return [*SUITES.values()] if name == ALL else [SUITES[name]]


def run_suites(name: str, data: Path | None) -> list[Report]:
    """Run the suites of a name; under ``all``, ``data`` has only the public files."""
    return [
        suite.run(None if name == ALL and suite.committed else data) for suite in find_suites(name)
    ]
