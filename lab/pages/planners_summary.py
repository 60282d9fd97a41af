"""What the rows of a suite of instances say, for the console."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.console import Console

from lab.planners.rows import RATED, SHARDOPT, SearchRow
from lab.planners.summary import (
    MANY_TABLES,
    against,
    others,
    ours_predicted,
    ours_rated,
    rated_ms,
    rows_by_instance,
    shares,
    speed,
    time_ms,
)
from shardopt.formatting import percent
from shardopt.report.console import heading, line, show, table

OBJECTIVES = (
    ("By shardopt's prediction", ours_predicted, time_ms, SHARDOPT),
    ("By TorchRec's rating", ours_rated, rated_ms, RATED),
)


def show_summary(console: Console, rows: Sequence[SearchRow]) -> None:
    """One table per objective, and the time to a plan as good as TorchRec's."""
    fields = rows_by_instance(rows)
    for title, ours, value, needs in OBJECTIVES:
        heading(console, title, "plans that fit by the same planner's memory count")
        made = table("<against", ">better", ">equal", ">worse", ">median gain", ">only ours")
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
            f"With {MANY_TABLES} tables or more, a plan as good as TorchRec's is found after "
            f"{percent(statistics.median(as_good))} of its time in the median, "
            f"{percent(max(as_good))} at worst.",
        )
