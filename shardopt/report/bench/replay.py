"""A replayed or predicted benchmark."""

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
    headline = (
        f"{result['median_ms']:.3f} ms per iteration on {_ranks(result, result['device'])}; "
        f"{result['ops_replayed']:,} of {result['ops_total']:,} ops replayed, "
        f"{result['coverage']:.1%} {by}"
    )
    missing = sorted(result["not_replayed"].items(), key=lambda item: -item[1])
    listed = _listed(
        "Not replayed (their outputs are made with the shapes of the trace):",
        [f"{count:,} x {why}" for why, count in missing],
    )
    return View(result, [headline, *(f"  {note}" for note in result["notes"]), *listed], [headline])


def prediction_view(result: Mapping[str, Any]) -> View:
    """Predicted time; then the ops without a kernel model, by their share of the recorded time.

    Args:
        result: as `shardopt.replay.predict.predict` makes it.
    """
    headline = (
        f"{result['predicted_ms']:.3f} ms per iteration predicted on {_ranks(result, 'cpu')}; "
        f"{result['recorded_share']:.1%} of the ops' time is as recorded, without a kernel model"
    )
    untimed = f"  {result['untimed']:,} of these ops have no recorded time and count as 0"
    without = (
        ("" if of["share"] is None else f"{of['share']:6.1%}  ") + f"{of['count']:,} x {name}"
        for name, of in result["without_law"].items()
    )
    listed = _listed("Ops without a kernel model, with their share of the recorded time:", without)
    return View(result, [headline, *([untimed] if result["untimed"] else []), *listed], [headline])


def _ranks(result: Mapping[str, Any], device: str) -> str:
    return plural(result["ranks"], f"{device.upper()} rank")


def _listed(title: str, lines: Iterable[str]) -> list[Block]:
    """The first of some lines under a title; nothing where there are none."""
    found = [f"  {line}" for line in lines]
    more = len(found) - LISTED
    rest = [f"  and {more} more; the JSON output lists all"] if more > 0 else []
    return [title, *found[:LISTED], *rest] if found else []
