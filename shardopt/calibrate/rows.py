"""The rows file: one CSV line a measured point, written as soon as it is measured.

Lines carry the machine, the versions and the date, so that nothing measured elsewhere is mixed in.
An interrupted run continues from its file.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predictor.errors import InputError
from shardopt.calibrate.design.points import Point
from shardopt.measure.timing import Samples

SCHEMA = "shardopt.calibration/2"
TIMES = ("median_us", "mean_us", "p10_us", "p25_us", "p75_us", "p90_us")
COLUMNS = (
    *("schema", "machine", "versions", "settings", "date", "load"),
    *("family", "split", "point", "facts"),
    *TIMES,
    *("n", "stable"),
)

PASSES = ("forward", "backward")
PARTS = {
    **dict.fromkeys(("lookup", "lookup_variant", "model_lookup", "interaction", "pooled"), PASSES),
    "lookup_cached": ("prefetch", *PASSES),
    "iteration": ("wall", "cpu", "process"),
}
"""Parts of a point by its family; all others have one without a name."""


@dataclass(frozen=True)
class Origin:
    """Where rows come from; rows of another machine or other versions are refused."""

    machine: str
    versions: str


@dataclass(frozen=True)
class Measured:
    """One row.

    Args:
        part: what of the point was timed: one of `PARTS`, or empty for the only one.
        facts: what the time depends on and only the measurement knows, such as distinct rows.
        load: load average of the machine when the row was written.
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
    stable: bool
    settings: str = ""
    date: str = ""
    load: float = 0.0

    @property
    def key(self) -> str:
        """Names what was timed, whatever the settings."""
        return key_of(self.point, self.part)


def key_of(point: Point, part: str = "") -> str:
    """As `Measured.key`."""
    return f"{point.family} {part} {_compact(point.params)}"


def measured(point: Point, samples: Samples, part: str = "", **facts: Any) -> Measured:
    """A row of some samples; its settings, date and load are added when it is written."""
    ordered = sorted(samples.seconds)
    return Measured(
        point,
        part,
        facts,
        # as written, so that rows are the same before and after the file
        median_us=round(samples.median_s * 1e6, 3),
        mean_us=round(sum(ordered) / len(ordered) * 1e6, 3),
        p10_us=round(_percentile(ordered, 0.1) * 1e6, 3),
        p25_us=round(_percentile(ordered, 0.25) * 1e6, 3),
        p75_us=round(_percentile(ordered, 0.75) * 1e6, 3),
        p90_us=round(_percentile(ordered, 0.9) * 1e6, 3),
        n=len(ordered),
        stable=bool(samples.stable),
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    """By linear interpolation."""
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


@dataclass
class RowsFile:
    """Rows on disk; ``path`` need not exist yet."""

    path: Path
    origin: Origin
    rows: list[Measured] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, origin: Origin) -> RowsFile:
        """The file with the rows it already holds.

        A last line that was cut off while it was written is dropped, to be measured again.

        Raises:
            InputError: a line that is no row of this schema, machine and versions; says which and
                what to do.
        """
        made = cls(path, origin)
        if path.exists():
            made.rows = _read(path, origin)
        return made

    def append(self, row: Measured) -> None:
        """Write one row and flush it to the disk."""
        new = not self.path.exists() or self.path.stat().st_size == 0
        line = _line(_cells(row, self.origin))
        try:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                file.write((_line(COLUMNS) if new else "") + line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"{self.path}: cannot write: {error.strerror or error}") from error
        self.rows.append(row)

    def has(self, point: Point) -> bool:
        """Whether every part of the point is there."""
        known = {row.key for row in self.rows}
        return all(key_of(point, part) in known for part in PARTS.get(point.family, ("",)))


def read_rows(path: Path) -> tuple[Origin, list[Measured]]:
    """Rows of whatever machine the first of them names, for fitting alone."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = next(csv.DictReader(file), None)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if first is None:
        raise InputError(f"{path}: holds no rows")
    origin = Origin(first.get("machine") or "", first.get("versions") or "")
    return origin, _read(path, origin)


def _cells(row: Measured, origin: Origin) -> list[object]:
    head = [SCHEMA, origin.machine, origin.versions, row.settings, row.date, f"{row.load:.2f}"]
    split = "test" if row.point.test else "fit"
    point = {**row.point.params, **({"part": row.part} if row.part else {})}
    times = (getattr(row, column) for column in TIMES)
    return [
        *head,
        *(row.point.family, split, _compact(point), _compact(row.facts)),
        *(f"{time:.3f}" for time in times),
        row.n,
        "yes" if row.stable else "no",
    ]


def _line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _read(path: Path, origin: Origin) -> list[Measured]:
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}; choose another --rows file") from error
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        _write_whole(path, lines)
    if not lines:
        return []
    if next(csv.reader([lines[0]])) != list(COLUMNS):
        raise InputError(
            f"{path}:1: is no header of {SCHEMA}; delete the file or choose another --rows file"
        )
    return [_parse(path, number, line, origin) for number, line in enumerate(lines[1:], start=2)]


def _write_whole(path: Path, lines: Sequence[str]) -> None:
    from shardopt.files import atomic_write_text

    atomic_write_text(path, "".join(lines))


def _parse(path: Path, number: int, line: str, origin: Origin) -> Measured:
    where = f"{path}:{number}"
    try:
        cells = next(csv.reader([line], strict=True))
        row = dict(zip(COLUMNS, cells, strict=True))
        result = _row_of(row)
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, csv.Error) as error:
        raise InputError(
            f"{where}: not a row of measurements ({error}); delete this line to measure its "
            "point again, or choose another --rows file"
        ) from error
    for column, wanted in (("schema", SCHEMA), *vars(origin).items()):
        if row[column] != wanted:
            raise InputError(
                f"{where}: {column} is '{row[column]}', here it is '{wanted}'; rows of different "
                "machines or versions are never mixed: choose another --rows file, or delete this"
            )
    return result


def _no_number(name: str) -> float:
    raise ValueError(f"facts hold {name}")


def _check_tables(tables: list[list[float]]) -> None:
    for table in tables:
        rows, dim, bags, ids, distinct = table
        if min(rows, dim, bags) <= 0 or min(ids, distinct) < 0:
            raise ValueError(f"facts hold a table {table}: rows, dim and bags must be above 0")


def _row_of(row: dict[str, str]) -> Measured:
    params = json.loads(row["point"])
    facts = json.loads(row["facts"], parse_constant=_no_number)
    _check_tables(facts.get("tables", []))
    part = params.pop("part", "")
    if row["split"] not in ("fit", "test") or row["stable"] not in ("yes", "no"):
        raise ValueError(f"split is '{row['split']}', stable is '{row['stable']}'")
    times = {c: float(row[c]) for c in TIMES}
    if not all(math.isfinite(t) and t > 0 for t in times.values()):
        raise ValueError("a time is not above 0")
    return Measured(
        Point(row["family"], params, row["split"] == "test"),
        part,
        facts,
        **times,
        n=int(row["n"]),
        stable=row["stable"] == "yes",
        settings=row["settings"],
        date=row["date"],
        load=float(row["load"]),
    )
