"""Every single op of dense parts runs, forward and backward where it has both."""

from __future__ import annotations

import pytest

from shardopt.calibrate.design.dense_parts import dense_part_points
from shardopt.calibrate.design.points import TINY, Point
from shardopt.calibrate.rows import PARTS
from shardopt.measure.sampling import CpuTimer

pytest.importorskip("scipy")
pytest.importorskip("fbgemm_gpu")

SMALL = {"elements": 1024, "batch": 4, "rows": 8, "count": 3, "m": 4, "n": 5, "k": 6}


def small(point: Point) -> Point:
    """The same op, of next to no size."""
    one = {"count": 1} if point.params.get("count") == 1 else {}
    deep = {"k": 1} if point.params.get("layout") == "outer" else {}
    shape = {key: SMALL[key] for key in point.params if key in SMALL} | one | deep
    tables = [{**t, "rows": 50, "pooling": 2.0} for t in point.params.get("tables", [])]
    return Point(point.family, {**point.params, **shape, **({"tables": tables} if tables else {})})


def test_every_op_runs() -> None:
    from shardopt.calibrate.kernels.registry import ALONE

    timer = CpuTimer(2**12)
    unlike = {
        (p.family, *(p.params.get(key) for key in ("op", "layout", "form"))): small(p)
        for p in dense_part_points(TINY)
        if p.params.get("depth", 0) <= 2
    }
    for point in unlike.values():
        rows = ALONE[point.family](point, timer, 0.0)
        assert tuple(row.part for row in rows) == PARTS.get(point.family, ("",))
        assert all(row.median_us > 0 for row in rows)
