"""Fits of one core without rows."""

from __future__ import annotations

import pytest

from predictor.hardware.loader import load_hardware
from shardopt.calibrate import host, lookups, moves, products
from shardopt.calibrate.fitting import CalibratedProfile, Wiring
from shardopt.calibrate.rows import Origin

pytest.importorskip("scipy")

PROFILE = load_hardware("cpu-gloo")


def test_a_calibration_without_rows_changes_nothing_but_steps() -> None:
    calibrated = CalibratedProfile([], Origin("m", "t"), Wiring(2), PROFILE, PROFILE)
    for fit in (moves.fit_cpu, products.fit_cpu, lookups.fit_cpu):
        calibrated = fit(calibrated)
    calibrated, latency_us = host.fit_cpu(calibrated)
    overheads = PROFILE.overheads.model_copy(update={"step_us": {}})
    assert calibrated.profile == PROFILE.model_copy(update={"overheads": overheads})
    assert latency_us is host._layer_op_us(calibrated) is None
