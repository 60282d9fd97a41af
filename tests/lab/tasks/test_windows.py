"""Which window a plan runs in, by its name; the same plan counts and is built once."""

import pytest

from lab.tasks.windows import in_window, split_window
from predictor.model.plan import ShardingPlan
from shardopt.bench.job import rank_bytes
from tests.builders import a_table, a_topology, a_workload, plan_of, table_wise

WORKLOAD = a_workload(a_table("t", rows=1000, dim=8))
TOPOLOGY = a_topology(2, 2)


def on_rank(rank: int) -> ShardingPlan:
    return plan_of(WORKLOAD, TOPOLOGY, [table_wise(WORKLOAD.tables[0], rank)])


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
    assert rank_bytes(WORKLOAD, [on_rank(0)]) == rank_bytes(WORKLOAD, [on_rank(0), on_rank(0)])
