"""Tensors that a benchmark makes: legal values, shared memory, distributions."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from shardopt.replay.runtime.tensors import (
    GIB,
    available_bytes,
    draw_ids,
    make_all,
    needed_bytes,
    too_large,
)

CPU = torch.device("cpu")


def made(**specs: dict) -> list:
    numbered = {str(i): spec for i, spec in enumerate(specs.values())}
    return make_all(numbered, len(specs), CPU, "uniform", 0)


def whole(count: int, fill: dict, storage: int = 0) -> dict:
    return {
        "shape": [count], "strides": [1], "dtype": "int64", "storage": storage, "fill": fill
    }  # fmt: skip


def test_lengths_and_offsets_end_at_the_total() -> None:
    lengths, offsets, starts = made(
        a=whole(7, {"kind": "lengths", "total": 23}, 0),
        b=whole(8, {"kind": "offsets", "total": 23}, 1),
        c=whole(7, {"kind": "starts", "total": 23}, 2),
    )
    assert lengths.sum() == 23
    assert offsets.tolist() == [0, *lengths.cumsum(0).tolist()]
    assert starts.tolist() == offsets.tolist()[:-1]


def test_ids_of_tables_lie_in_their_tables() -> None:
    (ids,) = made(a=whole(400, {"kind": "table_ids", "rows": [3, 1000]}))
    assert ids[:200].max() == 2
    assert 500 < ids[200:].max() < 1000


@pytest.mark.parametrize("high", [1, 2, 10, 999])
@pytest.mark.parametrize("how", ["uniform", "zipf:0.5", "zipf:1.05", "zipf:3"])
def test_ids_are_legal(high: int, how: str) -> None:
    ids = draw_ids(500, high, how, torch.Generator().manual_seed(1))
    assert 0 <= ids.min() <= ids.max() < high


def test_zipf_repeats_its_hot_ids_as_its_exponent_says() -> None:
    ids = draw_ids(20_000, 1000, "zipf:1.2", torch.Generator().manual_seed(1))
    counts = torch.bincount(ids, minlength=1000).sort(descending=True).values
    chances = torch.arange(1, 1001).double().pow(-1.2)
    expected = 20_000 * chances / chances.sum()
    assert counts[:5].double().numpy() == pytest.approx(expected[:5].numpy(), rel=0.1)


def spec_of(shape: list[int], storage: int, offset: int = 0) -> dict[str, Any]:
    strides = [1] if len(shape) == 1 else [shape[1], 1]
    spec = {"shape": shape, "strides": strides, "dtype": "float32", "storage": storage}
    return {**spec, "offset": offset}


def test_views_count_once_and_tables_not_at_all() -> None:
    specs = {
        "made": {
            "0": spec_of([10, 10], 0),
            "1": spec_of([5], 0, offset=100),
            "2": spec_of([1000, 1000], 1),
            "3": spec_of([7], 2),
        },
        "calls": [
            {"op": "aten::relu", "reads": [0]},
            {"op": "aten::add", "reads": [1]},
            {"op": "aten::embedding", "reads": [2]},
            {"op": "aten::sum", "reads": [3]},
        ],
    }
    assert needed_bytes(specs, [0]) == 4 * 100
    assert needed_bytes(specs, [0, 1, 2]) == 4 * 105
    assert needed_bytes(specs, [0, 1, 2, 3]) == 4 * (105 + 7)
    assert needed_bytes(specs, []) == 0


def test_ranks_of_a_machine_share_its_memory() -> None:
    assert not too_large([3 * GIB, 4 * GIB], 7 * GIB)
    message = too_large([3 * GIB, 5 * GIB], 7 * GIB)
    assert "take 8.0 GiB (2 ranks, the largest 5.0 GiB), and 7.0 GiB" in message
    assert "--ranks" in message
    assert 0 < available_bytes() < 1 << 60
