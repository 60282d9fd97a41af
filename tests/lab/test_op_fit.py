"""Kernel models found again from steps that follow known ones."""

from __future__ import annotations

import random

import pytest

from lab.transformers import Bucket, GradientSync, fit_sync
from predictor.cost.ops.cpu_ops import BINS, OpRow

pytest.importorskip("scipy")

from lab.op_fit import CapturedStep, errors_by_group, fit_models

HOST_MS = 0.002


def mul_ms(elements: int, far: float) -> float:
    return 0.004 + 2e-6 * elements + 3e-8 * far


def step(rng: random.Random) -> CapturedStep:
    rows, ms = [], []
    for _ in range(6):
        elements = rng.randint(10_000, 1_000_000)
        far = rng.choice((0.0, 8.0 * elements))
        reuse = (12.0 * elements - far, *[0.0] * (BINS - 2), far)
        rows.append(OpRow("mul cc>1", (1, elements, 2 * elements, 0), reuse))
        ms.append(mul_ms(elements, far))
    rows.append(OpRow("view", (), (0.0,) * BINS, 50))
    ms.append(0.1)
    calls = sum(row.count for row in rows)
    return CapturedStep(tuple(rows), tuple(ms), sum(ms[:-1]) + HOST_MS * calls)


def test_known_models_are_found_again() -> None:
    rng = random.Random(1)
    models = fit_models([step(rng) for _ in range(12)])
    assert models.op_ms == pytest.approx(HOST_MS, rel=0.05)
    fresh = step(rng)
    assert models.rows_ms(fresh.rows) == pytest.approx(fresh.step_ms, rel=0.02)


def test_a_few_disturbed_ops_change_little() -> None:
    rng = random.Random(2)
    steps = [step(rng) for _ in range(12)]
    broken = steps[0]
    steps[0] = CapturedStep(broken.rows, (50 * broken.ms[0], *broken.ms[1:]), broken.step_ms)
    fresh = step(rng)
    assert fit_models(steps).rows_ms(fresh.rows) == pytest.approx(fresh.step_ms, rel=0.05)


def test_groups_share_the_steps() -> None:
    rng = random.Random(3)
    steps = [step(rng) for _ in range(6)]
    ((group, (share, error)),) = errors_by_group(steps, fit_models(steps)).items()
    assert group == "mul cc>1"
    assert 0.5 < share < 1
    assert abs(error) < 0.02


def test_the_cost_of_summing_is_found_again() -> None:
    rng = random.Random(4)
    truth = GradientSync(0.3, 0.01, 1e-6)
    steps = [
        [Bucket(rng.randint(1, 50), rng.randint(10**5, 10**8)) for _ in range(rng.randint(1, 4))]
        for _ in range(10)
    ]
    extra_ms = [
        sum(truth.ms(bucket.gradients, bucket.bytes) for bucket in buckets) for buckets in steps
    ]
    fitted = fit_sync(steps, extra_ms)
    assert (fitted.bucket_ms, fitted.gradient_ms, fitted.byte_ms) == pytest.approx(
        (truth.bucket_ms, truth.gradient_ms, truth.byte_ms)
    )
