"""Rows as a machine whose constants are known would give them."""

from __future__ import annotations

from dataclasses import replace

from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from shardopt.calibrate.fitting import FreeConstant
from shardopt.calibrate.points import Point
from shardopt.calibrate.rows import Measurement, row_of_samples
from shardopt.measure.sampling import Samples

GB_S = 16.0
CALL_US = 7.0
"""What a row of a small kernel has beyond its data."""


def row(point: Point, time_ms: float, part: str = "", **facts: object) -> Measurement:
    """Three samples that agree."""
    made = row_of_samples(point, Samples((time_ms * 1e-3,) * 3), part, **facts)
    return replace(made, date="2026-01-02T03:04:05Z")


def changed(hw: HardwareProfile, group: str, **constants: float) -> HardwareProfile:
    """A profile with other constants in a group."""
    for key, value in constants.items():
        hw = FreeConstant(group, key, 0.0, 0.0).put(hw, value)
    return hw


def cpu(**groups: dict[str, object]) -> HardwareProfile:
    """A CPU without floors; ``groups`` change constants of groups."""
    base = load_hardware("cpu-gloo")
    given = {"gemm": {"floor_us": 0.0}, "elementwise": {"floor_us": 0.0}}
    given["memory"] = {"hbm_gb_s": GB_S}
    changes = {
        name: getattr(base, name).model_copy(update={**of, **groups.get(name, {})})
        for name, of in given.items()
    }
    return base.model_copy(update=changes)
