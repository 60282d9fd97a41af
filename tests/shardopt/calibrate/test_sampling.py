"""Which samples count."""

from shardopt.calibrate.sampling import FEWEST, MOST, undisturbed, wanted


def test_disturbed_samples_are_left_out_where_enough_remain() -> None:
    taken = [(1.0, True), (9.0, False), (1.1, True), (1.2, True)]
    assert undisturbed(taken).seconds == (1.0, 1.1, 1.2)
    assert undisturbed(taken[:3]).seconds == (1.0, 9.0, 1.1)


def test_a_point_ends_when_its_time_is_spent_and_enough_are_clean() -> None:
    clean = [(1.0, True)] * FEWEST
    assert wanted(clean, spent=0.5, seconds=1.0)
    assert not wanted(clean, spent=1.5, seconds=1.0)
    assert wanted(clean[:-1], spent=1.5, seconds=1.0)


def test_a_busy_machine_delays_but_does_not_hang() -> None:
    dirty = [(1.0, False)] * FEWEST
    assert wanted(dirty, spent=1.5, seconds=1.0), "patience first"
    assert not wanted(dirty, spent=3.5, seconds=1.0)
    assert wanted(dirty[:-1], spent=3.5, seconds=1.0), "a few in any case"
    assert not wanted([(1.0, False)] * MOST, spent=0.0, seconds=1.0)
