"""The rows of a calibration: their file, the rows for fits, and the points to measure again.

A file has one CSV line a measured point, written as soon as it is measured. Lines carry the
machine, the versions and the date, so that nothing measured elsewhere is mixed in. An interrupted
run continues from its file.

A row is steady where its mean and its median agree. A point with an unsteady row is measured once
more, at the end of the run; so is a collective that stands out above its neighbours by size. The
shortest steady attempt counts, as a disturbance only adds time. If none is steady but all took
equally long, the cost itself has modes, such as gloo's waits, and one counts. All other rows are
refused: they stay in the file, and no fit uses them. A point that fails has a row with its message
and no times, and is not measured again. All this follows from the rows alone, so that a resumed run
knows the repeated points.

Why: docs/decisions/0022-calibration.md.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor.cost.collectives import OPS
from predictor.errors import InputError
from shardopt.calibrate.points import Point
from shardopt.files import decode, read_bytes
from shardopt.measure import store
from shardopt.measure.sampling import Samples
from shardopt.measure.store import Fields, RowKind, RowsFile
from shardopt.ranks.realtime import Runtime

SCHEMA = "shardopt.calibration/2"
UNSTEADY = 0.15
"""Largest difference of mean and median of a steady row, as a share of the median."""
TIMES = ("median_us", "mean_us", "p10_us", "p25_us", "p75_us", "p90_us")
COLUMNS = (
    *("schema", "machine", "versions", "settings", "date", "load"),
    *("family", "split", "point", "facts"),
    *TIMES,
    *("n", "stable"),
)

TRIMMED_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Shares of the samples that lie below the percentiles of a row."""

FAILURE = "failed"
"""Fact of a row whose point could not be measured: the message."""
MOST_OF_A_MESSAGE = 160
"""Most characters of the message in a row."""

PASSES = ("forward", "backward")
PARTS = {
    **dict.fromkeys(
        (
            *("lookup", "lookup_variant", "lookup_dense", "lookup_unpooled", "model_lookup"),
            *("interaction", "pooled", "function", "attention"),
        ),
        PASSES,
    ),
    "lookup_cached": ("prefetch", *PASSES),
    "iteration": ("wall", "cpu"),
}
"""Parts of a point by its family; all others have one without a name."""


@dataclass(frozen=True)
class Origin:
    """Machine and versions of rows; rows of others are refused."""

    machine: str
    versions: str


@dataclass(frozen=True)
class Measurement:
    """One row.

    Args:
        part: part of the point that was timed: one of `PARTS`, or empty for the only one.
        facts: inputs of the cost that only the measurement knows, such as distinct rows.
        load: load average of the machine when the row was written.

    The column ``stable`` of the file says whether the row is steady; it is for those who read the
    file, and rows written before 2026-11-22 have another rule's answer there.
    """

    point: Point
    part: str
    facts: dict[str, Any]
    median_us: float
    mean_us: float
    p10_us: float
    p25_us: float
    p75_us: float
    p90_us: float
    n: int
    settings: str = ""
    date: str = ""
    load: float = 0.0

    @property
    def failure(self) -> str | None:
        """Message of the error that the point ended with; such a row has no times."""
        return self.facts.get(FAILURE)

    @property
    def runtime(self) -> Runtime:
        """Runtime of the ranks; tuned in rows without one, from before there were two."""
        return next((r for r in Runtime if runtime_words(r) in self.settings), Runtime.TUNED)

    @property
    def key(self) -> str:
        """Key of point and part, independent of the settings."""
        return key_of(self.point, self.part)

    @property
    def unevenness(self) -> float:
        """Difference of mean and median, as a share of the median."""
        return abs(self.mean_us / self.median_us - 1.0)

    @property
    def trimmed_us(self) -> float:
        """Mean without the lowest and the highest tenth, from the percentiles.

        It suits costs with modes, where a median is one of the modes, and a mean has rare outliers.
        """
        quantiles = (self.p10_us, self.p25_us, self.median_us, self.p75_us, self.p90_us)
        return float(np.trapezoid(quantiles, TRIMMED_SHARES)) / (
            TRIMMED_SHARES[-1] - TRIMMED_SHARES[0]
        )


def runtime_words(runtime: Runtime) -> str:
    """Return the words for a runtime in the settings of a row."""
    return f"{runtime.value} runtime"


def key_of(point: Point, part: str = "") -> str:
    """Return the key of a point and part, see `Measurement.key`."""
    return f"{point.family} {part} {_compact(point.params)}"


