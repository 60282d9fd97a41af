"""Constants of small CPU kernels come back from rows of a machine that has them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from predictor.cost.elementwise import columns_ms
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from shardopt.calibrate.fitting import CalibratedProfile, Wiring
from shardopt.calibrate.moves import (
    cpu_points,
    fit_cpu,
    fit_gpu,
    measure_copy_h2d,
    measure_streaming,
    predict_copies,
    predict_moves,
    predict_streaming,
)
from shardopt.calibrate.points import QUICK, Point
from shardopt.calibrate.rows import PASSES, Measurement, Origin
from shardopt.measure.sampling import CLEAN_ENOUGH, CpuTimer
from tests.shardopt.calibrate.synthetic import CALL_US, GB_S, changed, cpu, row

pytest.importorskip("scipy")

POINTS = cpu_points(QUICK)
PIECE_US = 0.3
"""Of each tensor that is joined or taken apart."""


def of(family: str, *ops: str) -> list[Point]:
    return [p for p in POINTS if p.family == family and p.params["op"] in ops]


def pooled_rows(hw: HardwareProfile, nonsense: float = 1.0) -> list[Measurement]:
    """Every op of the family; ``nonsense`` scales passes that copy no columns."""
    rows = []
    columns = {("forward", "cat"), ("backward", "split")}
    for point in of("pooled", "cat", "split"):
        pieces = len(point.params["dims"])
        size = 4 * point.params["batch"] * sum(point.params["dims"])
        # read and written, as the iteration graph counts them
        time = CALL_US + PIECE_US * pieces + 1e3 * float(columns_ms(hw, 2 * size))
        for part in PASSES:
            scale = 1.0 if (part, point.params["op"]) in columns else nonsense
            rows.append(row(point, 1e-3 * time * scale, part, bytes=size, pieces=pieces))
    return rows


def streamed(gb_s: float = GB_S) -> list[Measurement]:
    """Of a machine with that bandwidth, and the call of cold code as its floor."""
    sizes = [2**octave for octave in range(12, 26)]
    return [
        row(
            Point("elementwise", {"op": "add", "bytes": n}),
            1e-3 * CALL_US + n / gb_s / 1e6,
            bytes_moved=n,
        )
        for n in sizes
    ]


def moves(rows: list[Measurement], gb_s: float = GB_S) -> dict[str, float]:
    """What the fit changes in the elementwise group, of what these rows tell."""
    base = load_hardware("cpu-gloo")
    given = [*streamed(gb_s), *rows]
    made = fit_cpu(CalibratedProfile(given, Origin("m", "t"), Wiring(2), base, base)).profile
    assert made.memory.hbm_gb_s == pytest.approx(gb_s, rel=1e-6)
    group = made.elementwise
    assert group.floor_us == pytest.approx(CALL_US, rel=1e-6)
    return {"columns": group.columns, "bucketize_ns_per_id": group.bucketize_ns_per_id}


@pytest.mark.parametrize("columns", [0.2, 0.45, 1.0])
def test_the_share_of_columns_is_that_which_predicts_the_rows(columns: float) -> None:
    hw = cpu(elementwise={"columns": columns})
    assert moves(pooled_rows(hw))["columns"] == pytest.approx(columns, rel=1e-2)


def test_only_copies_of_columns_count_and_none_is_faster_than_streaming() -> None:
    hw = cpu(elementwise={"columns": 0.2})
    assert moves(pooled_rows(hw, 50.0)) == moves(pooled_rows(hw))
    assert moves(pooled_rows(hw), 1e-3)["columns"] == 1.0


def jagged_rows(each_ns: float, gb_s: float) -> list[Measurement]:
    rows = []
    for point in of("jagged", "bucketize"):
        p = point.params
        ids = p["features"] * p["batch"] * p["pooling"]
        # ids are read and written twice
        time = CALL_US + ids * (each_ns * 1e-3 + 4 * 8 / (gb_s * 1e3))
        rows.append(row(point, 1e-3 * time, ids=ids))
    return rows


@pytest.mark.parametrize("each_ns", [3.0, 12.0])
def test_sorting_an_id_costs_beyond_moving_it(each_ns: float) -> None:
    found = moves(jagged_rows(each_ns, GB_S))
    assert found["bucketize_ns_per_id"] == pytest.approx(each_ns, rel=1e-2)
    faster = moves(jagged_rows(0.0, 10 * GB_S))
    assert faster["bucketize_ns_per_id"] == 0.0


def test_copies_and_reads_are_of_their_bytes() -> None:
    pytest.importorskip("torch")
    for measure, family in ((measure_copy_h2d, "copy_h2d"), (measure_streaming, "streaming")):
        (small,), (large,) = (
            measure(Point(family, {"bytes": size}), CpuTimer(2**16), 0.0) for size in (2**12, 2**25)
        )
        assert large.n >= CLEAN_ENOUGH
        assert large.p90_us >= large.median_us > small.median_us >= small.p10_us > 0


GPU = load_hardware("h100-sxm")
NOISE = 0.03


def gpu_rows(
    family: str, law: Callable[..., np.ndarray], hw: HardwareProfile, sizes: np.ndarray
) -> list[Measurement]:
    blank = [row(Point(family, {"bytes": float(size)}), 1e-3) for size in sizes]
    noise = np.exp(np.random.default_rng(0).normal(0.0, NOISE, len(sizes)))
    times = zip(blank, law(hw, blank) * noise, strict=True)
    return [row(of.point, float(ms)) for of, ms in times]


def gpu_fit(rows: list[Measurement]) -> CalibratedProfile:
    return fit_gpu(CalibratedProfile(rows, Origin("m", "t"), Wiring(1), GPU, GPU))


def test_reading_tells_the_bandwidth_and_moving_its_share_floor_and_ramp() -> None:
    true = changed(GPU, "memory", hbm_gb_s=4200.0)
    true = changed(true, "elementwise", efficiency=0.8, floor_us=2.0)
    read = gpu_rows("streaming", predict_streaming, true, np.linspace(2.0**28, 2.0**30, 9))
    moved = gpu_rows("elementwise", predict_moves, true, 2.0 ** np.arange(12, 31, 0.5))
    found = gpu_fit([*read, *moved])
    assert found.profile.memory.hbm_gb_s == pytest.approx(4200.0, rel=0.03)
    assert found.profile.elementwise.efficiency == pytest.approx(0.8, rel=0.05)
    assert found.profile.elementwise.floor_us == pytest.approx(2.0, rel=0.1)
    assert found.groups == {"memory", "elementwise"}


@pytest.mark.parametrize("link_gb_s", [11.0, 380.0])
def test_copies_tell_the_host_link(link_gb_s: float) -> None:
    link = {"host_link_gb_s": link_gb_s, "host_link_latency_us": 4.0, "ddr_gb_s": 500.0}
    true = changed(GPU, "memory", **link)
    rows = gpu_rows("copy_h2d", predict_copies, true, 2.0 ** np.arange(10, 29.0))
    found = gpu_fit(rows).profile
    measured = np.array([of.median_us * 1e-3 for of in rows])
    assert predict_copies(found, rows) == pytest.approx(measured, rel=0.15)
    assert found.memory.host_link_gb_s == pytest.approx(link_gb_s, rel=0.05)
    assert found.memory.ddr_gb_s >= max(GPU.memory.ddr_gb_s, 0.95 * link_gb_s)
