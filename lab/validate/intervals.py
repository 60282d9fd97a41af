"""The interval that a profile gives for the time of a single kernel or collective."""

from __future__ import annotations

import math
from collections.abc import Iterable

from predictor.cost.errors import Z_90, error_size
from predictor.hardware.schema import HardwareProfile

SMALL_BYTES = 2**20
"""Below it latency bounds a message."""


def kernel_interval(
    hardware: HardwareProfile,
    groups: Iterable[str],
    predicted_ms: float,
    size_bytes: float = math.inf,
) -> tuple[float, float]:
    """90 % interval ``(low, high)`` in ms of the time of one kernel or collective.

    Args:
        groups: of the profile that its cost comes from, such as ``collectives.inter``.
        predicted_ms: > 0.
        size_bytes: of a message; links may be less sure of small ones.
    """
    names = tuple(groups)
    size = error_size(hardware, names)
    shared = [size.shared]
    if size_bytes < SMALL_BYTES:
        links = (hardware.groups[name] for name in names)
        shared += [getattr(link, "small_rel_error", None) or 0.0 for link in links]
    factor = math.exp(Z_90 * math.hypot(max(shared), size.own))
    return predicted_ms / factor, predicted_ms * factor
