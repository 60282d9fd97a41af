"""The rows file: one CSV line a measured point, written as soon as it is measured.

Lines carry the machine, the versions and the date, so that nothing measured elsewhere is mixed in.
An interrupted run continues from its file.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predictor.errors import InputError
from shardopt.calibrate.design.points import Point
from shardopt.files import decode, read_bytes
from shardopt.measure import store
from shardopt.measure.store import Fields, RowKind, RowsFile
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
class Measurement:
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
    """As `Measurement.key`."""
    return f"{point.family} {part} {_compact(point.params)}"


def row_of_samples(point: Point, samples: Samples, part: str = "", **facts: Any) -> Measurement:
    """A row of some samples; its settings, date and load are added when it is written."""
    ordered = sorted(samples.seconds)
    return Measurement(
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


class CalibrationRows(RowsFile[Measurement]):
    """The rows of a calibration on disk; the file need not exist yet.

    Raises:
        InputError: a line that is no row of this schema, machine and versions; says which and what
            to do.
    """

    def __init__(self, path: Path, origin: Origin) -> None:
        super().__init__(path, _kind(origin))
        self.origin = origin

    def has(self, point: Point) -> bool:
        """Whether every part of the point is there."""
        known = {row.key for row in self.rows}
        return all(key_of(point, part) in known for part in PARTS.get(point.family, ("",)))


def read_rows(path: Path) -> tuple[Origin, list[Measurement]]:
    """Rows of whatever machine the first of them names, for fitting alone.

    Raises:
        InputError: the file cannot be read, holds no rows, or a line is no row of that machine.
    """
    origin = _first_origin(path)
    rows = store.read_rows(path, _kind(origin))
    if not rows:
        raise InputError(f"{path}: holds no rows")
    return origin, rows


def _first_origin(path: Path) -> Origin:
    text = decode(read_bytes(path, "file of calibration rows"), path)
    first: dict[str, str] = next(csv.DictReader(io.StringIO(text)), {})
    return Origin(first.get("machine") or "", first.get("versions") or "")


def _kind(origin: Origin) -> RowKind[Measurement]:
    """Rows of one machine and its versions."""

    def parse(fields: Fields) -> Measurement:
        for column, wanted in vars(origin).items():
            if fields[column] != wanted:
                raise ValueError(
                    f"{column} is '{fields[column]}', here it is '{wanted}'; rows of different "
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
        **{column: f"{getattr(row, column):.3f}" for column in TIMES},
        "n": row.n,
        "stable": "yes" if row.stable else "no",
    }


def _compact(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _no_number(name: str) -> float:
    raise ValueError(f"facts hold {name}")


def _check_tables(tables: list[list[float]]) -> None:
    for table in tables:
        rows, dim, bags, ids, distinct = table
        if min(rows, dim, bags) <= 0 or min(ids, distinct) < 0:
            raise ValueError(f"facts hold a table {table}: rows, dim and bags must be above 0")


def _row_of(row: Fields) -> Measurement:
    params = json.loads(row["point"])
    facts = json.loads(row["facts"], parse_constant=_no_number)
    _check_tables(facts.get("tables", []))
    part = params.pop("part", "")
    if row["split"] not in ("fit", "test") or row["stable"] not in ("yes", "no"):
        raise ValueError(f"split is '{row['split']}', stable is '{row['stable']}'")
    times = {c: float(row[c]) for c in TIMES}
    if not all(math.isfinite(t) and t > 0 for t in times.values()):
        raise ValueError("a time is not above 0")
    return Measurement(
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
