"""First scores are written once."""

from pathlib import Path

import pytest

from lab import first_scores
from lab.first_scores import COLUMNS, read_scores, score_tables

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
    assert sum(int(row["n"]) for row in found if row["part"].count(",") == 1) == 2
    table.write_text(TABLE.replace("100", "1000"))
    assert "(first " in " ".join(score_tables(tmp_path))
    assert read_scores() == found


def test_committed_scores_say_where_they_are_from() -> None:
    assert all(row["commit"] and row["date"] and int(row["n"]) for row in read_scores())
