"""The chain that fills an iteration: no gap, no overlap, and the right operations."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from predictor.iteration.critical_path import HOST, critical_path
from predictor.iteration.graph import Dep, Graph
from predictor.iteration.timeline import MAX_ITERATIONS, simulate
from tests.predictor.iteration.graphs import add, random_graph


def parts(graph: Graph) -> dict[str, float]:
    durations: dict[str, float] = {}
    for segment in critical_path(graph, simulate(graph, keep_steps=True)):
        durations[segment.name] = durations.get(segment.name, 0) + segment.duration_ms
    return durations


def test_the_path_goes_through_the_rank_that_came_last() -> None:
    graph = Graph(2, 2)
    lookup = add(graph, "lookup", [1.0, 3.0])
    exchange = add(graph, "exchange", 2.0, "comm", deps=[lookup], scope="world")
    add(graph, "dense", 4.0, deps=[exchange])
    path = critical_path(graph, simulate(graph, keep_steps=True))
    assert [s.name for s in path] == ["lookup", "exchange", "dense"]
    assert [s.duration_ms for s in path] == pytest.approx([3, 2, 4])
    assert path[0].rank == 1


def test_a_late_host_is_charged_to_the_host() -> None:
    graph = Graph(1, 1, frozenset({"host"}))
    add(graph, "read", 1.0, "host")
    add(graph, "dense", 2.0, host_ms=5.0)
    add(graph, "after", 0.5, host_ms=4.0, blocks_host=True)
    durations = parts(graph)
    assert durations == pytest.approx({"read": 1.0, "host issues work": 9.0, "after": 0.5})
    path = critical_path(graph, simulate(graph, keep_steps=True))
    assert {s.phase for s in path if s.name == "host issues work"} == {HOST}


def test_work_that_nothing_waits_for_is_not_on_the_path() -> None:
    graph = Graph(1, 1, frozenset({"host"}))
    add(graph, "read", 1.0, "host")
    add(graph, "dense", 2.0, host_ms=5.0)
    add(graph, "average", 3.0)
    assert parts(graph) == pytest.approx({"read": 1.0, "host issues work": 5.0})


def test_a_stream_that_is_ahead_of_the_pace_is_not_on_the_path() -> None:
    graph = Graph(1, 1)
    add(graph, "slow start", 1.0, "copy", host_ms=0.1)
    add(graph, "pace", 4.0, "compute")
    add(graph, "late", 3.5, "comm", deps=[Dep(1)])
    assert parts(graph) == pytest.approx({"pace": 4.0})


@given(st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_work_off_the_path_may_cost_nothing(seed: int) -> None:
    graph = random_graph(seed)
    timeline = simulate(graph, keep_steps=True)
    assume(len(timeline.steps) < MAX_ITERATIONS)  # else the path is one of several periods
    named = {segment.name for segment in critical_path(graph, timeline)}
    for op in graph.ops:
        if op.name not in named:
            without = [replace(o, cost_ms=0 * o.cost_ms) if o is op else o for o in graph.ops]
            faster = simulate(replace(graph, ops=without)).iteration_ms[0]
            assert faster == pytest.approx(timeline.iteration_ms[0], rel=1e-6)


@given(st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_parts_add_up_and_follow_each_other(seed: int) -> None:
    graph = random_graph(seed)
    timeline = simulate(graph, keep_steps=True)
    path = critical_path(graph, timeline)
    total = sum(s.duration_ms for s in path)
    assert total == pytest.approx(timeline.iteration_ms[0], rel=1e-9, abs=1e-7)
    for before, after in pairwise(path):
        assert before.end_ms == pytest.approx(after.start_ms)
    if path:
        assert path[-1].end_ms <= timeline.finish_ms[0] + 1e-9
    for segment in path:
        costs = [op.cost_ms.max() for op in graph.ops if op.name == segment.name]
        assert segment.phase == HOST or segment.duration_ms <= max(costs) + 1e-9
