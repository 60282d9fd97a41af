"""A replayed or predicted benchmark on the console."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardopt.formatting import plural

if TYPE_CHECKING:
    from rich.console import Console

LISTED = 20


def show_replay(console: Console, result: Mapping[str, Any], *, brief: bool) -> None:
    """Time and coverage; then what was not replayed, and why.

    Args:
        result: as `shardopt.replay.runtime.run.summary` makes it.
        brief: the headline alone.
    """
    by = "of their recorded time" if result["coverage_by"] == "time" else "by count"
    console.print(
        f"{result['median_ms']:.3f} ms per iteration on {_ranks(result, result['device'])}; "
        f"{result['ops_replayed']:,} of {result['ops_total']:,} ops replayed, "
        f"{result['coverage']:.1%} {by}",
        highlight=False,
    )
    if brief:
        return
    for note in result["notes"]:
        console.print(f"  {note}", highlight=False, markup=False)
    missing = sorted(result["not_replayed"].items(), key=lambda item: -item[1])
    if missing:
        console.print("Not replayed (their outputs are made with the shapes of the trace):")
    for why, count in missing[:LISTED]:
        console.print(f"  {count:,} x {why}", highlight=False, markup=False)
    if len(missing) > LISTED:
        console.print(f"  and {len(missing) - LISTED} more kinds; the JSON output lists all")


def _ranks(result: Mapping[str, Any], device: str) -> str:
    return plural(result["ranks"], f"{device.upper()} rank")


def show_prediction(console: Console, result: Mapping[str, Any], *, brief: bool) -> None:
    """Predicted time; then the ops without a kernel model, by their share of the recorded time.

    Args:
        result: as `shardopt.replay.predict.predict` makes it.
        brief: the headline alone.
    """
    console.print(
        f"{result['predicted_ms']:.3f} ms per iteration predicted on {_ranks(result, 'cpu')}; "
        f"{result['recorded_share']:.1%} of the ops' time is as recorded, without a kernel model",
        highlight=False,
    )
    if brief:
        return
    if result["untimed"]:
        console.print(f"  {result['untimed']:,} of these ops have no recorded time and count as 0")
    if result["without_law"]:
        console.print("Ops without a kernel model, with their share of the recorded time:")
    listed = list(result["without_law"].items())
    for name, of in listed[:LISTED]:
        share = "" if of["share"] is None else f"{of['share']:6.1%}  "
        text = f"  {share}{of['count']:,} x {name}"
        console.print(text, highlight=False, markup=False)
    if len(listed) > LISTED:
        console.print(f"  and {len(listed) - LISTED} more; the JSON output lists all")
