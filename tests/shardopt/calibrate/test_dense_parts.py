"""Single ops of dense parts: each runs, and its constants come back from rows that have them."""

from __future__ import annotations

import pytest

from predictor.cost.gemm import small_product_ms
from predictor.hardware.loader import load_hardware
from shardopt.calibrate import families, host, lookups, moves, products
from shardopt.calibrate.fitting import CalibratedProfile, Wiring
from shardopt.calibrate.host import LAYER_KERNELS, LAYER_OPS, _layer_op_us
from shardopt.calibrate.moves import FUNCTION_BYTES
from shardopt.calibrate.points import QUICK, TINY, Point
from shardopt.calibrate.rows import PARTS, Measurement, Origin
from shardopt.measure.sampling import CpuTimer
from tests.shardopt.calibrate.synthetic import row

pytest.importorskip("scipy")

PROFILE = load_hardware("cpu-gloo")
CALL_US, HEAD_US, LAYER_OP_US = 60.0, 4.0, 3.0
SMALL = (0.8, 0.5, 1.3, 0.02)
MATH_NS = 1.5
STEP_US = {"sgd": 5.0, "adam": 25.0}


def time_us(point: Point, part: str) -> tuple[float, dict[str, object]]:
    p = point.params
    back = part == "backward"
    if point.family == "product":
        each = small_product_ms(SMALL, p["m"], p["n"], p["k"])
        return CALL_US + 1e3 * p["count"] * each, {}
    if point.family == "function":
        moved = FUNCTION_BYTES[back] / PROFILE.streaming
        return CALL_US + p["elements"] * 1e3 * (moved + MATH_NS * 1e-6), {}
    if point.family == "attention":
        heads = p["batch"] * p["heads"]
        return CALL_US + heads * HEAD_US * (1 + back), {}
    if point.family == "layers":
        layer = LAYER_KERNELS * PROFILE.elementwise.floor_us + LAYER_OPS * LAYER_OP_US
        return CALL_US + layer * p["depth"], {}
    if point.family == "lookup_unpooled":
        ids = p["batch"] * sum(t["pooling"] for t in p["tables"])
        tables = [[t["rows"], t["dim"], p["batch"], ids, ids / 2] for t in p["tables"][:1]]
        return CALL_US + ids / 2 * 0.8, {"tables": tables}
    if point.family == "optimizer":
        return CALL_US + STEP_US[p["op"]] * p["layers"], {"tensors": p["layers"], "elements": 64}
    return CALL_US + p["pieces"] * p["rows"] * p["width"] * 2e-3, {}


FAMILIES = ("product", "function", "attention", "concatenation", "lookup_unpooled", "layers")


def rows() -> list[Measurement]:
    steps = [
        Point("optimizer", {"op": op, "layers": n}, n == 8)
        for op in STEP_US
        for n in (1, 2, 3, 4, 6, 8, 16, 32)
    ]
    points = [point for point in families.alone(QUICK) if point.family in FAMILIES]
    made = []
    for point in [*points, *steps]:
        for part in PARTS.get(point.family, ("",)):
            us, facts = time_us(point, part)
            made.append(row(point, 1e-3 * us, part, **facts))
    return made


def fitted(given: list[Measurement]) -> CalibratedProfile:
    made = CalibratedProfile(given, Origin("m", "t"), Wiring(2), PROFILE, PROFILE)
    for fit in (moves.fit_cpu, products.fit_cpu, lookups.fit_cpu):
        made = fit(made)
    return host.fit_cpu(made)[0]


def test_constants_come_back_from_their_rows() -> None:
    made = fitted(rows())
    found = made.profile
    for costs in found.gemm.batches.values():
        assert small_product_ms(costs, 32, 32, 32) == pytest.approx(
            small_product_ms(SMALL, 32, 32, 32), rel=0.1
        )
    assert found.gemm.attention_head_us == pytest.approx((HEAD_US, 2 * HEAD_US), rel=1e-2)
    assert found.elementwise.math_ns["silu"] == pytest.approx(MATH_NS, rel=1e-2)
    assert len(found.elementwise.math_ns) == 10
    assert 0 < found.elementwise.turned_ns_per_element < 2.0
    unpooled = found.embedding.model_dump()["backward_unpooled_ns_per_row"]
    assert unpooled == pytest.approx(800.0, rel=0.05)
    assert _layer_op_us(made) == pytest.approx(LAYER_OP_US, rel=1e-2)
    assert found.overheads.step_us == pytest.approx(STEP_US, rel=1e-2)
    assert all(held.mape < 0.05 for held in made.errors.values()), made.errors


def test_a_calibration_without_these_rows_changes_nothing_but_steps() -> None:
    made = fitted([])
    known = PROFILE.overheads.model_copy(update={"step_us": {}})
    assert made.profile == PROFILE.model_copy(update={"overheads": known})
    assert _layer_op_us(made) is None


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
        rows = families.ALONE[point.family](point, timer, 0.0)
        assert tuple(row.part for row in rows) == PARTS.get(point.family, ("",))
        assert all(row.median_us > 0 for row in rows)
