"""What a calibration says and keeps of each row."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardopt.calibrate import run
from shardopt.calibrate.design import points as design
from shardopt.calibrate.design.points import Point
from shardopt.calibrate.rows import CalibrationRows, Origin, row_of_samples
from shardopt.measure.timing import Samples

TABLES = [[1000, 8, 64, 288.0, 240.0]]


@pytest.mark.parametrize(
    ("point", "facts", "said"),
    [
        (
            Point("model_lookup", {"model_sha": "abc", "table": "t", "batch_size": 16, "ranks": 2}),
            {"tables": TABLES},
            "model_lookup forward 1 tables, 240 distinct rows",
        ),
        (
            Point("collective", {"op": "all_to_all", "bytes": 256, "ranks": 2}),
            {},
            "collective forward all_to_all 256 2",
        ),
    ],
)
def test_a_row_is_named_kept_and_counted(
    tmp_path: Path, point: Point, facts: dict[str, object], said: str
) -> None:
    asked = run.CalibrationSettings("gloo", 2, design.TINY, tmp_path / "rows.csv")
    file, lines = CalibrationRows(asked.rows, Origin("machine", "versions")), list[str]()
    saver = run.Saver(file, asked, 3, 9, lines.append)
    saver.save(row_of_samples(point, Samples((1e-3, 1e-3, 1e-3)), "forward", **facts))
    assert [line.removesuffix("  unstable") for line in lines] == [f"[4/9] {said}: 1.000 ms"]
    assert [row.point for row in file.rows] == [point]
    assert file.rows[0].settings
    assert asked.rows.is_file()
