"""Predictions against measurements: errors, and what a suite reports.

`lab.fit.scores` says what the errors are.

Why: docs/decisions/0047.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from lab.fit.scores import coverage, geomean
from predictor.cost.errors import Z_90, error_size
from predictor.errors import InputError
from predictor.hardware.device_names import PROFILES
from predictor.hardware.loader import DEFAULT_HARDWARE
from predictor.hardware.schema import HardwareProfile
from shardopt.calibrate.fitting import mape


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
        """The summary of some rows."""
        listed = list(rows)
        pairs = [(r.measured_ms, *r.interval_ms) for r in listed if r.interval_ms is not None]
        held = coverage(*zip(*pairs, strict=True)) if pairs else math.nan
        return cls.of_errors([row.error for row in listed], held)

    @classmethod
    def of_errors(cls, errors: Sequence[float], covered: float = math.nan) -> Summary:
        """The summary of relative errors."""
        worst = max((abs(error) for error in errors), default=math.nan)
        return cls(len(errors), mape(errors), geomean(errors), worst, covered)


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
        keys: of the columns in JSON; their titles unless given.
    """

    name: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[Cell, ...], ...]
    about: str = ""
    keys: tuple[str, ...] = ()


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
        """Of the headline's rows."""
        return Summary.of(self.counted)

    def by_part(self) -> dict[str, Summary]:
        """Part -> summary, in the order of the rows, further parts last."""
        names = dict.fromkeys(row.part for row in self.rows)
        found = {name: Summary.of(r for r in self.rows if r.part == name) for name in names}
        return found | {name: Summary.of(rows) for name, rows in self.parts.items()}

    def by_family(self) -> dict[tuple[str, str], Summary]:
        """(part, family) -> summary, in the order of the rows."""
        keys = dict.fromkeys((row.part, row.family) for row in self.rows)
        return {key: Summary.of(r for r in self.rows if (r.part, r.family) == key) for key in keys}


def noise_of(measured: Iterable[tuple[Hashable, float]]) -> Summary:
    """How far repeats of one measurement lie from the median of the others.

    Args:
        measured: what was measured, and its time.
    """
    repeats = defaultdict(list)
    for key, time in measured:
        repeats[key].append(time)
    errors = []
    for times in repeats.values():
        for i, time in enumerate(times if len(times) > 1 else ()):
            errors.append(statistics.median(times[:i] + times[i + 1 :]) / time - 1.0)
    return Summary.of_errors(errors)


def errors_by_ranks(
    name: str, first: str, kinds: Iterable[tuple[str, Sequence[ComparedRow]]], title: str
) -> Scores:
    """A table of errors.

    Args:
        first: heads the column of the kinds.
        kinds: name and rows of each; rows are named by their `ranks`.
    """
    cells = []
    for kind, rows in kinds:
        for ranks in sorted({int(row.name["ranks"]) for row in rows}):
            found = Summary.of(row for row in rows if row.name["ranks"] == ranks)
            cells.append((kind, ranks, found.n, found.mape, found.geomean, found.worst))
    columns = (
        (first, "text"),
        ("ranks", "count"),
        ("n", "count"),
        ("MAPE", "share"),
        ("geomean", "share"),
        ("worst", "share"),
    )
    return Scores(name, columns, tuple(cells), title)


def data_folder(folder: Path, needed: Sequence[str], *, every: bool = False) -> Path:
    """The folder, if it holds the files that a suite reads.

    Args:
        needed: names of the files.
        every: all of them must be there; otherwise one is enough.

    Raises:
        InputError: there is no such folder, or not the files.
    """
    if not folder.is_dir():
        raise InputError(
            f"{folder}: no such directory; docs/data.md lists the public files that the suites "
            f"read and where they are published (here: {', '.join(needed)})",
            inputs=("data",),
        )
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing and (every or len(missing) == len(needed)):
        raise InputError(
            f"{folder}: holds no {' and no '.join(missing)}; docs/data.md says where to get it",
            inputs=("data",),
        )
    return folder


SMALL_BYTES = 2**20
"""Below it latency bounds a message."""


def kernel_interval(
    hardware: HardwareProfile,
    groups: Iterable[str],
    predicted_ms: float,
    size_bytes: float = math.inf,
) -> tuple[float, float]:
    """90 % interval ``(low, high)`` in ms of the time of one kernel or collective.

    Args:
        groups: of the profile that its cost comes from, such as ``collectives.inter``.
        predicted_ms: > 0.
        size_bytes: of a message; links may be less sure of small ones.
    """
    names = tuple(groups)
    size = error_size(hardware, names)
    shared = [size.shared]
    if size_bytes < SMALL_BYTES:
        links = (hardware.groups[name] for name in names)
        shared += [getattr(link, "small_rel_error", None) or 0.0 for link in links]
    factor = math.exp(Z_90 * math.hypot(max(shared), size.own))
    return predicted_ms / factor, predicted_ms * factor


def merged_lines(problems: Sequence[str]) -> list[str]:
    """Problems ``file:line: why``, those of lines that follow one another for the same reason as
    one, ``file:first-last: why``."""
    merged: list[tuple[str, int, int, str]] = []
    for text in problems:
        name, line, why = text.split(":", 2)
        file, first, last, same = merged[-1] if merged else ("", 0, 0, "")
        if (file, last + 1, same) == (name, int(line), why):
            merged[-1] = (file, first, last + 1, why)
        else:
            merged.append((name, int(line), int(line), why))
    return [
        f"{file}:{first}{f'-{last}' if last > first else ''}:{why}"
        for file, first, last, why in merged
    ]


def no_profile(name: str, column: str = "gpu") -> str:
    """Why rows of a device are left out: the nearest profile by name, and how to write one.

    Args:
        column: of the table that names the device.
    """
    known = {profile: profile for _, profile in PROFILES}
    known |= {words[0].lower(): profile for words, profile in reversed(PROFILES)}
    words = [word.lower() for word in name.replace("-", " ").split()]
    near = [known[hit] for word in words for hit in get_close_matches(word, known, 1, 0.65)]
    given = (
        f"{column} is '{name}', which no profile describes" if name else f"{column} is not given"
    )
    return (
        f"{given}; the nearest is {near[0] if near else DEFAULT_HARDWARE}: "
        f"name it as `base:` of a file with the groups that differ (CONTRIBUTING.md)"
    )
