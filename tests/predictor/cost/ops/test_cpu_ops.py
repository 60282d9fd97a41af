"""Classification of calls, and kernel models applied to them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.cost.ops.cpu_ops import (
    BINS,
    EDGES,
    VIEW,
    Arena,
    Caches,
    OpModels,
    OpRow,
    kind_and_sizes,
    reuse_bytes,
    work,
)
from predictor.errors import InputError
from predictor.model.op_calls import OpCall, Operand
from tests.predictor.cost.ops.operands import tensor

CACHES = Caches(2.0**20, 2.0**26)
NOWHERE = (0.0,) * BINS


def test_products_are_told_apart_by_layout() -> None:
    a, b, out = tensor(0, 8, 16), replace(tensor(1, 16, 32), strides=(1, 16)), tensor(2, 8, 32)
    assert kind_and_sizes(OpCall("mm", (a, b), (out,))) == ("mm nt", (1, 8, 32, 16, 0))
    bias = tensor(3, 32)
    assert kind_and_sizes(OpCall("addmm", (bias, a, b), (out,)))[1] == (1, 8, 32, 16, 1)


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 500))
def test_work_of_a_product_never_falls(m: int, n: int, k: int) -> None:
    small = work(OpRow("mm nn", (1, m, n, k, 0), NOWHERE), CACHES)
    for sizes in ((1, m + 1, n, k, 0), (1, m, n + 1, k, 0), (1, m, n, k + 1, 0), (2, m, n, k, 0)):
        assert (work(OpRow("mm nn", sizes, NOWHERE), CACHES) >= small).all()


def test_a_layout_that_was_never_measured_takes_the_model_of_its_op() -> None:
    exact = np.array([2.0, 0, 0, 0, 0, 0, 0])
    models = OpModels({"mul c>1": exact, "mul": 2 * exact}, CACHES, op_ms=0.5, stretch=1.5)
    measured, unknown = (OpRow(kind, (1, 1, 1, 0), NOWHERE, 3) for kind in ("mul c>1", "mul 10>1"))
    assert models.row_ms(measured) == pytest.approx(6)
    assert models.row_ms(unknown) == pytest.approx(12)
    views = OpRow(VIEW, (), NOWHERE, 4)
    assert models.rows_ms([measured, views]) == pytest.approx(1.5 * 6 + 7 * 0.5)


def test_an_op_without_any_model_is_named() -> None:
    with pytest.raises(InputError, match="no kernel model for the op 'tanh c>1'"):
        OpModels({}, CACHES).row_ms(OpRow("tanh c>1", (1, 1, 1, 0), NOWHERE))


def test_convolutions_are_told_apart_by_what_they_give() -> None:
    x, w, y = tensor(0, 2, 5, 8, 8), tensor(1, 24, 5, 3, 3), tensor(2, 2, 24, 8, 8)
    bias = tensor(3, 24)
    sizes = (2, 5, 24, 9, 64, 64)
    assert kind_and_sizes(OpCall("convolution", (x, w, bias), (y,))) == ("convolution >", sizes)
    gradients = (tensor(4, *x.shape), tensor(5, *w.shape))
    backward = kind_and_sizes(OpCall("convolution_backward", (y, x, w), gradients))
    assert backward == ("convolution_backward xw", sizes)
    first = kind_and_sizes(OpCall("convolution_backward", (y, x, w), gradients[1:]))
    assert first == ("convolution_backward w", sizes)
    image = tensor(6, 2, 3, 8, 8), tensor(7, 24, 3, 3, 3)
    assert kind_and_sizes(OpCall("convolution", image, (y,)))[0] == "convolution image>"


MIB = 2**20


def operand(storage: int, mib: int) -> Operand:
    return tensor(storage, mib * MIB // 4)


def copies(storage: int, mib: int, output: int, freed: tuple[int, ...] = ()) -> OpCall:
    return OpCall("clone", (operand(storage, mib),), (operand(output, mib),), freed)


def bin_of(distance: float) -> int:
    return int(np.searchsorted(EDGES, distance, side="right"))


def test_a_copy_that_repeats_finds_everything_as_far_back_as_it_is_large() -> None:
    (reused,) = reuse_bytes([copies(0, 8, 1, freed=(1,))])
    expected = np.zeros(BINS)
    expected[bin_of(16 * MIB)] = 16 * MIB
    assert reused == pytest.approx(expected)


def test_what_broadcasting_repeats_counts_once() -> None:
    wide = Operand(0, 4096, 0, (1024, 1024), (0, 1), 4)
    (reused,) = reuse_bytes([OpCall("clone", (wide,), (operand(1, 4),), (1,))])
    assert reused.sum() == 4096 + 4 * MIB


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
