"""Measured plans on the console."""

from io import StringIO

import pytest

from shardopt.race import Confirmation, Confirmed
from shardopt.report.confirmed import show_confirmed
from shardopt.report.console import make_console

FAST = Confirmed("plan 1", None, "cp-sat", 8.0, (7.9, 8.1), None)
THEIRS = Confirmed("torchrec", None, "TorchRec's planner", 10.0, None, None)
DEAD = Confirmed("plan 2", None, "cp-sat", None, None, 0, "rank 0: [/enforce]")
NOTE = "plan 2 is out: rank 0: [/enforce]"


@pytest.mark.parametrize("quiet", [False, True])
def test_plans_are_shown_with_times_gain_and_why_one_is_out(quiet: bool) -> None:
    out = StringIO()
    found = Confirmation((THEIRS, FAST, DEAD), FAST, (0.2, 0.19, 0.21), (NOTE,))
    show_confirmed(make_console(out, width=100), found, None, quiet=quiet)
    text = out.getvalue()
    assert all(word in text for word in ("plan 1", "+20.0", "+19.0", "+21.0"))
    assert (NOTE in text, "8.000" in text, "7.90" in text) == (not quiet,) * 3
    if not quiet:
        assert text.index("plan 1") < text.index("torchrec") < text.index("plan 2")


def test_without_rounds_enough_or_torchrecs_time_there_is_no_interval_or_gain() -> None:
    for gain, shown in (((0.2, None, None), "+20.0"), (None, "TorchRec's")):
        out = StringIO()
        show_confirmed(
            make_console(out, width=100), Confirmation((FAST,), FAST, gain, ()), None, quiet=True
        )
        assert shown in out.getvalue()
