"""Profiles with the times of one group scaled by a factor.

The stated error of a group is one of its times (`Group.rel_error`), so all of its constants move
together: times are multiplied, rates and the shares of a bandwidth that kernels reach are divided.
Counts, sizes and ratios stay, and so does what the group's kernels take from other groups, such as
the bandwidth of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predictor.hardware.schema import HardwareProfile, StrictModel

_RATES = ("_gb_s", "_gbit_s", "tflops", "efficiency", "batched_share")


def scale_group(hardware: HardwareProfile, group: str, factor: float) -> HardwareProfile:
    """Return the profile with all times of a group multiplied.

    Args:
        group: a field of the profile that holds constants: ``memory``, ``gemm``, ``embedding``,
            ``elementwise``, ``overheads``, or ``collectives`` with both kinds of links.
        factor: > 0, on times. Shares of a bandwidth may then pass 1.
    """
    return hardware.model_copy(update={group: _scaled(getattr(hardware, group), factor)})


def is_rate(key: str) -> bool:
    """Return true if a constant is a rate, or a share of a bandwidth."""
    return key.endswith(_RATES)


def is_time(key: str) -> bool:
    """Return true if a constant is a time, also per byte, row or element."""
    return key.endswith("_us") or "_ns_per_" in key or key == "us_per_mib"


def _scaled(model: StrictModel, factor: float) -> StrictModel:
    return model.model_copy(update={key: _value(key, value, factor) for key, value in model})


def _value(key: str, value: Any, factor: float) -> Any:
    if isinstance(value, StrictModel):
        return _scaled(value, factor)
    if isinstance(value, Mapping):
        return {name: _value(key, item, factor) for name, item in value.items()}
    if value is None or not (is_rate(key) or is_time(key)):
        return value
    by = 1 / factor if is_rate(key) else factor
    return tuple(part * by for part in value) if isinstance(value, tuple) else value * by
