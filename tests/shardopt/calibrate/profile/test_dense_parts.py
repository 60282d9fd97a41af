"""Constants of single ops come back from rows of a machine that has them."""

from __future__ import annotations

import pytest

from predictor.cost.gemm import small_product_ms
from predictor.hardware.loader import load_hardware
from shardopt.calibrate.design.dense_parts import FUNCTION_OCTAVES, dense_part_points
from shardopt.calibrate.design.points import QUICK, Point
from shardopt.calibrate.profile.dense_parts import (
    FUNCTION_BYTES,
    LAYER_KERNELS,
    LAYER_OPS,
    dense_part_costs,
)
from shardopt.calibrate.rows import PARTS, Measurement, row_of_samples
from shardopt.measure.timing import Samples

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


def rows() -> list[Measurement]:
    steps = [
        Point("optimizer", {"op": op, "layers": n}, n == 8)
        for op in STEP_US
        for n in (2, 4, 8, 16, 32)
    ]
    made = []
    for point in [*dense_part_points(QUICK), *steps]:
        for part in PARTS.get(point.family, ("",)):
            us, facts = time_us(point, part)
            made.append(row_of_samples(point, Samples((us * 1e-6,) * 3), part, **facts))
    return made


def test_constants_come_back_from_their_rows() -> None:
    known = rows()

    def of(family: str, part: str = "", test: bool | None = None) -> list[Measurement]:
        found = [r for r in known if r.point.family == family and r.part == part]
        return [r for r in found if test is None or r.point.test == test]

    found = dense_part_costs(of, PROFILE)
    for costs in found.gemm["batches"].values():
        assert small_product_ms(costs, 32, 32, 32) == pytest.approx(
            small_product_ms(SMALL, 32, 32, 32), rel=0.1
        )
    assert found.gemm["attention_head_us"] == pytest.approx((HEAD_US, 2 * HEAD_US), rel=1e-2)
    assert found.elementwise["math_ns"]["silu"] == pytest.approx(MATH_NS, rel=1e-2)
    assert len(found.elementwise["math_ns"]) == 10
    assert 0 < found.elementwise["turned_ns_per_element"] < 2.0
    assert found.embedding["backward_unpooled_ns_per_row"] == pytest.approx(800.0, rel=0.05)
    assert found.layer_op_us == pytest.approx(LAYER_OP_US, rel=1e-2)
    assert found.step_us == pytest.approx(STEP_US, rel=1e-2)
    assert all(held.mape < 0.05 for held in found.errors.values()), found.errors
    assert max(FUNCTION_OCTAVES) == 20


def test_a_calibration_without_these_rows_changes_nothing() -> None:
    found = dense_part_costs(lambda *_, **__: [], PROFILE)
    assert not found.gemm
    assert not found.elementwise
    assert not found.embedding
    assert not found.step_us
    assert found.layer_op_us is None
