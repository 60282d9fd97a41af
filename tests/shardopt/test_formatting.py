"""Numbers as people read them."""

import random

import pytest

from shardopt.formatting import percent, shares


def _value(text: str) -> float:
    """A shown share in per cent; one too small to be shown counts as none."""
    return 0.0 if text.startswith("<") else float(text.removesuffix(" %"))


@pytest.mark.parametrize(
    "parts",
    [
        (0.011, 0.045, 0.020, 4.657),
        (0.016, 0.020, 8.974),
        (1.0, 1.0, 1.0),
        (7.0,),
        (1e-9, 1.0),
        tuple(random.Random(0).random() for _ in range(13)),
    ],
)
def test_shares_add_up_to_all_and_each_is_within_a_tenth(parts: tuple[float, ...]) -> None:
    values = [_value(text) for text in shares(parts)]
    assert sum(values) == pytest.approx(100.0)
    for value, part in zip(values, parts, strict=True):
        assert value == pytest.approx(100 * part / sum(parts), abs=0.1)


def test_parts_of_nothing_have_no_share() -> None:
    assert [_value(text) for text in shares([0.0, 0.0])] == [0.0, 0.0]


@pytest.mark.parametrize("fraction", [0.9951, 0.9996, 1 - 1e-9])
def test_a_part_is_never_shown_as_the_whole(fraction: float) -> None:
    assert 99 < _value(percent(fraction)) < 100 == _value(percent(1.0))
