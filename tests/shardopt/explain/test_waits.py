"""Waits on the critical path: who, for whom, how long, and whose tables are named."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.iteration.graph import Graph
from predictor.model.workload import Feature
from shardopt.explain.waits import Cause, Wait, find_waits, host_work
from tests.builders import a_table, hardware
from tests.shardopt.report.plans import WORLD, a_problem, predicted, tables, whole

HEAVY = a_table("heavy", 10_000_000, features=(Feature("ids", 60.0),))
"""Ids that are all but distinct: its lookup takes many times as long as the others'."""


def test_the_late_rank_and_its_heaviest_table_are_named() -> None:
    problem = a_problem([*tables(1000, 1000, 1000, 1000), HEAVY])
    plan = whole(problem, [0, 1, 2, 3, 2])
    waits = find_waits(problem, plan, predicted(problem, plan).prediction)
    forward = next(wait for wait in waits if wait.phase == "output_dist_forward")
    assert (forward.late_rank, forward.rank != 2) == (2, True)
    (name, share), *_ = forward.causes[0].tables.items()
    assert (name, share > 0.9) == ("heavy", True)
    assert "for rank 2's lookup of heavy" in forward.words
    explained = sum(cause.excess_ms for cause in forward.causes) / forward.wait_ms
    assert 0.9 < explained <= 1 + 1e-9  # ids to reorder are the rest, too little to be named
    assert all(cause.excess_ms <= cause.late_ms for cause in forward.causes)


def test_ranks_on_hosts_wait_at_meetings_that_take_no_time() -> None:
    problem = replace(a_problem([*tables(1000, 1000), HEAVY], 2), hardware=hardware("cpu-gloo"))
    plan = whole(problem, [0, 1, 1])
    waits = find_waits(problem, plan, predicted(problem, plan).prediction)
    assert {(wait.rank, wait.late_rank) for wait in waits} == {(0, 1)}
    assert "heavy" in waits[0].words


@pytest.mark.parametrize("world", [1, WORLD])
def test_equal_ranks_wait_for_no_one(world: int) -> None:
    problem = a_problem(tables(*[1000] * world), world)
    plan = whole(problem, range(world))
    assert find_waits(problem, plan, predicted(problem, plan).prediction) == []


@settings(max_examples=25)
@given(st.lists(st.integers(0, WORLD - 1), min_size=5, max_size=5))
def test_waits_lie_on_the_path_and_within_the_iteration(ranks: list[int]) -> None:
    problem = a_problem([*tables(1000, 50_000, 2_000_000, 100), HEAVY])
    plan = whole(problem, ranks)
    prediction = predicted(problem, plan).prediction
    on_path = {segment.rank for segment in prediction.critical_path}
    waits = find_waits(problem, plan, prediction)
    assert [w.wait_ms for w in waits] == sorted((w.wait_ms for w in waits), reverse=True)
    for wait in waits:
        assert wait.late_rank in on_path
        assert wait.rank != wait.late_rank
        idle_ms = prediction.per_rank[wait.rank].idle_ms
        assert 0 <= wait.median_ms <= wait.wait_ms <= idle_ms + 1e-9
        for cause in wait.causes:
            on_late_rank = {
                key for key, table in plan.tables.items() if wait.late_rank in table.ranks
            }
            assert set(cause.tables) <= on_late_rank
            assert sum(cause.tables.values()) <= 1 + 1e-9


def test_of_many_equal_tables_a_few_are_named() -> None:
    problem = a_problem(tables(*(1000,) * 12))
    plan = whole(problem, [0] * 9 + [1, 2, 3])
    waits = find_waits(problem, plan, predicted(problem, plan).prediction)
    assert any("and 6 more" in wait.words for wait in waits)


def test_words_without_a_cause_name_the_rank_alone() -> None:
    wait = Wait("x.all_to_all", "output_dist_forward", 1, 0, 2.0, 1.0, 1, ())
    assert wait.words.startswith("Rank 1 waits 2.000 ms for rank 0 before")
    uncaused = Cause("bottom.0", "dense_forward", 1.0, 0.5, {})
    assert "for rank 0's bottom.0 before" in replace(wait, causes=(uncaused,)).words


def test_phases_of_the_busiest_host_the_longest_first() -> None:
    graph = Graph(2, 2)
    for phase, host_ms, ranks in (
        ("input_dist", 0.5, None),
        ("dense_forward", 1.0, None),
        ("input_dist", 0.75, (1,)),
        ("optimizer", 0.0, None),
    ):
        graph.add(
            phase, phase=phase, resource="gemm", stream="compute", cost_ms=np.array(1.0),
            host_ms=host_ms, ranks=ranks,
        )  # fmt: skip
    work = host_work(graph)
    assert list(work) == ["input_dist", "dense_forward"]
    assert work == pytest.approx({"input_dist": 1.25, "dense_forward": 1.0})


def test_a_graph_without_ops_has_no_host_work() -> None:
    assert host_work(Graph(1, 1)) == {}
