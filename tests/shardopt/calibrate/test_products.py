"""Constants of products come back from rows of a machine that has them."""

from __future__ import annotations

import numpy as np
import pytest

from predictor import units
from predictor.cost.elementwise import columns_ms, memory_ms
from predictor.cost.gemm import batched_ms, gemm_times
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from shardopt.calibrate.points import QUICK, Point
from shardopt.calibrate.products import (
    GemmRows,
    _batched,
    _best_tile,
    _gathers,
    _whole_errors,
    _with_rate,
    cpu_points,
    measure_gemm,
)
from shardopt.calibrate.rows import PASSES, Measurement
from shardopt.measure.sampling import CLEAN_ENOUGH, CpuTimer
from tests.shardopt.calibrate.synthetic import CALL_US, cpu, row

pytest.importorskip("scipy")

BASE = load_hardware("cpu-gloo")
POINTS = cpu_points(QUICK)


def of(family: str, *ops: str) -> list[Point]:
    return [p for p in POINTS if p.family == family and p.params["op"] in ops]


def bmm_rows(hw: HardwareProfile) -> list[Measurement]:
    """A product forward, two backward, of the shapes that the interaction has."""
    rows = []
    for point in of("interaction", "bmm"):
        batch, v, dim = shape(point)
        forward = batched_ms(hw, batch, v, v, dim, "fp32")
        # both operands are the same: two gradients are written, then added
        added = memory_ms(hw, 5 * 4 * batch * v * dim).item()
        backward = 2 * batched_ms(hw, batch, v, dim, v, "fp32") + added
        rows.append(row(point, 1e-3 * CALL_US + forward, "forward"))
        rows.append(row(point, 2e-3 * CALL_US + backward, "backward"))
    return rows


@pytest.mark.parametrize(("each_us", "share"), [(0.2, 0.5), (0.6, 0.15)])
def test_products_of_a_batch_run_one_by_one(each_us: float, share: float) -> None:
    hw = cpu(gemm={"batched_us": each_us, "batched_share": share})
    found = _batched(bmm_rows(hw), hw)
    assert found["batched_us"] == pytest.approx(each_us, rel=1e-2)
    assert found["batched_share"] == pytest.approx(share, rel=1e-2)


def test_a_rate_above_that_of_large_products_is_cut_to_it() -> None:
    quick, slow = (
        {"batched_us": 0.2, "batched_share": 0.5, "tflops": {"fp32": t}} for t in (1, 0.1)
    )
    found = _batched(bmm_rows(cpu(gemm=quick)), cpu(gemm=slow))
    assert found["batched_share"] == 1.0


def dot_rows(bmm: list[Measurement], hw: HardwareProfile, each_ns: float) -> list[Measurement]:
    """The whole layer: its products, the vectors stacked, the pairs picked; both ways."""
    times = {(r.part, *shape(r.point)): r.median_us for r in bmm}
    rows = []
    for point in of("interaction", "dot"):
        batch, v, dim = shape(point)
        for part, ways in zip(PASSES, (1, 2), strict=True):
            picked = ways * batch * v * (v - 1) / 2
            beyond = columns_ms(hw, 2 * 4 * batch * v * dim) + memory_ms(hw, 2 * 4 * picked)
            # stacked, picked, joined to the dense vector
            time = 3 * CALL_US + 1e3 * float(beyond) + 1e-3 * each_ns * picked
            rows.append(row(point, 1e-3 * (times[part, batch, v, dim] + time), part))
    return rows


def shape(point: Point) -> tuple[int, int, int]:
    p = point.params
    return p["batch"], p["vectors"], p["dim"]


@pytest.mark.parametrize("each_ns", [1.5, 8.0])
def test_pairs_are_picked_beyond_products_and_stacking(each_ns: float) -> None:
    hw = cpu(elementwise={"columns": 0.3})
    bmm = bmm_rows(hw)
    found = _gathers([*bmm, *dot_rows(bmm, hw, each_ns)], hw, CALL_US)
    assert found == {"gather_ns_per_element": pytest.approx(each_ns, rel=1e-2)}


def test_a_layer_faster_than_its_parts_picks_for_nothing() -> None:
    hw = cpu(elementwise={"columns": 0.3})
    bmm = bmm_rows(hw)
    slower = [row(r.point, 2e-3 * r.median_us, r.part) for r in bmm]
    dots = dot_rows(bmm, hw, 0.0)
    assert _gathers([*slower, *dots], hw, CALL_US) == {"gather_ns_per_element": 0.0}


def test_what_was_not_measured_is_not_found() -> None:
    hw = cpu()
    bmm = bmm_rows(hw)
    assert _batched([], hw) == {}
    assert _gathers(bmm, hw, CALL_US) == {}, "no whole layers"
    assert _gathers(dot_rows(bmm, hw, 3.0), hw, CALL_US) == {}, "no products to take off"


def test_gemm_is_recovered() -> None:
    rng = np.random.default_rng(0)
    m, n, k = (np.round(2 ** rng.uniform(low, 11, 60)) for low in (8, 4, 4))
    hbm = units.gb_per_s(100.0)
    true = BASE.gemm.model_copy(update={"tflops": {"fp32": 0.12, "bf16": 0.3}, "floor_us": 9.0})
    rows = GemmRows(m, n, k, gemm_times(true, 1, hbm, (m, n, k), "fp32"))
    fitted = _best_tile(rows, hbm, BASE.gemm)
    assert np.abs(_whole_errors(fitted, hbm, rows)).mean() < 0.01
    assert fitted.tflops["fp32"] == pytest.approx(0.12, rel=0.05)
    other = GemmRows(m, n, k, gemm_times(true, 1, hbm, (m, n, k), "bf16"))
    narrow = _with_rate(other, hbm, true, "bf16")
    assert narrow.tflops["bf16"] == pytest.approx(0.3, rel=0.02)


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_every_type_is_multiplied_and_none_changes_the_next(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_float32_matmul_precision()
    params = {"m": 64, "n": 8, "k": 16, "dtype": dtype, "layout": "nt"}
    (found,) = measure_gemm(Point("gemm", params), CpuTimer(2**16), 0.0)
    assert found.n >= CLEAN_ENOUGH
    assert torch.get_float32_matmul_precision() == before == "highest"
