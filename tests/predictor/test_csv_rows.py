"""CSV rows: those that cannot be read are named and left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.csv_rows import Row, count, number, read_table
from predictor.errors import InputError


def parse(row: Row) -> tuple[int, float]:
    return count(row, "n"), number(row, "t")


def test_rows_that_cannot_be_read_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("# from somewhere\nn,t\n1,2.5\n2,x\n# aside\n3,-1\n4\n2.5,1\n5,1\n6,nan\n")
    table = read_table(path, ("n", "t"), parse)
    assert table.rows == [(1, 2.5), (5, 1.0)]
    assert [text.split(":")[1] for text in table.problems] == ["4", "6", "7", "8", "10"]
    assert "t is 'x', not a number" in table.problems[0]
    assert "must be above 0" in table.problems[1]


@given(
    before=st.lists(
        st.sampled_from(["1,2.5", "# aside", "2,x", '"3,1', "4", "5,1,1", ""]), max_size=8
    )
)
def test_a_bad_row_costs_no_other(
    tmp_path_factory: pytest.TempPathFactory, before: list[str]
) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    path.write_text("\ufeffn,t\r\n" + "".join(f"{line}\r\n" for line in before) + "9,9")
    table = read_table(path, ("n", "t"), parse)
    assert table.rows == [(1, 2.5)] * before.count("1,2.5") + [(9, 9.0)]
    read = [line for line in before if line and not line.startswith("#")]
    assert len(table.rows) + len(table.problems) == len(read) + 1
    assert len(table.skipped) == len(table.problems) + bool(table.problems)
    for text in table.problems:
        assert before[int(text.split(":")[1]) - 2] not in ("1,2.5", "# aside", "")


def test_headers_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for text, words in (("", "is empty"), ("# x\n", "is empty"), ("n,n,t\n", "twice")):
        path.write_text(text)
        with pytest.raises(InputError, match=words):
            read_table(path, ("n", "t"), parse)
    with pytest.raises(InputError, match="cannot be read"):
        read_table(tmp_path, ("n", "t"), parse)


def test_a_missing_column_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("n,tme\n1,2\n")
    with pytest.raises(InputError, match=r"no column .time..*did you mean .tme."):
        read_table(path, ("n", "time"), parse)
    with pytest.raises(InputError, match=r"cannot be read"):
        read_table(tmp_path / "none.csv", ("n",), parse)
