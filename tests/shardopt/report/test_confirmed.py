"""Measured plans."""

from dataclasses import replace

from shardopt.race import Confirmation, Confirmed
from shardopt.report.blocks import TextTable
from shardopt.report.plan import gained, measured

FAST = Confirmed("plan 1", None, "cp-sat", 8.0, (7.9, 8.1), None)
THEIRS = Confirmed("torchrec", None, "TorchRec's planner", 10.0, None, None)
DEAD = Confirmed("plan 2", None, "cp-sat", None, None, 0, "rank 0: [/enforce]")
NOTE = "plan 2 is out: rank 0: [/enforce]"


def test_plans_are_shown_with_times_gain_and_why_one_is_out() -> None:
    confirmation = Confirmation((THEIRS, FAST, DEAD), FAST, (0.2, 0.19, 0.21), (NOTE,))
    _, grid, note, gain = measured(confirmation, None)
    assert isinstance(grid, TextTable)
    assert [row[0] for row in grid.rows] == ["plan 1", "torchrec", "plan 2"]
    assert grid.rows[0][1] == "8.000"
    assert NOTE in str(note)
    assert gain == gained(confirmation, None)
    assert all(word in str(gain) for word in ("Plan 1", "+20.0", "+19.0", "+21.0"))


def test_the_measurement_decides_and_a_wrong_prediction_is_said() -> None:
    off = replace(FAST, predicted_ms=2.0, predicted_interval_ms=(1.5, 2.5))
    near = replace(THEIRS, predicted_ms=9.0, predicted_interval_ms=(8.0, 11.0))
    assert (off.factor, near.factor) == (4.0, None)
    confirmation = Confirmation((near, off), off, (0.2, 0.19, 0.21), ())
    assert "4" in str(measured(confirmation, None)[2])
    assert confirmation.verdict.startswith("Use plan 1")
    for best, gain in ((near, (0.0, 0.0, 0.0)), (off, (0.01, -0.01, 0.02))):
        assert replace(confirmation, best=best, gain=gain).verdict.startswith(
            "Keep TorchRec's plan"
        )


def test_torchrecs_plan_gains_nothing_over_itself() -> None:
    best = replace(FAST, found_by="torchrec default, TorchRec's planner")
    assert "%" not in gained(Confirmation((best,), best, (0.0, 0.0, 0.0), ()), None)


def test_without_rounds_enough_or_torchrecs_time_there_is_no_interval_or_gain() -> None:
    for gain, shown in (((0.2, None, None), "+20.0"), (None, "TorchRec's")):
        assert shown in gained(Confirmation((FAST,), FAST, gain, ()), None)
