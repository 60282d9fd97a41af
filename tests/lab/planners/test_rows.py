"""Rows of the search benchmark as a file."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import predictor
import search
from lab.planners.rows import (
    RANDOM,
    RATED,
    SEARCH_ROWS,
    SHARDOPT,
    TORCHREC,
    SearchRow,
    sources_of,
)
from predictor.errors import InputError
from shardopt.measure.store import read_rows, write_rows

ROW = SearchRow(
    instance="30x8-fill40-1",
    tables=30,
    gpus=8,
    memory="loose",
    planner="shardopt on torchrec's cost",
    seconds=1.2345678901234567,
    iteration_ms=6.636390669072773,
    fits=True,
    rating_ms=14.802,
    rating_fits=False,
    bound_ms=6.4505,
    ended="work",
    incumbents=((0.25, 13.7), (1.5, 6.636390669072773)),
    found_by="packing + local search",
    stages=(("lower bound", 0.75), ("rounding", 0.484)),
    machine="a processor, 2 cores, Python 3.11",
    load=0.5,
    sources="0123456789ab",
)
EMPTY = replace(
    ROW,
    planner="torchrec",
    **dict.fromkeys(("iteration_ms", "fits", "rating_ms", "rating_fits", "bound_ms")),
    ended="no plan",
    incumbents=(),
    found_by="",
    stages=(),
)


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    write_rows(path, SEARCH_ROWS, [ROW, EMPTY])
    assert read_rows(path, SEARCH_ROWS) == [ROW, EMPTY]
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
        ("yes", "maybe", "'maybe'"),
        ("0.2500:13.7", "0.2500", "incumbents is"),
        (",30,", ",many,", "'many'"),
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


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the packages that may be changed."""
    for package in (predictor, search):
        assert package.__file__ is not None
        home = Path(package.__file__).parent
        there = tmp_path / home.name
        shutil.copytree(home, there, ignore=shutil.ignore_patterns("__pycache__"))
        monkeypatch.setattr(package, "__file__", str(there / "__init__.py"))
    return tmp_path


def changed(copies: Path, file: str) -> set[str]:
    def digests() -> dict[str, str]:
        sources_of.cache_clear()
        return {name: sources_of(name) for name in (TORCHREC, SHARDOPT, RATED, RANDOM)}

    before, path = digests(), copies / file
    path.write_text(path.read_text() + "\n")
    after = digests()
    sources_of.cache_clear()
    return {name for name in before if before[name] != after[name]}


def test_what_each_row_comes_from(copies: Path) -> None:
    everything = {TORCHREC, SHARDOPT, RATED, RANDOM}
    assert changed(copies, "search/solve.py") == everything - {TORCHREC}
    assert changed(copies, "search/baselines/torchrec_planner.py") == everything
    assert changed(copies, "predictor/predict.py") == everything
    assert changed(copies, "predictor/hardware/profiles/h100-sxm.yaml") == everything
    (copies / "search/notes.txt").write_text("no code")
    assert changed(copies, "search/notes.txt") == set()
