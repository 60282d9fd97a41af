"""A calibration of a few seconds: real kernels, real ranks, rows that resume."""

import os
from pathlib import Path

import pytest

from predictor.hardware import load_hardware
from shardopt.calibrate import design, ranks, run
from shardopt.calibrate.design import Point
from shardopt.calibrate.profile import build_profile, profile_text
from shardopt.calibrate.ranks import Job, MeasurementError, run_ranks
from shardopt.calibrate.rows import Measured

pytest.importorskip("fbgemm_gpu")
pytest.importorskip("scipy")
pytestmark = pytest.mark.distributed


def test_a_tiny_calibration_measures_resumes_and_loads(tmp_path: Path) -> None:
    asked = run.Asked("gloo", 2, design.TINY, tmp_path / "rows.csv")
    said: list[str] = []
    whole = run.measure(asked, said.append).rows
    families = {row.point.family for row in whole}
    assert families == {"reference", "host", "lookup", "gemm", "elementwise", "collective"}
    assert all(row.settings and row.date and row.median_us > 0 for row in whole)
    before = asked.rows.read_text()

    assert run.measure(asked, said.append).rows == whole
    assert asked.rows.read_text() == before, "everything was there already"

    # as after an interruption: the last rows are missing, one is cut off
    asked.rows.write_text("".join(before.splitlines(keepends=True)[:-3]) + "shardopt.calib")
    again = run.measure(asked, said.append).rows
    assert {row.key for row in again} == {row.key for row in whole}

    found = build_profile(again, run.origin("gloo"), load_hardware("cpu-gloo"), "tiny", 2, 8.0)
    path = tmp_path / "tiny.yaml"
    path.write_text(profile_text(found.profile))
    assert load_hardware(str(path)).groups["embedding"].provenance.kind == "measured"


def test_a_rank_that_fails_says_why() -> None:
    broken = Point("gemm", {"m": 8, "n": 8, "k": 8, "dtype": "fp7", "layout": "nn"})
    job = Job([broken], design.TINY, 1, "gloo", ranks.available_cores())
    with pytest.raises(MeasurementError, match=r"(?s)rank 0 failed:.*fp7"):
        run_ranks(job, lambda row: None)


def test_a_rank_that_dies_keeps_what_was_measured() -> None:
    points = design.gemm_points(2) * 50
    seen: list[Measured] = []

    def kill_on_first_row(row: Measured) -> None:
        import multiprocessing

        seen.append(row)
        for child in multiprocessing.active_children():
            if child.pid is not None and child.pid != os.getpid():
                child.kill()
                child.join()

    with pytest.raises(MeasurementError, match=r"rank 0 died with exit code -9"):
        run_ranks(Job(points, design.TINY, 1, "gloo", ranks.available_cores()), kill_on_first_row)
    assert seen
