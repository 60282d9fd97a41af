"""What a benchmark fills is counted before it is filled."""

from typing import Any

import pytest

pytest.importorskip("torch")

from shardopt.replay.runtime.memory import GIB, available_bytes, needed_bytes, too_large


def made(shape: list[int], storage: int, offset: int = 0) -> dict[str, Any]:
    strides = [1] if len(shape) == 1 else [shape[1], 1]
    spec = {"shape": shape, "strides": strides, "dtype": "float32", "storage": storage}
    return {**spec, "offset": offset}


def test_views_count_once_and_tables_not_at_all() -> None:
    mine = {
        "made": {
            "0": made([10, 10], 0),
            "1": made([5], 0, offset=100),
            "2": made([1000, 1000], 1),
            "3": made([7], 2),
        },
        "calls": [
            {"op": "aten::relu", "reads": [0]},
            {"op": "aten::add", "reads": [1]},
            {"op": "aten::embedding", "reads": [2]},
            {"op": "aten::sum", "reads": [3]},
        ],
    }
    assert needed_bytes(mine, [0]) == 4 * 100
    assert needed_bytes(mine, [0, 1, 2]) == 4 * 105
    assert needed_bytes(mine, [0, 1, 2, 3]) == 4 * (105 + 7)
    assert needed_bytes(mine, []) == 0


def test_the_largest_result_counts_and_views_do_not() -> None:
    result = {"outputs": [[[20, 5], [5, 1], "float64"]], "gives": [1]}
    spread = {"outputs": [[[20, 5], [0, 1], "float64"]], "gives": [1]}
    calls = [
        {"op": "aten::mm", **result},
        {"op": "aten::add_", **{**result, "gives": []}},
        {"op": "aten::view", **result},
        {"op": "aten::copy", **spread},
    ]
    assert needed_bytes({"made": {}, "calls": calls}, [0]) == 8 * 100
    assert needed_bytes({"made": {}, "calls": calls}, [1, 2]) == 0
    assert needed_bytes({"made": {}, "calls": calls}, [3]) == 8 * 5


def test_ranks_of_a_machine_share_its_memory() -> None:
    assert not too_large([3 * GIB, 4 * GIB], 7 * GIB)
    said = too_large([3 * GIB, 5 * GIB], 7 * GIB)
    assert "take 8.0 GiB (2 ranks, the largest 5.0 GiB), and 7.0 GiB" in said
    assert "--ranks" in said
    assert 0 < available_bytes() < 1 << 60
