"""The rows of the search benchmark on the console: ours against each other planner."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Console

from shardopt.bench.planners.rows import RATED, SHARDOPT, SearchRow
from shardopt.bench.planners.summary import (
    MANY_TABLES,
    against,
    fields_of,
    others,
    ours_predicted,
    ours_rated,
    rated_ms,
    shares,
    speed,
    time_ms,
)
from shardopt.report.console import heading, line, show, table
from shardopt.report.words import percent

JUDGES = (
    ("By shardopt's prediction", ours_predicted, time_ms, SHARDOPT),
    ("By TorchRec's rating", ours_rated, rated_ms, RATED),
)


def show_summary(console: Console, rows: Sequence[SearchRow]) -> None:
    """A table a judge, and the time to a plan as good as TorchRec's."""
    fields = fields_of(rows)
    for title, ours, value, needs in JUDGES:
        heading(console, title, "plans that fit by the judge's count")
        made = table(
            [
                ("against", "left"),
                ("better", "right"),
                ("equal", "right"),
                ("worse", "right"),
                ("median gain", "right"),
                ("only ours", "right"),
            ]
        )
        for name in others(rows):
            one = against(fields, name, ours, value, needs)
            if one.instances:
                gain = "-" if one.median_gain is None else percent(one.median_gain)
                counts = (one.better, one.equal, len(one.worse))
                made.add_row(name, *map(str, counts), gain, str(one.only_ours))
        show(console, made)
    found = speed(fields)
    if as_good := shares(found):
        line(
            console,
            f"From {MANY_TABLES} tables: a plan as good as TorchRec's after "
            f"{percent(statistics.median(as_good))} of its time in the median, "
            f"{percent(max(as_good))} at worst.",
        )
