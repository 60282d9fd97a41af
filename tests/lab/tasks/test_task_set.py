"""Plans in parts: what runs at once, and what fits into no part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab.tasks import task_set as parts
from lab.tasks.plans import data_parallel
from lab.tasks.task_set import (
    MAX_AT_ONCE,
    in_window,
    part_path,
    part_paths,
    split_plans,
    split_window,
)
from predictor.model.plan import ShardingPlan
from shardopt.bench.job import rank_bytes
from tests.builders import a_table, a_topology, a_workload, plan_of, table_wise

TABLE = a_table("t", 100_000, 64)
MODEL = a_workload(TABLE)
RANKS = a_topology()


def plans(count: int) -> dict[str, ShardingPlan]:
    """Plans that differ, as the same one is built once."""
    drawn = [plan_of(MODEL, RANKS, [table_wise(TABLE, n % 2)]) for n in range(count)]
    return {f"p{n}": replace(plan, meta={"number": n}) for n, plan in enumerate(drawn)}


def bytes_of(*several: ShardingPlan) -> float:
    return sum(rank_bytes(MODEL, several))


def memory_for(count: int) -> float:
    """Return the memory of a machine whose half holds so many plans."""
    return bytes_of(*plans(count).values()) / parts.MEMORY_SHARE


@pytest.mark.parametrize("count", [2, 5, 8])
def test_every_part_has_the_first_plan_and_fits(count: int) -> None:
    parts, left_out = split_plans(MODEL, plans(8), memory_for(count) + 1)
    assert not left_out
    assert all(next(iter(part)) == "p0" for part in parts)
    assert [name for part in parts for name in list(part)[1:]] == [f"p{n}" for n in range(1, 8)]
    assert max(map(len, parts)) == count
    assert len(parts) == -(-7 // (count - 1))


def test_not_too_many_at_once() -> None:
    parts, _ = split_plans(MODEL, plans(60), 1e15)
    assert list(map(len, parts)) == [MAX_AT_ONCE, MAX_AT_ONCE, 60 - 2 * (MAX_AT_ONCE - 1)]


def test_a_plan_too_large_for_any_part_is_left_out() -> None:
    copied = plan_of(MODEL, RANKS, [data_parallel(TABLE, 2)])
    candidates = {**plans(2), "copied": copied, "last": plans(2)["p1"]}
    parts, left_out = split_plans(MODEL, candidates, memory_for(3))
    assert (list(map(list, parts)), left_out) == ([["p0", "p1", "last"]], ["copied"])


def test_parts_are_found_in_their_order(tmp_path: Path) -> None:
    assert part_paths(tmp_path, "task-007") == []
    expected = [part_path(tmp_path, "task-007", n) for n in range(1, 12)]
    for path in expected:
        path.touch()
    (tmp_path / "task-007.again.rows.json").touch()
    assert part_paths(tmp_path, "task-007") == expected


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (in_window("nominal", 2), ("nominal", 2)),
        ("nominal", ("nominal", 1)),
        ("plans @home.json", ("plans @home.json", 1)),
    ],
)
def test_a_name_says_the_window(name: str, found: tuple[str, int]) -> None:
    assert split_window(name) == found


def test_a_plan_in_two_windows_takes_its_memory_once() -> None:
    plan = plan_of(MODEL, RANKS, [table_wise(TABLE, 0)])
    assert rank_bytes(MODEL, [plan]) == rank_bytes(MODEL, [plan, plan])
