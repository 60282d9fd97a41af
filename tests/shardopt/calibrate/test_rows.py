"""The rows file survives interruptions, and says what is wrong with a broken one."""

from pathlib import Path

import pytest

from predictor.errors import InputError
from shardopt.calibrate.points import Point
from shardopt.calibrate.rows import CalibrationRows, Origin, read_rows, row_of_samples
from shardopt.measure.sampling import Samples
from shardopt.ranks.realtime import Runtime

ORIGIN = Origin("some processor, 2 cores", "torch 2, fbgemm 1")
GEMM = Point("gemm", {"m": 64, "n": 8, "k": 13, "dtype": "fp32", "layout": "nn"}, test=True)
LOOKUP = Point("lookup", {"batch": 8, "tables": [{"rows": 10, "dim": 8}]})


@pytest.fixture
def file(tmp_path: Path) -> CalibrationRows:
    made = CalibrationRows(tmp_path / "rows.csv", ORIGIN)
    made.append(row_of_samples(GEMM, Samples((1e-3, 1.1e-3, 1.2e-3))))
    made.append(
        row_of_samples(LOOKUP, Samples((2e-3, 2e-3)), "forward", tables=[[10, 8, 8, 9.0, 5.5]])
    )
    return made


def test_rows_come_back_as_they_were_written(file: CalibrationRows) -> None:
    assert CalibrationRows(file.path, ORIGIN).rows == file.rows
    assert read_rows(file.path) == (ORIGIN, file.rows)
    assert file.rows[0].median_us == pytest.approx(1100)
    assert file.rows[0].point.test


def test_rows_of_families_that_are_no_longer_measured_are_read(file: CalibrationRows) -> None:
    old = Point("host", {"what": "op"}), Point("measured once", {"size": 3})
    for point in old:
        file.append(row_of_samples(point, Samples((5e-6, 6e-6))))
    again = CalibrationRows(file.path, ORIGIN)
    assert [row.point for row in again.rows[-2:]] == list(old)
    assert all(again.has(point) for point in old)


def test_rows_from_before_there_were_two_runtimes_are_of_the_tuned_one(
    file: CalibrationRows,
) -> None:
    assert {row.runtime for row in file.rows} == {Runtime.TUNED}


def test_only_complete_points_are_left_out_of_the_next_run(file: CalibrationRows) -> None:
    again = CalibrationRows(file.path, ORIGIN)
    assert again.has(GEMM)
    assert not again.has(LOOKUP), "its backward was not measured"
    again.append(row_of_samples(LOOKUP, Samples((2e-3, 2e-3)), "backward"))
    assert again.has(LOOKUP)


def test_an_iteration_is_complete_with_all_its_clocks(file: CalibrationRows) -> None:
    point = Point("iteration", {"plan": "tw", "tables": 8})
    file.append(row_of_samples(point, Samples((5e-3, 6e-3)), "wall"))
    assert not file.has(point)
    file.append(row_of_samples(point, Samples((5e-3, 6e-3)), "cpu"))
    assert CalibrationRows(file.path, ORIGIN).has(point)


def test_a_line_cut_off_while_written_is_measured_again(file: CalibrationRows) -> None:
    whole = file.path.read_text()
    file.path.write_text(whole[:-20])
    again = CalibrationRows(file.path, ORIGIN)
    assert again.rows == file.rows[:1]
    again.append(file.rows[1])
    assert file.path.read_text() == whole


@pytest.mark.parametrize("broken", ["nonsense", ",".join("x" * 18), '"open quote'])
def test_a_corrupt_line_is_named(file: CalibrationRows, broken: str) -> None:
    lines = file.path.read_text().splitlines()
    file.path.write_text("\n".join([lines[0], broken, *lines[1:]]) + "\n")
    with pytest.raises(
        InputError, match=r"rows\.csv:2: not a calibration row: .* delete this line"
    ):
        CalibrationRows(file.path, ORIGIN)


def test_a_time_that_is_none_is_corrupt(file: CalibrationRows) -> None:
    file.path.write_text(file.path.read_text().replace("1100.000", "nan", 1))
    with pytest.raises(InputError, match=r"rows\.csv:2: .*time is not above 0"):
        CalibrationRows(file.path, ORIGIN)


@pytest.mark.parametrize(
    "other", [Origin("another", ORIGIN.versions), Origin(ORIGIN.machine, "torch 3")]
)
def test_rows_of_another_machine_or_version_are_refused(
    file: CalibrationRows, other: Origin
) -> None:
    with pytest.raises(InputError, match="choose another file of rows"):
        CalibrationRows(file.path, other)


def test_rows_of_another_schema_are_refused(file: CalibrationRows) -> None:
    file.path.write_text(file.path.read_text().replace("calibration/2", "calibration/0"))
    with pytest.raises(InputError, match=r"rows\.csv:2: .* schema is 'shardopt.calibration/0'"):
        CalibrationRows(file.path, ORIGIN)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=r"rows\.csv:1: no column 'schema'"):
        CalibrationRows(path, ORIGIN)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(InputError, match="not UTF-8 text"):
        CalibrationRows(path, ORIGIN)


def test_an_empty_file_is_a_fresh_start(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.touch()
    file = CalibrationRows(path, ORIGIN)
    file.append(row_of_samples(GEMM, Samples((1e-3, 1e-3))))
    assert CalibrationRows(path, ORIGIN).rows == file.rows
