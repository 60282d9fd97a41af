"""The suites of `validate`: what suites.yaml says of each, and what comes out when one is run.

A suite is rows with their source, what each row is (its part), a builder from row to prediction,
and what was known when. What a suite shares with no other is its builder; how rows are scored,
which part leads, and how figures are laid out is the same for all and stands here and in the data.

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
from predictor.errors import InputError, did_you_mean
from shardopt.calibrate.fitting import mape

COMMITTED = Path(__file__).resolve().parents[1] / "configs" / "bench"
ALL = "all"
GAVE = "gave constants"
"""Part of the rows that gave a profile a constant."""


@dataclass(frozen=True)
class ComparedRow:
    """One measurement and the prediction made without it.

    Args:
        name: what names the row, in the order in which it is shown.
        family: rows of one family share a line of the console table.
        part: the part of the suite that the row counts in, e.g. ``test`` against ``fit``.
        source: where the measurement was published.
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
        covered: share of the rows that have an interval which it holds.
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
        held = coverage(*zip(*pairs, strict=True)) if pairs else math.nan
        return cls.of_errors([row.error for row in listed], held)

    @classmethod
    def of_errors(cls, errors: Sequence[float], covered: float = math.nan) -> Summary:
        worst = max((abs(error) for error in errors), default=math.nan)
        return cls(len(errors), mape(errors), geomean(errors), worst, covered)

    @property
    def figures(self) -> tuple[float, float, float, float]:
        """Mean, geometric mean, worst, covered."""
        return self.mape, self.geomean, self.worst, self.covered


def noise_of(measured: Iterable[tuple[Hashable, float]]) -> Summary:
    """How far repeats of one measurement lie from the median of the others.

    Args:
        measured: what was measured, and its time.
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
    """A table of figures that the rows give.

    Args:
        name: key of the table in JSON and its title.
        columns: ``(title, kind)``: ``text``, ``count``, ``ms``, ``figure`` (a plain number),
            ``share`` (a fraction, shown in %), ``signed`` (the same with its sign) or
            ``interval`` (three fractions).
        rows: a cell a column; None or NaN where there is no figure.
        about: what the figures are, one line.
    """

    name: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[Cell, ...], ...]
    about: str = ""


@dataclass(frozen=True)
class Report:
    """What one suite found.

    Args:
        rows: every comparison, hard ones included.
        headline: name of the part that ``mape`` and ``geomean`` are of.
        held_out: further parts that nothing was fitted on; JSON lists them with the headline.
        skipped: one line of text for each row that was left out, and why.
        notes: what a reader of the figures must know.
        parts: further parts of the same rows: name -> those that belong to it.
        scores: further figures; where there are any, pages show them in place of the rows.
        noise: name -> how far repeats of one measurement lie apart: what no prediction can beat.
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
        """The rows behind the headline."""
        return [row for row in self.rows if row.part == self.headline]

    @property
    def listed(self) -> list[ComparedRow]:
        """The rows that nothing was fitted on."""
        return [row for row in self.rows if row.part == self.headline or row.part in self.held_out]

    @property
    def summary(self) -> Summary:
        return Summary.of(self.counted)

    def by_part(self) -> dict[str, Summary]:
        """Part -> summary, in the order of the rows, further parts last."""
        parts = {**grouped(self.rows, lambda row: row.part), **self.parts}
        return {name: Summary.of(rows) for name, rows in parts.items()}

    def by_family(self) -> dict[tuple[str, str], Summary]:
        """(part, family) -> summary, in the order of the rows."""
        found = grouped(self.rows, lambda row: (row.part, row.family))
        return {key: Summary.of(rows) for key, rows in found.items()}


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
            data: folder with the measurements; the committed ones if None.

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
        """Refuse a folder without the public files: every one, or all of them."""
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
        """`GAVE`, or the usual part of a row, by its cells or by what names it."""
        return GAVE if any(of.items() <= named.items() for of in self.gave) else usual

    def table(self, name: str, rows: Iterable[Sequence[Cell]], **about: object) -> Scores:
        """One of the suite's further tables.

        Args:
            about: values that its explanation has places for.
        """
        of = self.scores[name]
        title, text = (of.get(key, "").format(**about) for key in ("title", "about"))
        cells = tuple(map(tuple, rows))
        return Scores(title or name, tuple(of["columns"].items()), cells, text)

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
        **said: object,
    ) -> Report:
        """What the suite found; further tables without rows are left out.

        Args:
            headline: a part that leads in place of the usual one, whose file is not there.
            notes: more of them than the suite has.
            said: values that the suite's notes have places for.
        """
        leads = headline or self.headline
        return Report(
            self.name,
            tuple(rows),
            leads,
            tuple(skipped),
            (*(note.format(**said) for note in self.notes), *notes),
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
    for entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
}
COLUMNS = {name: of for suite in SUITES.values() for name, of in suite.tables.items()}
"""Public table -> the columns that are read."""


def find_suites(name: str) -> list[Suite]:
    """The suite of a name, or every suite for ``all``.

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
    """What each suite of a name finds; under ``all``, ``data`` holds the public files alone."""
    return [
        suite.run(None if name == ALL and suite.committed else data) for suite in find_suites(name)
    ]
