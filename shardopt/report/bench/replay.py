"""A replayed benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardopt.formatting import plural
from shardopt.report.blocks import Block, View

LISTED = 20


def replay_view(result: Mapping[str, Any]) -> View:
    """Time and coverage; then what was not replayed, and why.

    Args:
        result: as `shardopt.replay.runtime.run.summary` makes it.
    """
    by = "of their recorded time" if result["coverage_by"] == "time" else "by count"
    rank = f"{result['device'].upper()} rank"
    headline = (
        f"{result['median_ms']:.3f} ms per iteration on {plural(result['ranks'], rank)}; "
        f"{result['ops_replayed']:,} of {result['ops_total']:,} ops replayed, "
        f"{result['coverage']:.1%} {by}"
    )
    missing = sorted(result["not_replayed"].items(), key=lambda item: -item[1])
    listed = _listed(
        "Not replayed (their outputs are made with the shapes of the trace):",
        [f"{count:,} x {why}" for why, count in missing],
    )
    return View(result, [headline, *(f"  {note}" for note in result["notes"]), *listed], [headline])


def _listed(title: str, lines: Iterable[str]) -> list[Block]:
    """The first of some lines under a title; nothing where there are none."""
    items = [f"  {line}" for line in lines]
    more = len(items) - LISTED
    rest = [f"  and {more} more; the JSON output lists all"] if more > 0 else []
    return [title, *items[:LISTED], *rest] if items else []
