"""Single ops of one core: each runs."""

from __future__ import annotations

import pytest

from predictor.hardware.loader import load_hardware
from shardopt.calibrate import families, host, lookups, moves, products
from shardopt.calibrate.fitting import CalibratedProfile, Wiring
from shardopt.calibrate.points import TINY, Point
from shardopt.calibrate.rows import PARTS, Origin
from shardopt.measure.sampling import CpuTimer

pytest.importorskip("scipy")

PROFILE = load_hardware("cpu-gloo")
FAMILIES = ("product", "function", "attention", "concatenation", "lookup_unpooled", "layers")


def test_a_calibration_without_rows_changes_nothing_but_steps() -> None:
    made = CalibratedProfile([], Origin("m", "t"), Wiring(2), PROFILE, PROFILE)
    for fit in (moves.fit_cpu, products.fit_cpu, lookups.fit_cpu):
        made = fit(made)
    made, latency_us = host.fit_cpu(made)
    known = PROFILE.overheads.model_copy(update={"step_us": {}})
    assert made.profile == PROFILE.model_copy(update={"overheads": known})
    assert latency_us is host._layer_op_us(made) is None


SIZES = {"elements": 1024, "batch": 4, "rows": 8, "count": 3, "m": 4, "n": 5, "k": 6}


def small(point: Point) -> Point:
    """The same op, of next to no size."""
    deep = {"k": 1} if point.params.get("layout") == "outer" else {}
    shape = {key: SIZES[key] for key in point.params if key in SIZES} | deep
    tables = [{**t, "rows": 50, "pooling": 2.0} for t in point.params.get("tables", [])]
    return Point(point.family, {**point.params, **shape, **({"tables": tables} if tables else {})})


def test_every_op_runs() -> None:
    pytest.importorskip("fbgemm_gpu")
    timer = CpuTimer(2**12)
    unlike = {
        (p.family, *(p.params.get(key) for key in ("op", "layout", "form", "optimizer"))): small(p)
        for p in families.alone(TINY)
        if p.params.get("depth", 0) <= 2
    }
    assert {point.family for point in unlike.values()} >= set(FAMILIES)
    for point in unlike.values():
        rows = families.ALONE[point.family].measure(point, timer, 0.0)
        assert tuple(row.part for row in rows) == PARTS.get(point.family, ("",))
        assert all(row.median_us > 0 for row in rows)
