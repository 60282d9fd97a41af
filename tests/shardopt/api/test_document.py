"""Answers as JSON: which keys are there, and what they are made of."""

from __future__ import annotations

import math

from predictor.model.memory.ranks import RankMemory, RankPeak
from shardopt.api.document import RankUse
from shardopt.api.json_object import JsonObject, drawn, key


class Sample(JsonObject):
    """One key of each kind."""

    time_ms: float = key("From another attribute.", "inner", "ms")
    unknown: float | None = key("Null or not finite.")
    optional: str | None = key("Left out unless it is set.", default=None)
    held: object = drawn(default=None)


def test_a_key_with_a_default_is_there_only_where_it_is_set() -> None:
    values = {"inner": {"ms": 1.5}, "unknown": None, "held": object()}
    assert Sample.model_validate(values).to_dict() == {"time_ms": 1.5, "unknown": None}
    for optional in ("given", None):
        data = Sample.model_validate({**values, "optional": optional}).to_dict()
        assert data["optional"] == optional


def test_a_number_that_is_not_finite_is_null_in_json_alone() -> None:
    sample = Sample(time_ms=1.0, unknown=math.inf)
    assert (sample.unknown, sample.to_dict()["unknown"]) == (math.inf, None)


def test_device_memory_is_that_installed_and_host_memory_what_is_left() -> None:
    for on_device, cap in ((True, 100), (False, 70)):
        peak = RankPeak(5, 20, 30, 100, 25, on_device)
        use = RankUse.model_validate(RankMemory(1, 10, 70, 0, 40, peak))
        assert (use.hbm_cap_bytes, use.capacity_bytes) == (cap, 100)
        assert (use.fits, use.missing_bytes) == (False, 5)
        assert not use.to_dict().keys() & {"capacity_bytes", "on_device", "lacks"}
