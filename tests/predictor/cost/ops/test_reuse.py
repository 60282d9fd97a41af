"""Distances on calls whose distances can be counted by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.cost.ops.cpu_ops import BINS, EDGES, Arena, reuse_bytes
from predictor.model.op_calls import OpCall, Operand

MIB = 2**20


def operand(storage: int, mib: int) -> Operand:
    elements = mib * MIB // 4
    return Operand(storage, mib * MIB, 0, (elements,), (1,), 4)


def copies(storage: int, mib: int, made: int, freed: tuple[int, ...] = ()) -> OpCall:
    return OpCall("clone", (operand(storage, mib),), (operand(made, mib),), freed)


def bin_of(distance: float) -> int:
    return int(np.searchsorted(EDGES, distance, side="right"))


def test_a_copy_that_repeats_finds_everything_as_far_back_as_it_is_large() -> None:
    (found,) = reuse_bytes([copies(0, 8, 1, freed=(1,))])
    expected = np.zeros(BINS)
    expected[bin_of(16 * MIB)] = 16 * MIB
    assert found == pytest.approx(expected)


def test_what_lies_between_pushes_operands_away() -> None:
    calls = [copies(0, 4, 2, (2,)), copies(1, 32, 3, (3,))]
    first, _ = reuse_bytes(calls)
    # the source waited for both copies of the other; the target lies where the other's lay
    assert first[bin_of((64 + 8) * MIB)] == 4 * MIB
    assert first.sum() == 8 * MIB


def test_views_touch_nothing() -> None:
    view = OpCall("view", (operand(0, 4),), (operand(0, 4),))
    assert reuse_bytes([view])[0].sum() == 0


def test_what_broadcasting_repeats_counts_once() -> None:
    wide = Operand(0, 4096, 0, (1024, 1024), (0, 1), 4)
    (found,) = reuse_bytes([OpCall("clone", (wide,), (operand(1, 4),), (1,))])
    assert found.sum() == 4096 + 4 * MIB


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10_000)), max_size=60))
def test_arena_never_gives_one_address_twice(steps: list[tuple[int, int]]) -> None:
    arena = Arena()
    for storage, size in steps:
        if storage in arena.taken:
            arena.give_back(storage)
        else:
            arena.take(storage, size)
            first, end = arena.taken[storage]
            assert end - first >= size
        spans = sorted([*arena.taken.values(), *arena.gaps])
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        # whatever is not taken is in a gap
        assert sum(end - first for first, end in spans) == arena.top


def test_arena_fills_the_smallest_gap_that_is_large_enough() -> None:
    arena = Arena()
    for storage, size in enumerate((640, 64, 128, 64)):
        arena.take(storage, size)
    arena.give_back(0)
    arena.give_back(2)
    arena.take(9, 100)
    assert arena.taken[9] == (704, 832)
