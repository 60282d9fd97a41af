"""Predictions against measurements: errors, and what a suite reports.

`lab.validate.report` says what the errors are.

Why: docs/decisions/0005-profiles-intervals-labels.md.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from predictor.cost.errors import Z_90, error_size
from predictor.csv_rows import Row, read_table
from predictor.errors import InputError, ShardoptError
from predictor.hardware.device_names import PROFILES
from predictor.hardware.loader import DEFAULT_HARDWARE
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.critical_path import critical_path
from predictor.iteration.graph import Graph
from predictor.iteration.timeline import simulate
from predictor.model.topology import Topology
from predictor.predict import iteration_interval
from shardopt.calibrate.fitting import Array, gmae, mape

__all__ = ["gmae", "mape"]

Z_95 = 1.959964
"""Half-width of a 95 % normal interval in standard deviations."""
TIE = 1e-12
"""Relative difference below which two scores are the same."""
EXACT_HIT = 1e-6
"""Smallest error inside a logarithm: one exact hit must not make a geometric mean zero."""


def relative_errors(measured: ArrayLike, predicted: ArrayLike) -> Array:
    """``predicted / measured - 1`` in the shape of both."""
    return _array(predicted) / _array(measured) - 1.0


def geomean(errors: ArrayLike) -> float:
    """``exp(mean(ln |error|))``; NaN if there are no errors."""
    size = np.abs(_array(errors))
    return float(np.exp(np.log(np.maximum(size, EXACT_HIT)).mean())) if size.size else math.nan


def mean_interval(values: ArrayLike) -> tuple[float, float, float]:
    """Mean, and the 95 % interval of it by Student's t; NaN where there are too few values."""
    found = _array(values)
    if found.size < 2:
        return (float(found.mean()) if found.size else math.nan), math.nan, math.nan
    from scipy.stats import t

    half = t.ppf(0.975, found.size - 1) * found.std(ddof=1) / math.sqrt(found.size)
    mean = float(found.mean())
    return mean, mean - float(half), mean + float(half)


def shape_errors(measured: ArrayLike, predicted: ArrayLike) -> Array:
    """Relative errors once one common factor, the median ratio, is divided out."""
    ratios = np.log(_array(predicted) / _array(measured))
    return np.asarray(np.expm1(ratios - np.median(ratios)))


def ranks(values: ArrayLike) -> Array:
    """Ranks from 1; equal values share the mean of theirs."""
    found = _array(values)
    below = (found[:, None] > found).sum(axis=1)
    same = (found[:, None] == found).sum(axis=1)
    return np.asarray(below + (same + 1) / 2)


def spearman(measured: ArrayLike, predicted: ArrayLike) -> float:
    """Spearman's rank correlation; NaN where either is constant or has fewer than two values."""
    a, b = ranks(measured), ranks(predicted)
    a, b = a - a.mean() if a.size else a, b - b.mean() if b.size else b
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else math.nan


def faster_half(measured: ArrayLike) -> NDArray[np.intp]:
    """Indices of the faster half by measurement, the middle one included, fastest first."""
    times = _array(measured)
    return np.argsort(times, kind="stable")[: (len(times) + 1) // 2]


def regrets(measured: ArrayLike) -> Array:
    """How much slower every plan is than the fastest: ``measured / min - 1``."""
    times = _array(measured)
    return np.asarray(times / times.min() - 1.0)


def picks(scores: ArrayLike) -> Array:
    """Chance of each plan to be picked: the smallest score is; ties share it evenly."""
    given = _array(scores)
    low = given.min()
    chosen = given <= low + TIE * abs(low)
    return np.asarray(chosen / chosen.sum())


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share of ``n`` independent trials (Wilson 1927); (0, 1) if there are none.

    Args:
        share: of successes, in [0, 1]; a mean chance where picks are random.
    """
    if n == 0:
        return 0.0, 1.0
    square = Z_95**2 / n
    middle = (share + square / 2) / (1 + square)
    half = Z_95 * math.sqrt(share * (1 - share) / n + square / (4 * n)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def coverage(measured: ArrayLike, low: ArrayLike, high: ArrayLike) -> float:
    """Share of measurements inside their intervals, bounds included; NaN if there are none."""
    times = _array(measured)
    inside = (_array(low) <= times) & (times <= _array(high))
    return float(inside.mean()) if inside.size else math.nan


def _array(values: ArrayLike) -> Array:
    return np.asarray(values, dtype=np.float64)


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


Builder = Callable[[Row], ComparedRow]
"""Predicts a row of a table; a ValueError or an error of ours says why it is left out."""
Tables = Mapping[str, tuple[tuple[str, ...], Builder]]
"""File -> the columns that are read, and the builder of its rows."""


def compare_tables(folder: Path, tables: Tables) -> tuple[list[ComparedRow], list[str]]:
    """Every row of some tables with its prediction, and ``file:line: why`` of those left out.

    Raises:
        InputError: the folder or a file is not there, or cannot be read.
    """
    data_folder(folder, tuple(tables), every=True)
    rows: list[ComparedRow] = []
    skipped: list[str] = []
    for name, (columns, build) in tables.items():
        table = read_table(folder / name, columns, partial(_built, build))
        rows += table.rows
        skipped += table.problems
    return rows, merged_lines(skipped)


def _built(build: Builder, row: Row) -> ComparedRow:
    try:
        return build(row)
    except ShardoptError as error:
        raise ValueError(str(error)) from error


def time_of(
    graph: Graph, hardware: HardwareProfile, topology: Topology, software_error: float = 0.0
) -> tuple[float, tuple[float, float]]:
    """Time of an iteration in ms and its 90 % interval.

    Args:
        software_error: 1-sigma, relative, of a release that did other things.
    """
    timeline = simulate(graph, keep_steps=True)
    time = float(timeline.iteration_ms[0])
    path = critical_path(graph, timeline)
    return time, iteration_interval(time, path, hardware, topology, software_error)


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