def row_of_samples(point: Point, samples: Samples, part: str = "", **facts: Any) -> Measurement:
    """Make a row of samples; settings, date and load are added when it is written."""
    seconds = np.array(samples.seconds)
    statistics = (*np.quantile(seconds, TRIMMED_SHARES), seconds.mean())
    # as written, so that rows are the same before and after the file
    p10, p25, median, p75, p90, mean = (round(float(time) * 1e6, 3) for time in statistics)
    return Measurement(point, part, facts, median, mean, p10, p25, p75, p90, len(seconds))


def rows_of_passes(point: Point, passes: Iterable[Samples], **facts: Any) -> list[Measurement]:
    """Make the rows of all parts of a point, which share their facts."""
    parts = zip(PARTS[point.family], passes, strict=True)
    return [row_of_samples(point, samples, part, **facts) for part, samples in parts]


def row_of_failure(point: Point, error: Exception) -> Measurement:
    """Make the row of a point that could not be measured, with the message of its error."""
    message = f"{type(error).__name__}: {error}".splitlines()[0][:MOST_OF_A_MESSAGE]
    unknown = (math.nan,) * 6
    return Measurement(point, "", {FAILURE: message}, *unknown, n=0)


def times_ms(rows: Sequence[Measurement]) -> NDArray[np.float64]:
    """Return the medians in ms, ``[rows]``."""
    return np.array([row.median_us * 1e-3 for row in rows])


class CalibrationRows(RowsFile[Measurement]):
    """The rows of a calibration on disk; the file need not exist yet.

    Raises:
        InputError: a line that is no row of this schema, machine and versions; says which and what
            to do.
    """

    def __init__(self, path: Path, origin: Origin) -> None:
        super().__init__(path, _kind(origin))
        self.origin = origin


def missing(rows: Iterable[Measurement], points: Iterable[Point]) -> list[Point]:
    """Return the points without a row of their failure that lack a row of some part."""
    keys = {row.key for row in rows}

    def complete(point: Point) -> bool:
        parts = PARTS.get(point.family, ("",))
        return key_of(point) in keys or all(key_of(point, part) in keys for part in parts)

    return [point for point in points if not complete(point)]


def read_rows(path: Path) -> tuple[Origin, list[Measurement]]:
    """Read the rows of any machine, as the first row names it, for fitting alone.

    Raises:
        InputError: the file cannot be read, holds no rows, or a line is no row of that machine.
    """
    text = decode(read_bytes(path, "file of calibration rows"), path)
    first: dict[str, str] = next(csv.DictReader(io.StringIO(text)), {})
    origin = Origin(first.get("machine") or "", first.get("versions") or "")
    rows = store.read_rows(path, _kind(origin))
    if not rows:
        raise InputError(f"{path}: holds no rows")
    return origin, rows


def _kind(origin: Origin) -> RowKind[Measurement]:
    """Return the format of rows of one machine and its versions."""

    def parse(fields: Fields) -> Measurement:
        for column, expected in vars(origin).items():
            if fields[column] != expected:
                raise ValueError(
                    f"{column} is '{fields[column]}', here it is '{expected}'; rows of different "
                    "machines or versions are never mixed"
                )
        return _row_of(fields)

    return RowKind(
        what="calibration row",
        keys=COLUMNS,
        parse=parse,
        fields=lambda row: {"schema": SCHEMA, **vars(origin), **_fields(row)},
        schema=SCHEMA,
        remedy="delete this line to measure its point again, or choose another file of rows",
    )


def _fields(row: Measurement) -> dict[str, object]:
    point = {**row.point.params, **({"part": row.part} if row.part else {})}
    return {
        "settings": row.settings,
        "date": row.date,
        "load": f"{row.load:.2f}",
        "family": row.point.family,
        "split": "test" if row.point.test else "fit",
        "point": _compact(point),
        "facts": _compact(row.facts),
        **{column: "" if row.failure else f"{getattr(row, column):.3f}" for column in TIMES},
        "n": row.n,
        "stable": "yes" if row.unevenness <= UNSTEADY else "no",
    }


def _compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _no_number(name: str) -> float:
    raise ValueError(f"facts hold {name}")


def _row_of(row: Fields) -> Measurement:
    params = json.loads(row["point"])
    facts = json.loads(row["facts"], parse_constant=_no_number)
    for table in facts.get("tables", []):
        rows, dim, bags, ids, distinct = table
        if min(rows, dim, bags) <= 0 or min(ids, distinct) < 0:
            raise ValueError(f"facts hold a table {table}: rows, dim and bags must be above 0")
    part = params.pop("part", "")
    if row["split"] not in ("fit", "test") or row["stable"] not in ("yes", "no"):
        raise ValueError(f"split is '{row['split']}', stable is '{row['stable']}'")
    failed = FAILURE in facts
    times = {c: math.nan if failed else float(row[c]) for c in TIMES}
    if not failed and not all(math.isfinite(t) and t > 0 for t in times.values()):
        raise ValueError("a time is not above 0")
    return Measurement(
        Point(row["family"], params, row["split"] == "test"),
        part,
        facts,
        **times,
        n=int(row["n"]),
        settings=row["settings"],
        date=row["date"],
        load=float(row["load"]),
    )


