"""Laws found again from steps that follow known ones."""

from __future__ import annotations

import random

import pytest

from predictor.cost.cpu_ops import OpRow
from predictor.cost.reuse import BINS
from predictor.iteration.op_graph import Bucket, SyncLaw

pytest.importorskip("scipy")

from predictor.fit.cpu_ops import Captured, by_group, fit_laws, fit_sync

HOST_MS = 0.002


def mul_ms(elements: int, far: float) -> float:
    return 0.004 + 2e-6 * elements + 3e-8 * far


def step(rng: random.Random) -> Captured:
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
    return Captured(tuple(rows), tuple(ms), sum(ms[:-1]) + HOST_MS * calls)


def test_known_laws_are_found_again() -> None:
    rng = random.Random(1)
    laws = fit_laws([step(rng) for _ in range(12)])
    assert laws.op_ms == pytest.approx(HOST_MS, rel=0.05)
    fresh = step(rng)
    assert laws.rows_ms(fresh.rows) == pytest.approx(fresh.step_ms, rel=0.02)


def test_a_few_disturbed_ops_change_little() -> None:
    rng = random.Random(2)
    steps = [step(rng) for _ in range(12)]
    broken = steps[0]
    steps[0] = Captured(broken.rows, (50 * broken.ms[0], *broken.ms[1:]), broken.step_ms)
    fresh = step(rng)
    assert fit_laws(steps).rows_ms(fresh.rows) == pytest.approx(fresh.step_ms, rel=0.05)


def test_groups_share_the_steps() -> None:
    rng = random.Random(3)
    steps = [step(rng) for _ in range(6)]
    ((group, (share, error)),) = by_group(steps, fit_laws(steps)).items()
    assert group == "mul cc>1"
    assert 0.5 < share < 1
    assert abs(error) < 0.02


def test_the_cost_of_summing_is_found_again() -> None:
    rng = random.Random(4)
    law = SyncLaw(0.3, 0.01, 1e-6)
    steps = [
        [Bucket(rng.randint(1, 50), rng.randint(10**5, 10**8)) for _ in range(rng.randint(1, 4))]
        for _ in range(10)
    ]
    found = fit_sync(steps, [sum(map(law.ms, buckets)) for buckets in steps])
    assert (found.bucket_ms, found.gradient_ms, found.byte_ms) == pytest.approx(
        (law.bucket_ms, law.gradient_ms, law.byte_ms)
    )
