"""Matching two recordings by the names of what ran."""

from hypothesis import given
from hypothesis import strategies as st

from predictor.trace.read import align

NAMES = st.lists(st.sampled_from("abcdefgh"), min_size=12, max_size=40)


@given(NAMES, NAMES, NAMES)
def test_align_pairs_equal_names_in_order(short: list, before: list, after: list) -> None:
    long = [*before, *short, *after]
    pairs = align(short, long)
    assert all(short[i] == long[j] for i, j in pairs)
    assert len({j for _, j in pairs}) == len(pairs)
    assert len({i for i, _ in pairs}) == len(short)


def test_align_steps_over_what_one_side_lacks() -> None:
    short = [f"op{i}" for i in range(40)]
    long = ["x", *short[:15], "new", "new", *short[15:25], *short[26:], "y"]
    pairs = align(short, long)
    assert [i for i, _ in pairs] == [*range(25), *range(26, 40)]
    assert all(short[i] == long[j] for i, j in pairs)


def test_align_finds_every_repetition() -> None:
    short = [f"op{i}" for i in range(20)]
    assert len(align(short, ["x", *short, "y", "z", *short])) == 40


def test_align_nothing() -> None:
    assert align([], ["a"]) == align(["a"], []) == align(["a"] * 9, ["b"] * 9) == []
