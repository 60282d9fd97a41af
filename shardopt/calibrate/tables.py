"""Rows of a file as the tables that the fits take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from predictor.fit import Rows
from predictor.fit import errors as relative_errors
from predictor.fit_cpu import MemoryRows, Table, TbeRows
from predictor.fit_gemm import GemmRows
from predictor.profile_schema import Curve
from shardopt.calibrate.rows import Measured

Array = NDArray[np.float64]


def span(values: Iterable[float]) -> tuple[float, float]:
    """Lowest and highest."""
    known = [float(v) for v in values]
    return min(known), max(known)


def memory_rows(rows: Sequence[Measured]) -> MemoryRows:
    """Of elementwise points."""
    table = np.array([(r.facts["bytes_moved"], r.median_us * 1e-3) for r in rows]).reshape(-1, 2)
    return MemoryRows(table[:, 0], table[:, 1])


def gemm_rows(rows: Sequence[Measured]) -> GemmRows:
    """Of gemm points of one data type."""
    return GemmRows.of(
        [(p["m"], p["n"], p["k"], r.median_us * 1e-3) for r in rows for p in (r.point.params,)]
    )


def tbe_rows(rows: Sequence[Measured]) -> TbeRows:
    """Of one pass of lookup points."""
    return TbeRows(
        [[Table(*table) for table in r.facts["tables"]] for r in rows],
        np.array([r.median_us * 1e-3 for r in rows]),
    )


def by_tables(rows: Sequence[Measured]) -> list[tuple[str, NDArray[np.bool_]]]:
    """Masks of the rows of one table and of several."""
    many = np.array([len(r.facts["tables"]) > 1 for r in rows], dtype=bool)
    return [("one table", ~many), ("several tables", many)]


def curve_rows(rows: Sequence[Measured]) -> Rows:
    """Of points of one collective; the means, which is what many of them in an iteration add up to.

    Over a link a message takes once or twice its time on the wire: acknowledgements of one
    direction wait behind the data of the other, or do not.
    """
    return Rows.of(
        [(float(p["bytes"]), float(p["ranks"]), r.mean_us) for r in rows for p in (r.point.params,)]
    )


def less(rows: Rows, issued_us: float) -> Rows:
    """Times without the host's issuing, which the iteration graph charges by itself."""
    return Rows(rows.size_bytes, rows.ranks, np.maximum(rows.time_us - issued_us, 1.0))


def curve_errors(curve: Curve, rows: Rows, op: str, issued_us: float) -> Array:
    """Errors of the whole time, issuing included."""
    if not len(rows.size_bytes):
        return np.zeros(0)
    without = relative_errors(curve, less(rows, issued_us), op)
    predicted = (1 + without) * less(rows, issued_us).time_us + issued_us
    return np.asarray(predicted / rows.time_us - 1.0)
