"""First scores are written once."""

import re
from datetime import date
from pathlib import Path

import pytest

from lab import first_scores
from lab.first_scores import COLUMNS, read_scores, score_tables
from lab.suites import SUITES

TABLE = """# a comment
gpu,m,n,k,time_us
B200,4096,4096,4096,100
B200,64,64,64,4
Abacus,64,64,64,4
"""


def test_a_table_is_scored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = tmp_path / "first_scores.csv"
    scores.write_text(",".join(COLUMNS) + "\n")
    monkeypatch.setattr(first_scores, "FILE", scores)
    table = tmp_path / "gemm_bf16_measured.csv"
    table.write_text(TABLE)
    assert "no first score" in " ".join(score_tables(tmp_path))
    found = read_scores()
    assert sum(int(row["n"]) for row in found if row["what"].count(",") == 1) == 2
    table.write_text(TABLE.replace("100", "1000"))
    assert "(first " in " ".join(score_tables(tmp_path))
    assert read_scores() == found


def test_committed_scores_say_where_they_are_from() -> None:
    rows = read_scores()
    assert all(row["suite"] in SUITES and row["source"] for row in rows)
    assert all(re.fullmatch("[0-9a-f]{8}", row["commit"]) for row in rows)
    assert all(date.fromisoformat(row["date"]) for row in rows)
    named = [(row["suite"], row["what"], row["source"]) for row in rows]
    assert len(named) == len({*named}), "a first score is made once"


def test_pages_name_first_scores_that_there_are() -> None:
    scored = {(row["suite"], row["what"]) for row in read_scores()}
    quoted = {
        (suite.name, part)
        for suite in SUITES.values()
        for shown in (*suite.lead, *suite.readme)
        for part in shown["first"]
    }
    assert quoted <= scored
