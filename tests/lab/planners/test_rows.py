"""Rows of the search benchmark as a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab.planners.rows import COLUMNS, SEARCH_ROWS, SearchRow
from predictor.errors import InputError
from shardopt.measure.store import read_rows, write_rows

ROW = SearchRow(
    "30x8-fill40-1",
    30,
    8,
    "loose",
    "shardopt on torchrec's cost",
    1.2345678901234567,
    6.636390669072773,
    True,
    14.802,
    False,
    6.4505,
    "work",
    ((0.25, 13.7), (1.5, 6.636390669072773)),
    "a processor, 2 cores, Python 3.11",
    0.5,
    "0123456789ab",
)
EMPTY = replace(
    ROW,
    planner="torchrec",
    iteration_ms=None,
    fits=None,
    rating_ms=None,
    rating_fits=None,
    bound_ms=None,
    ended="no plan",
    incumbents=(),
)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    write_rows(path, SEARCH_ROWS, [ROW, EMPTY])
    assert read_rows(path, SEARCH_ROWS) == [ROW, EMPTY]


def test_only_plans_that_fit_have_a_value() -> None:
    assert (ROW.time_ms, ROW.rated_ms) == (6.636390669072773, None)
    assert (EMPTY.time_ms, EMPTY.rated_ms) == (None, None)


def test_when_it_first_was_as_good() -> None:
    assert ROW.seconds_to(20.0) == 0.25
    assert ROW.seconds_to(13.7) == 0.25
    assert ROW.seconds_to(13.0) == 1.5
    assert ROW.seconds_to(6.0) is None


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("yes", "maybe", "fits is 'maybe'; allowed: yes, no, or nothing"),
        ("0.2500:13.7", "0.2500", "incumbents is"),
        (",30,", ",many,", "tables is 'many', not a number"),
        ("loose,", "", "the header has"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "rows.csv"
    write_rows(path, SEARCH_ROWS, [ROW])
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=r"rows\.csv:3: ") as caught:
        read_rows(path, SEARCH_ROWS)
    assert words in str(caught.value)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(",".join(c for c in COLUMNS if c != "planner") + "\n")
    with pytest.raises(InputError, match="no column 'planner'"):
        read_rows(path, SEARCH_ROWS)
