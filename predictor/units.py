"""The one module that converts units.

Inside: time in ms, sizes in bytes, bandwidth in bytes/ms. In files: "GB/s" (10^9 bytes per
second), "GiB" (2^30 bytes), microseconds, with the unit written out in the key.
"""

from __future__ import annotations

import math

GIB = 1024**3
MIB = 1024**2


def gb_per_s(value: float) -> float:
    return value * 1e6


def gib(value: float) -> int:
    return round(value * GIB)


def mib(value: float) -> int:
    return round(value * MIB)


def us(value: float) -> float:
    return value * 1e-3


def tflops(value: float) -> float:
    return value * 1e9


def format_bytes(value: float, *, round_up: bool = False) -> str:
    """Format a size with a binary unit, e.g. ``61.3 GiB``.

    Args:
        round_up: to the last shown digit, so that the size of a shortage is enough.
    """
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    digits = 0 if unit == "B" else 1
    value = math.ceil(value * 10**digits) / 10**digits if round_up else value
    return f"{value:.{digits}f} {unit}"
