"""Results of the search benchmark, in numbers and as a page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.pages.planners_page import (
    against,
    benchmarks_text,
    gaps,
    rated_ms,
    rows_by_instance,
    speed,
    time_ms,
    without_plan,
)
from lab.planners.rows import (
    NO_PLAN,
    RATED,
    RATED_SAME,
    SHARDOPT,
    TORCHREC,
    SearchRow,
)

ROOT = Path(__file__).parents[3]
ROWS, PAGE = ROOT / "configs/bench/search/rows.csv", ROOT / "docs/benchmarks.md"


def row(
    instance: str, planner: str, ms: float | None, rating: float | None, **more: Any
) -> SearchRow:
    search_row = SearchRow(
        instance=instance,
        tables=100,
        gpus=8,
        memory="loose",
        planner=planner,
        seconds=10.0,
        iteration_ms=ms,
        fits=None if ms is None else True,
        rating_ms=rating,
        rating_fits=None if rating is None else True,
        ended="done",
        machine="a machine",
        load=0.1,
    )
    return replace(search_row, **more)


OURS = {"bound_ms": 7.5, "incumbents": ((0.5, 10.0), (2.0, 8.0))}
BETTER = [
    row("x", TORCHREC, 10.0, 20.0),
    row("x", SHARDOPT, 8.0, 25.0, **OURS),
    row("x", RATED, 11.0, 15.0, bound_ms=14.0),
    row("x", RATED_SAME, 12.0, 16.0),
]
WORSE = [
    row("y", TORCHREC, 10.0, 10.0),
    row("y", SHARDOPT, 10.5, 9.0, incumbents=((1.0, 10.5),)),
    row("y", RATED, 11.0, 11.0),
]
ONLY_OURS = [
    row("z", TORCHREC, None, None, ended=NO_PLAN),
    row("z", SHARDOPT, 5.0, 6.0),
    row("z", RATED, 5.0, 6.0),
]
NOT_RUN = [row("w", TORCHREC, 1.0, 1.0)]
MISFIT = [
    row("v", TORCHREC, 1.0, 1.0, fits=False),
    row("v", SHARDOPT, 2.0, 2.0),
]
FIELDS = rows_by_instance([*BETTER, *WORSE, *ONLY_OURS, *NOT_RUN, *MISFIT])


def test_against_one_planner_by_the_prediction() -> None:
    comparison = against(FIELDS, TORCHREC, (SHARDOPT,), time_ms)
    # w has no row of ours; v and z have no plan of theirs that fits
    assert (comparison.instances, comparison.worse, comparison.only_ours) == (4, ["y"], 2)
    assert comparison.gains == pytest.approx([0.2, -0.05])
    assert comparison.median_gain == pytest.approx(0.075)


def test_against_one_planner_by_the_rating() -> None:
    comparison = against(FIELDS, TORCHREC, (RATED, RATED_SAME), rated_ms)
    assert (comparison.instances, comparison.worse) == (3, ["y"])
    assert max(comparison.gains) == pytest.approx(0.25)


def test_no_plan_of_ours_where_they_have_one_is_worse() -> None:
    fields = rows_by_instance([row("x", TORCHREC, 1.0, 1.0), row("x", SHARDOPT, None, None)])
    assert against(fields, TORCHREC, (SHARDOPT,), time_ms).worse == ["x"]


def test_rounding_is_no_difference() -> None:
    fields = rows_by_instance([row("x", TORCHREC, 1.0, 1.0), row("x", SHARDOPT, 1.0 + 1e-12, 1.0)])
    comparison = against(fields, TORCHREC, (SHARDOPT,), time_ms)
    assert (comparison.gains, comparison.worse) == ([0.0], [])


def test_time_to_a_plan_as_good_as_torchrecs() -> None:
    by_instance = {speeds.instance: speeds for speeds in speed(FIELDS)}
    assert (by_instance["x"].as_good_s, by_instance["x"].better_s, by_instance["x"].theirs_s) == (
        0.5,
        2.0,
        10.0,
    )
    assert (by_instance["y"].as_good_s, by_instance["y"].better_s) == (None, None)
    assert "z" not in by_instance
    assert speed(FIELDS, least_tables=101) == []


def test_plans_that_fit_and_gaps() -> None:
    assert without_plan(FIELDS, TORCHREC, time_ms) == ["z", "v"]
    assert without_plan(FIELDS, TORCHREC, rated_ms) == ["z"]
    assert gaps(FIELDS, SHARDOPT, time_ms) == [pytest.approx(8.0 / 7.5 - 1)]


def test_the_page_names_what_is_worse() -> None:
    text = benchmarks_text([*BETTER, *WORSE, *ONLY_OURS])
    assert "## In short: 3 instances" in text
    assert "Worse than some planner on 1: y." in text
    assert "Never worse than any of them." not in text
    assert "| z | " in text
    assert "Never worse than any of them." in benchmarks_text(BETTER)
    assert "load average 0.1 to 0.1\n" in benchmarks_text(BETTER)
    assert benchmarks_text(BETTER).endswith("\n- not kept: 4 rows\n")


def test_the_page_warns_where_rows_are_not_of_one_state_of_the_code() -> None:
    mixed = [
        replace(row, sources="a" if row.planner.startswith(TORCHREC) else "b") for row in BETTER
    ]
    assert "**Warning:**" not in benchmarks_text(mixed)
    assert "do not say which state" in benchmarks_text(BETTER)
    assert "different states" in benchmarks_text([*mixed[:-1], replace(mixed[-1], sources="c")])


def test_the_page_of_no_rows_says_so() -> None:
    assert "## In short: 0 instances" in benchmarks_text([])
