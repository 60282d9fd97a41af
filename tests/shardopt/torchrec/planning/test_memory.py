"""Whose count of memory decides: the user's storage estimator's; ours warns.

The cases are those of TorchRec's own tests (planner/tests/test_planners.py), which
`make test-torchrec-own` runs from its sources.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torchrec")

from torchrec.distributed.planner.storage_reservations import FixedAbsoluteStorageReservation
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType

from shardopt.torchrec import ShardoptPlanner
from tests.shardopt.torchrec.hook_models import SHARDERS, Model, bag, factors, planner, topology

pytestmark = pytest.mark.usefixtures("kept_answers")

MIB = 2**20
NAMES = [f"t{i}" for i in range(4)]


def of_tiny_devices(mib: int, **more: Any) -> ShardoptPlanner:
    """For four tables of 25.6 kB, which need more beside their weights."""
    told = factors(**dict.fromkeys(NAMES, 1.0))
    return planner(topology=topology(2, mib * MIB), constraints=told, **more)


def tiny() -> Model:
    return Model(*(bag(name, 100) for name in NAMES))


def test_a_plan_that_the_storage_estimator_accepts_is_returned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = of_tiny_devices(2)
    with caplog.at_level("WARNING", "shardopt"):
        plan = made.plan(tiny(), SHARDERS)
    assert set(plan.plan["ebc"]) == set(NAMES)
    assert "strict=True" in caplog.text
    assert made.found.result.best.iteration_ms == pytest.approx(made.found.prediction.iteration_ms)
    assert made.found.result.lower_bound_ms <= made.found.prediction.iteration_ms
    assert not any(rank.fits for rank in made.found.prediction.memory)


def test_strict_refuses_what_does_not_fit_by_our_count() -> None:
    with pytest.raises(PlannerError) as caught:
        of_tiny_devices(2, strict=True).plan(tiny(), SHARDERS)
    assert caught.value.error_type is PlannerErrorType.STRICT_CONSTRAINTS


@pytest.mark.parametrize(("mib", "told"), [(3, True), (16, False)])
def test_a_peak_beyond_the_device_is_told(
    mib: int, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    made = of_tiny_devices(mib)
    with caplog.at_level("WARNING", "shardopt"):
        made.plan(tiny(), SHARDERS)
    assert ("by shardopt's count" in caplog.text) == told
    (memory, _) = made.found.prediction.memory
    assert memory.peak.capacity_bytes == mib * MIB, "as installed, before the reservation"


def test_a_fixed_reservation_is_told_where_nothing_fits() -> None:
    made = planner(
        topology=topology(2, 2 * MIB),
        storage_reservation=FixedAbsoluteStorageReservation.from_gb(0.5),
        constraints=factors(huge=1.0),
    )
    with pytest.raises(PlannerError) as caught:
        made.plan(Model(bag("huge", 10**7, 10**7)), SHARDERS)
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE
    assert "0.5 GB per device" in str(caught.value)
