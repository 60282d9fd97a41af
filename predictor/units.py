"""The one module that converts units.

Inside: time in ms, sizes in bytes, bandwidth in bytes/ms. In files: "GB/s" (10^9 bytes per
second), "GiB" (2^30 bytes), microseconds, with the unit written out in the key.
"""

from __future__ import annotations

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


def format_bytes(value: float) -> str:
    """Human-readable size with a binary unit, e.g. ``61.3 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
