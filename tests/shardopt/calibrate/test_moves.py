"""Bounds of what small CPU kernels tell; constants of a GPU's come back from their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from shardopt.calibrate.fitting import CalibratedProfile, Wiring
from shardopt.calibrate.moves import (
    FAMILIES,
    fit_cpu,
    fit_gpu,
    predict_copies,
    predict_moves,
    predict_streaming,
)
from shardopt.calibrate.points import QUICK, Point
from shardopt.calibrate.rows import Measurement, Origin
from tests.shardopt.calibrate.synthetic import changed, cpu_rows, row

pytest.importorskip("scipy")

BASE = load_hardware("cpu-gloo")


def moves(hw: HardwareProfile, **scales: float) -> dict[str, float]:
    """Fit the rows of a machine, with those of some families scaled.

    Args:
        scales: of a family's rows; of ``pooled`` those that copy no columns.
    """
    columns = {("forward", "cat"), ("backward", "split")}
    rows = []
    for r in cpu_rows(hw, [p for family in FAMILIES for p in family.cpu(QUICK)]):
        family, params = r.point.family, r.point.params
        copies = family == "pooled" and (r.part, params["op"]) in columns
        scale = 1.0 if copies else scales.get(family, 1.0)
        rows.append(replace(r, median_us=scale * r.median_us))
    profile = fit_cpu(CalibratedProfile(rows, Origin("m", "t"), Wiring(2), BASE, BASE)).profile
    return {name: getattr(profile.elementwise, name) for name in ("columns", "bucketize_ns_per_id")}


def test_only_copies_of_columns_count_and_nothing_is_faster_than_streaming() -> None:
    assert moves(BASE, pooled=50.0) == moves(BASE)
    bound = moves(BASE, elementwise=1e4, jagged=0.01)
    assert bound == {"columns": 1.0, "bucketize_ns_per_id": 0.0}


GPU = load_hardware("h100-sxm")
NOISE = 0.03


def gpu_rows(
    family: str, law: Callable[..., np.ndarray], hw: HardwareProfile, sizes: np.ndarray
) -> list[Measurement]:
    blank = [row(Point(family, {"bytes": float(size)}), 1e-3) for size in sizes]
    noise = np.exp(np.random.default_rng(0).normal(0.0, NOISE, len(sizes)))
    times = zip(blank, law(hw, blank) * noise, strict=True)
    return [row(r.point, float(ms)) for r, ms in times]


def gpu_fit(rows: list[Measurement]) -> CalibratedProfile:
    return fit_gpu(CalibratedProfile(rows, Origin("m", "t"), Wiring(1), GPU, GPU))


def test_reading_tells_the_bandwidth_and_moving_its_share_floor_and_ramp() -> None:
    true = changed(GPU, "memory", hbm_gb_s=4200.0)
    true = changed(true, "elementwise", efficiency=0.8, floor_us=2.0)
    read = gpu_rows("streaming", predict_streaming, true, np.linspace(2.0**28, 2.0**30, 9))
    moved = gpu_rows("elementwise", predict_moves, true, 2.0 ** np.arange(12, 31, 0.5))
    calibrated = gpu_fit([*read, *moved])
    assert calibrated.profile.memory.hbm_gb_s == pytest.approx(4200.0, rel=0.03)
    assert calibrated.profile.elementwise.efficiency == pytest.approx(0.8, rel=0.05)
    assert calibrated.profile.elementwise.floor_us == pytest.approx(2.0, rel=0.1)
    assert calibrated.groups == {"memory", "elementwise"}


def test_a_fit_that_points_held_out_speak_against_is_refused() -> None:
    """Fitted points are twice as slow as the base says, those held out are not."""
    rows = gpu_rows("elementwise", predict_moves, GPU, 2.0 ** np.arange(12, 31, 0.5))
    rows = [replace(r, point=replace(r.point, test=i % 3 == 2)) for i, r in enumerate(rows)]
    slow = [r if r.point.test else replace(r, median_us=2 * r.median_us) for r in rows]
    calibrated = gpu_fit(slow)
    assert calibrated.profile.elementwise == GPU.elementwise
    assert calibrated.groups == set()
    assert calibrated.errors["elementwise"].mape == calibrated.shipped["elementwise"].mape < 0.05
    assert any("elementwise" in note for note in calibrated.notes)
    assert gpu_fit(rows).errors["elementwise"].mape <= calibrated.errors["elementwise"].mape


@pytest.mark.parametrize("link_gb_s", [11.0, 380.0])
def test_copies_tell_the_host_link(link_gb_s: float) -> None:
    link = {"host_link_gb_s": link_gb_s, "host_link_latency_us": 4.0, "ddr_gb_s": 500.0}
    true = changed(GPU, "memory", **link)
    rows = gpu_rows("copy_h2d", predict_copies, true, 2.0 ** np.arange(10, 29.0))
    profile = gpu_fit(rows).profile
    measured = np.array([copied.median_us * 1e-3 for copied in rows])
    assert predict_copies(profile, rows) == pytest.approx(measured, rel=0.15)
    assert profile.memory.host_link_gb_s == pytest.approx(link_gb_s, rel=0.05)
    assert profile.memory.ddr_gb_s >= max(GPU.memory.ddr_gb_s, 0.95 * link_gb_s)
