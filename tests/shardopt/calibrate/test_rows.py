"""The rows file survives interruptions; which rows count, and which points are measured again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from predictor.cost.collectives import OPS, latency_ms, transfer_ms
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from shardopt.calibrate.collectives import collective_points
from shardopt.calibrate.points import QUICK, Point
from shardopt.calibrate.profile import build_profile
from shardopt.calibrate.rows import (
    CalibrationRows,
    Measurement,
    Origin,
    accept,
    missing,
    points_again,
    read_rows,
    row_of_failure,
    row_of_samples,
)
from shardopt.measure.sampling import Samples
from shardopt.ranks.realtime import Runtime

ORIGIN = Origin("some processor, 2 cores", "torch 2, fbgemm 1")
GEMM = Point("gemm", {"m": 64, "n": 8, "k": 13, "dtype": "fp32", "layout": "nn"}, test=True)
LOOKUP = Point("lookup", {"batch": 8, "tables": [{"rows": 10, "dim": 8}]})


@pytest.fixture
def file(tmp_path: Path) -> CalibrationRows:
    rows = CalibrationRows(tmp_path / "rows.csv", ORIGIN)
    rows.append(row_of_samples(GEMM, Samples((1e-3, 1.1e-3, 1.2e-3))))
    rows.append(
        row_of_samples(LOOKUP, Samples((2e-3, 2e-3)), "forward", tables=[[10, 8, 8, 9.0, 5.5]])
    )
    return rows


def test_rows_come_back_as_they_were_written(file: CalibrationRows) -> None:
    assert {row.runtime for row in file.rows} == {Runtime.TUNED}, "from before there were two"
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
    assert not missing(again.rows, old)


def test_only_complete_points_are_left_out_of_the_next_run(file: CalibrationRows) -> None:
    iteration = Point("iteration", {"plan": "tw", "tables": 8})
    file.append(row_of_samples(iteration, Samples((5e-3, 6e-3)), "wall"))
    again = CalibrationRows(file.path, ORIGIN)
    assert not missing(again.rows, [GEMM])
    for point, part in ((LOOKUP, "backward"), (iteration, "cpu")):
        assert missing(again.rows, [GEMM, point]) == [point], f"its {part} was not measured"
        again.append(row_of_samples(point, Samples((2e-3, 2e-3)), part))
        assert not missing(again.rows, [point])


def test_a_point_that_failed_is_kept_with_its_message_and_not_measured_again(
    file: CalibrationRows,
) -> None:
    refused = RuntimeError("Float, but found Half\nException raised from ...")
    for point in (GEMM, LOOKUP):
        file.append(row_of_failure(point, refused))
    again = CalibrationRows(file.path, ORIGIN)
    assert not missing(again.rows, [GEMM, LOOKUP])
    failed = [row for row in again.rows if row.failure]
    assert [row.failure for row in failed] == ["RuntimeError: Float, but found Half"] * 2
    accepted = accept(again.rows)
    assert [row.point for row in accepted.failed] == [GEMM, LOOKUP]
    assert [row.point for row in accepted.rows] == [GEMM, LOOKUP], "what was measured before stays"
    assert accepted.refused == []
    assert points_again(failed) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1100.000", "nan", "time is not above 0"),
        ("1100.000", "-3.000", "time is not above 0"),
        ("1100.000", "0.000", "time is not above 0"),
        ("[[10,", "[[NaN,", "facts hold"),
        ("[[10,", "[[-5,", "facts hold"),
        ("calibration/2", "calibration/0", "schema is 'shardopt.calibration/0'"),
        ("torch 2", "torch 3", "choose another file of rows"),
    ],
)
def test_a_line_that_is_no_row_of_this_machine_is_named(
    file: CalibrationRows, old: str, new: str, message: str
) -> None:
    file.path.write_text(file.path.read_text().replace(old, new, 1))
    line = 3 if old == "[[10," else 2
    with pytest.raises(InputError, match=rf"rows\.csv:{line}: .*{message}"):
        CalibrationRows(file.path, ORIGIN)


BASE = load_hardware("cpu-gloo")
BUSY_BYTES = 2**20
PRODUCT = Point("gemm", {"m": 64, "n": 8, "k": 13, "dtype": "fp32", "layout": "nn"})
Poison = Callable[[list[float]], list[float]]


def row(point: Point, seconds: Sequence[float], part: str = "") -> Measurement:
    measurement = row_of_samples(point, Samples(tuple(seconds)), part)
    measurement.__dict__["date"] = "2026-01-02T03:04:05Z"
    return measurement


def samples(seconds: float, seed: int, count: int = 40) -> list[float]:
    """That differ by some per cent, as quiet ones do."""
    near = np.random.default_rng(seed).uniform(0.95, 1.05, count)
    return [seconds * float(share) for share in near]


def message_s(size: int) -> float:
    """Return the time of an exchange over gloo: latency, and the time of its bytes."""
    return 3e-4 + size / 2e9


def collectives(
    poison: Poison = lambda seconds: seconds, op: str | None = None
) -> list[Measurement]:
    """Rows of a machine; those of one size, of one op or of all, are poisoned."""
    rows = []
    for i, point in enumerate(collective_points(QUICK, 2)):
        seconds = samples(message_s(point.params["bytes"]), i)
        busy = point.params["bytes"] == BUSY_BYTES and point.params["op"] != "issue"
        if busy and op in (None, point.params["op"]):
            seconds = poison(seconds)
        rows.append(row(point, seconds))
    return rows


def times(profile: HardwareProfile, op: str) -> np.ndarray:
    """Return the times of messages around the poisoned one."""
    curve = getattr(profile.collectives.intra, op)
    sizes = np.array([BUSY_BYTES / 4, BUSY_BYTES, BUSY_BYTES * 4, BUSY_BYTES * 16])
    return np.asarray(latency_ms(curve, 2) + transfer_ms(curve, sizes, 2))


def fitted(rows: list[Measurement]) -> HardwareProfile:
    return build_profile(rows, Origin("machine", "torch"), BASE, "mine", 2, 24.0).profile


def hiccup(seconds: list[float]) -> list[float]:
    return [*seconds[:-1], 0.1]


def modes(seconds: list[float]) -> list[float]:
    """A third waits for a tick of the scheduler."""
    return [s + (4e-3 if i % 3 == 0 else 0.0) for i, s in enumerate(seconds)]


def slow(seconds: list[float]) -> list[float]:
    """All of them, steadily: other work had the machine as long as this size was measured."""
    return [2.5 * s for s in seconds]


@pytest.mark.parametrize("poison", [hiccup, modes, slow])
@pytest.mark.parametrize("op", ["all_reduce", None])
def test_a_poisoned_size_does_not_move_the_curve(poison: Poison, op: str | None) -> None:
    clean, poisoned = fitted(collectives()), fitted(collectives(poison, op))
    for name in OPS:
        assert times(poisoned, name) == pytest.approx(times(clean, name), rel=0.06), name


REFERENCE = Point("reference", {"kernel": "gemm", "at": "start"})
LINKED = Point("collective", {"op": "all_gather", "bytes": 256, "link_gbit_s": 1.0})
STEADY = [samples(1e-3, seed) for seed in range(2)]
MODES = [modes(seconds) for seconds in STEADY]


@pytest.mark.parametrize(
    ("point", "attempts", "accepted_row", "again"),
    [
        (PRODUCT, [hiccup(STEADY[0])], None, True),
        (PRODUCT, [hiccup(STEADY[0]), STEADY[1]], 1, False),
        (PRODUCT, [MODES[0], hiccup(STEADY[1])], None, False),  # never a third time
        (PRODUCT, [slow(STEADY[0]), STEADY[1]], 1, False),  # of two steady ones the shorter
        (PRODUCT, [STEADY[1], slow(STEADY[0])], 0, False),
        (PRODUCT, MODES, 0, False),  # the same modes twice are the cost's own
        (REFERENCE, [hiccup(STEADY[0])], 0, False),  # varies by nature
        (LINKED, [hiccup(STEADY[0])], 0, False),
    ],
)
def test_a_steady_attempt_counts_or_the_same_modes_twice(
    point: Point, attempts: list[list[float]], accepted_row: int | None, again: bool
) -> None:
    rows = [row(point, seconds) for seconds in attempts]
    accepted = accept(rows)
    assert points_again(rows) == ([point] if again else [])
    assert accepted.repeated == (len(rows) > 1)
    assert accepted.rows == ([] if accepted_row is None else [rows[accepted_row]])
    assert len(accepted.refused) == (accepted_row is None)
    assert all(refused in rows for refused in accepted.refused)


def test_a_cost_with_modes_takes_their_mean() -> None:
    # a third of the samples take 5 ms: neither the mode of 1 ms nor the mean of all
    assert row(PRODUCT, MODES[0]).median_us == pytest.approx(1000, rel=0.05)
    assert 1800 < row(PRODUCT, MODES[0]).trimmed_us < 2600


def test_one_unsteady_part_repeats_the_point_and_costs_the_others_nothing() -> None:
    point = Point("iteration", {"plan": "tw"})
    parts = [row(point, samples(5e-3, 0), "cpu"), row(point, hiccup(samples(6e-3, 1)), "wall")]
    assert points_again(parts) == [point]
    assert accept(parts).rows == parts[:1]


def test_a_size_above_its_neighbours_is_measured_again_and_believed_when_it_repeats() -> None:
    rows = collectives(slow, "all_reduce")
    (again,) = points_again(rows)
    assert again.params == {"op": "all_reduce", "bytes": BUSY_BYTES, "ranks": 2}
    assert [refused.point for refused in accept(rows).refused] == [again]
    repeated = [*rows, row(again, slow(samples(message_s(BUSY_BYTES), 99)))]
    assert points_again(repeated) == []
    assert accept(repeated).refused == []


def test_the_smallest_message_is_compared_with_the_next() -> None:
    rows = [
        row(Point("collective", {"op": "all_gather", "bytes": size}), samples(seconds, 0))
        for size, seconds in ((256, 9e-4), (1024, 3e-4), (4096, 3e-4))
    ]
    assert [point.params["bytes"] for point in points_again(rows)] == [256]


def test_a_calibration_interrupted_in_a_repeat_repeats_that_point() -> None:
    point = Point("lookup", {"batch": 8})
    rows = [row(point, hiccup(samples(1e-3, i)), part) for i, part in enumerate(("f", "b"))]
    rows.append(row(point, samples(1e-3, 5), "f"))
    assert points_again(rows) == [point]
    rows += [row(point, samples(1e-3, 6), part) for part in ("f", "b")]
    assert points_again(rows) == []
    assert len(accept(rows).rows) == 2


def test_curves_with_too_few_rows_left_stay_those_of_the_base_and_it_is_said() -> None:
    rows = [
        row(measured.point, hiccup(samples(1e-3, 0)))
        if measured.point.params["op"] == "all_gather" and measured.point.params["bytes"] > 1024
        else measured
        for measured in collectives()
    ]
    host = [row(Point("elementwise", {"op": "clone", "bytes": 2**i}), [1e-3] * 3) for i in range(9)]
    for i, measured in enumerate(host):
        measured.facts["bytes_moved"] = 2.0**i
    calibrated = build_profile([*rows, *host], Origin("machine", "torch"), BASE, "mine", 2, 24.0)
    assert calibrated.profile.collectives == BASE.collectives
    assert any("collectives.intra: too few rows are left" in note for note in calibrated.notes)
