"""What a prediction asked beyond the rows behind its profile, in words and as plain dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console

from predictor.iteration.ranges import OutOfRange
from predictor.units import GIB, MIB
from shardopt.report.console import line

_KIB = 1024


def range_lines(found: Iterable[OutOfRange]) -> list[str]:
    """A short line a group: ``collectives.inter of h100-sxm: messages of 12 GiB, ...``."""
    by_group: dict[str, list[str]] = {}
    for item in found:
        by_group.setdefault(f"{item.group} of {item.profile}", []).append(_words(item))
    return [f"{group}: {'; '.join(texts)}" for group, texts in by_group.items()]


def show_ranges(console: Console, found: Iterable[OutOfRange], name: str = "") -> None:
    """A line for every group that was asked beyond its rows.

    Args:
        name: of the plan, where there are several.
    """
    of = f" ({name})" if name else ""
    for text in range_lines(found):
        line(console, f"Extrapolated{of}: {text}.", style="yellow")


def range_objects(found: Iterable[OutOfRange]) -> list[dict[str, Any]]:
    """``out_of_range`` of ``--json``.

    Keys: ``group``, ``profile`` (what gives the group), ``quantity``, ``asked``, and ``low`` and
    ``high``, which the rows behind the group cover.
    """
    return [
        {
            "group": item.group,
            "profile": item.profile,
            "quantity": item.quantity,
            "asked": item.asked,
            "low": item.low,
            "high": item.high,
        }
        for item in found
    ]


def _words(item: OutOfRange) -> str:
    if item.quantity == "ranks":
        return f"{item.asked:g} ranks, fitted for {item.low:g} to {item.high:g}"
    what, shown = _QUANTITIES.get(item.quantity, (f"{item.quantity} of", _count))
    return f"{what} {shown(item.asked)}, fitted up to {shown(item.high)}"


def covered(quantity: str, low: float, high: float) -> str:
    """What the rows behind a group cover: ``m 3 to 65,536``, ``messages of 8 bytes to 16 GiB``."""
    what, shown = _QUANTITIES.get(quantity, (quantity, _count))
    return f"{what} {shown(low)} to {shown(high)}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _bytes(value: float) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (_KIB, "KiB")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.0f} bytes"


def _flop(value: float) -> str:
    return f"{value / 1e9:,.3g} GFLOP"


_QUANTITIES: dict[str, tuple[str, Callable[[float], str]]] = {
    "size_bytes": ("messages of", _bytes),
    "flop": ("multiplications of", _flop),
    "dim": ("shards of dimension", _count),
    "rows": ("shards with rows:", _count),
    "tables": ("tables in one lookup:", _count),
    "ids": ("ids in one lookup:", _count),
}
"""Quantity of a range -> what comes before the figure, and how the figure is written."""
