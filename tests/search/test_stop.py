"""When a search ends, and what it says about why."""

from __future__ import annotations

import pytest

from predictor.errors import InputError
from search.stop import Stop
from tests.search.problems import Ticks


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"effort": 0}, "effort is 0; it must be above 0"),
        ({"effort": float("nan")}, "effort is nan"),
        ({"time_limit_s": 0}, "time_limit is 0"),
        ({"time_limit_s": -1.5}, "time_limit is -1.5"),
        ({"gap": -0.1}, "gap is -0.1"),
    ],
)
def test_values_out_of_range(given: dict[str, float], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Stop(**given)  # type: ignore[arg-type]


def test_nothing_but_work_stops_by_default() -> None:
    stop = Stop()
    assert stop.remaining_s == float("inf")
    assert not stop.reached()
    assert not stop.reached(10.0, 9.9)
    assert stop.reason == "work"


def test_a_gap_small_enough_stops() -> None:
    stop = Stop(gap=0.1)
    assert not stop.reached(10.0, 9.0)
    assert not stop.reached(10.0, 0.0)
    assert stop.reached(10.0, 9.5)
    assert stop.reason == "gap"


def test_out_of_time_stays_the_reason() -> None:
    """The plan of a search cut short by the clock may differ from machine to machine."""
    stop = Stop(time_limit_s=1e-9, gap=1.0)
    assert stop.remaining_s == 0
    assert stop.reached()
    assert stop.reached(10.0, 10.0)
    assert stop.reason == "time"


def test_a_stage_that_the_clock_cuts_short_leaves_time_as_the_reason() -> None:
    """However soon the other stages are done: the plan depends on the machine."""
    stop = Stop(time_limit_s=100.0, clock=Ticks(1.0))
    late = stop.part(0.1)
    assert not late()
    assert stop.stopped_by(10.0, 9.0) == "work"
    assert stop.stopped_by(10.0, 10.0) == "gap"
    while not late():
        assert stop.remaining_s > 0
    assert stop.stopped_by(10.0, 10.0) == "time"


def test_an_interrupt_ends_an_interruptible_search_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        Stop().interrupt()
    stop = Stop(interruptible=True)
    stop.interrupt()
    assert stop.reached(2.0, 1.0)
    assert (stop.reason, stop.remaining_s) == ("interrupted", 0)
    with pytest.raises(KeyboardInterrupt):
        stop.interrupt()


def test_a_part_of_the_time_that_is_left() -> None:
    clock = Ticks(0.0)
    stop = Stop(time_limit_s=100.0, reserve=0.2, clock=clock)
    clock.now = 20.0
    assert stop.remaining_s == 60.0
    half = stop.part(0.5)
    clock.now = 49.0
    assert not half()
    assert not half(1.0)
    clock.now = 50.0
    assert half()
    assert not Stop(clock=clock).part(0.1)()


def test_the_ceiling_counts_from_when_it_is_told_to() -> None:
    clock = Ticks(0.0)
    clock.now = 7.0
    assert Stop(time_limit_s=10.0, clock=clock, started=3.0).remaining_s == 6.0


def test_a_gap_of_rounding_is_closed() -> None:
    stop = Stop()
    assert not stop.reached(1.0 + 2e-6, 1.0)
    assert stop.reached(1.0 + 9e-7, 1.0)
    assert stop.reason == "gap"
