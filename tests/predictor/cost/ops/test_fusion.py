"""Chains of ops as one pass: what they read and write, and where they end."""

from __future__ import annotations

from predictor.cost.ops.op_time import fused_chains, outer_bytes
from predictor.model.op_calls import OpCall
from tests.predictor.cost.ops.operands import tensor

SIZE = 4 * 64 * 64


def op(name: str, inputs: list[int], output: int, freed: tuple[int, ...] = ()) -> OpCall:
    return OpCall(name, tuple(tensor(i, 64, 64) for i in inputs), (tensor(output, 64, 64),), freed)


def test_what_lies_between_is_neither_read_nor_written() -> None:
    chain = [op("mul", [1, 2], 3), op("add", [3, 4], 5, (3,)), op("sigmoid", [5], 6)]
    # 5 is kept, for a backward
    assert outer_bytes(chain) == 3 * SIZE + 2 * SIZE
    assert outer_bytes(chain[:1]) == 3 * SIZE


def test_what_is_written_in_place_counts_once_each_way() -> None:
    x = tensor(1, 64, 64)
    steps = [OpCall("mul_", (x,), (x,), mutates=True)] * 3
    assert outer_bytes(steps) == 2 * SIZE


def test_products_end_a_chain_and_views_are_left_out() -> None:
    x = tensor(2, 64, 64)
    view = OpCall("t", (x,), (x,))
    calls = [
        op("relu", [1], 2),
        view,
        op("mul", [2, 3], 4),
        op("mm", [4, 5], 6),
        op("add", [6, 7], 8),
    ]
    names = [[call.name for call in chain] for chain in fused_chains(calls)]
    assert names == [["relu", "mul"], ["mm"], ["add"]]


def test_chains_that_share_nothing_are_kernels_of_their_own() -> None:
    calls = [op("relu", [1], 2), op("relu", [3], 4), op("mul", [2, 5], 6)]
    assert sorted(len(chain) for chain in fused_chains(calls)) == [1, 2]
