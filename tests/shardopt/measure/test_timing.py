"""Samples side by side."""

import pytest

from shardopt.measure.sampling import Samples, interleave


def test_rounds_measure_everything_and_start_with_another_one_each() -> None:
    order: list[tuple[str, int]] = []
    found = interleave(
        {"a": lambda: 1.0, "b": lambda: 2.0}, 3, lambda name, round_: order.append((name, round_))
    )
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert found == {"a": Samples((1.0,) * 3), "b": Samples((2.0,) * 3)}


@pytest.mark.parametrize(
    ("seconds", "stable"),
    [((1.0,), None), ((1.0, 1.05, 1.1), True), ((1.0, 1.3), False), ((1.0,) * 30 + (1.6,), False)],
)
def test_stable(seconds: tuple[float, ...], stable: bool | None) -> None:
    assert Samples(seconds).stable is stable


def test_median_and_overlap() -> None:
    assert Samples((3.0, 1.0, 2.0)).median_s == 2
    assert Samples((1.0, 2.0)).overlaps(Samples((2.0, 5.0)))
    assert Samples((1.0, 9.0)).overlaps(Samples((2.0, 3.0)))
    assert not Samples((1.0, 2.0)).overlaps(Samples((2.1, 5.0)))