ATTEMPTS = 2
"""Most measurements of a point."""
SAME_MODES = 0.3
"""Share by which two unsteady attempts may differ: a few dozen samples of a cost that has modes,
such as that of a message among plain ranks, determine its mean within half of that."""
MOST_OVER = 1.2
"""Largest time of a message over the time that its neighbours by size allow."""


@dataclass(frozen=True)
class Accepted:
    """One row of each point and part.

    Args:
        rows: rows for fits.
        refused: rows that no fit uses.
        repeated: number of points and parts measured more than once.
        failed: rows of points that could not be measured.
    """

    rows: list[Measurement]
    refused: list[Measurement]
    repeated: int
    failed: Sequence[Measurement] = ()


def accept(rows: Iterable[Measurement]) -> Accepted:
    """Sort the rows of one calibration; both lists in the order of first attempts."""
    rows = list(rows)
    attempts, chosen = _attempts(rows)
    failed = [row for row in rows if row.failure]
    good = [row for row in chosen.values() if row is not None]
    refused = [
        min(tries, key=lambda row: row.unevenness)
        for key, tries in attempts.items()
        if chosen[key] is None
    ]
    return Accepted(good, refused, sum(len(tries) > 1 for tries in attempts.values()), failed)


def points_again(rows: Iterable[Measurement]) -> list[Point]:
    """Return the points to measure once more, in the order of their first attempts."""
    attempts, chosen = _attempts(rows)
    doubtful = {
        key_of(tries[0].point): tries[0].point
        for key, tries in attempts.items()
        if len(tries) < ATTEMPTS and chosen[key] is None
    }
    return list(doubtful.values())


def _attempts(
    rows: Iterable[Measurement],
) -> tuple[dict[str, list[Measurement]], dict[str, Measurement | None]]:
    """Group rows by point and part, and choose the one that counts.

    Returns:
        Rows of each point and part, in the order measured, and the chosen row; None if all are
        unsteady, or if the only one stands out of its curve.
    """
    attempts: dict[str, list[Measurement]] = defaultdict(list)
    for row in (row for row in rows if not row.failure):
        attempts[row.key].append(row)
    chosen = {key: _choose(tries) for key, tries in attempts.items()}
    curves = defaultdict(list)
    for row in filter(None, chosen.values()):
        point = row.point
        if point.params.get("op") in OPS and not point.test and not _varies(point):
            among = {name: value for name, value in point.params.items() if name != "bytes"}
            curves[key_of(Point(point.family, among))].append(row)
    for row in chain.from_iterable(map(_above, curves.values())):
        if len(attempts[row.key]) == 1:
            chosen[row.key] = None
    return attempts, chosen


def _choose(tries: Sequence[Measurement]) -> Measurement | None:
    """Choose the row that counts among the attempts at one point and part."""
    if _varies(tries[0].point):
        return tries[-1]
    steady = [row for row in tries if row.unevenness <= UNSTEADY]
    if steady:
        return min(steady, key=lambda row: row.trimmed_us)
    times = [row.trimmed_us for row in tries]
    if len(tries) > 1 and max(times) <= (1 + SAME_MODES) * min(times):
        return min(tries, key=lambda row: row.unevenness)
    return None


def _varies(point: Point) -> bool:
    """Return True if the times of a point differ by nature.

    Reference kernels show changes of the machine. Over an emulated link a message takes once or
    twice its time, as acknowledgements may wait.
    """
    return point.family == "reference" or "link_gbit_s" in point.params


def _above(rows: Iterable[Measurement]) -> list[Measurement]:
    """Return the rows of one curve that stand out above those of other sizes.

    Latency and bandwidth make a curve that bends upwards over the logarithm of the size: no message
    takes longer than on the straight line between its neighbours, and the first takes no longer
    than the second. A row that stands out twice is real.
    """
    curve = sorted(rows, key=lambda row: float(row.point.params["bytes"]))
    size = [math.log(row.point.params["bytes"]) for row in curve]
    time = [row.trimmed_us for row in curve]
    outliers = [a for a, b in list(pairwise(curve))[:1] if a.trimmed_us > MOST_OVER * b.trimmed_us]
    for i in range(1, len(curve) - 1):
        share = (size[i] - size[i - 1]) / (size[i + 1] - size[i - 1])
        line = time[i - 1] ** (1 - share) * time[i + 1] ** share
        outliers += [curve[i]] if time[i] > MOST_OVER * line else []
    return outliers
