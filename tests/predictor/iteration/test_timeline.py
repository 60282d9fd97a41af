"""The synchronized timeline: hand-computed cases, and bounds that hold for every graph."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.iteration.graph import Dep, Graph
from predictor.iteration.timeline import simulate
from tests.predictor.iteration.graphs import add, random_graph

seeds = st.integers(0, 10**6)


def period(graph: Graph, plans: int = 1) -> float:
    return float(simulate(graph, plans=plans).iteration_ms[0])


def test_a_collective_waits_for_its_last_rank() -> None:
    graph = Graph(2, 2)
    lookup = add(graph, "lookup", [1.0, 3.0])
    exchange = add(graph, "exchange", 2.0, "comm", deps=[lookup], scope="world")
    add(graph, "dense", 4.0, deps=[exchange])
    timeline = simulate(graph, keep_steps=True)
    assert timeline.iteration_ms == pytest.approx([3 + 2 + 4])
    step = timeline.steps[0]
    assert step.ready[1, 0] == pytest.approx([1, 3])
    assert step.start[1, 0] == pytest.approx([3, 3])
    assert step.end[2, 0] == pytest.approx([9, 9])


def test_work_of_two_streams_overlaps_across_iterations() -> None:
    """The exchange of a batch hides behind the compute of the one before (lag 1)."""
    graph = Graph(1, 1)
    exchange = add(graph, "exchange", 5.0, "comm")
    compute = add(graph, "compute", 7.0)
    graph.wait(compute, Dep(exchange, lag=1))
    assert period(graph) == pytest.approx(7)
    serial = Graph(1, 1)
    add(serial, "compute", 7.0, deps=[add(serial, "exchange", 5.0, "comm")])
    serial.wait(0, Dep(1, lag=1))
    assert period(serial) == pytest.approx(12)


@pytest.mark.parametrize(("lag", "expected"), [(1, 10.0), (2, 5.0), (3, 10 / 3)])
def test_a_loop_over_several_iterations_counts_its_mean(lag: int, expected: float) -> None:
    """A -> B -> A of `lag` iterations later: the period is the length over the iterations."""
    graph = Graph(1, 1)
    first = add(graph, "a", 3.0, "a" * 1)
    second = add(graph, "b", 3.0, "b", deps=[first])
    third = add(graph, "c", 4.0, "c", deps=[second])
    graph.wait(first, Dep(third, lag=lag))
    assert period(graph) == pytest.approx(max(expected, 4.0), rel=1e-6)


def test_launches_run_ahead_but_a_kernel_cannot_start_before_its_launch() -> None:
    graph = Graph(1, 1, launch_latency_ms=1.0)
    add(graph, "late", 0.5, host_ms=6.0, kernels=3)
    step = simulate(graph, keep_steps=True).steps[0]
    assert step.start[0, 0, 0] == pytest.approx(2 + 1)
    assert step.end[0, 0, 0] == pytest.approx(6 + 1)  # its last kernel is launched at 6
    assert period(graph) == pytest.approx(6)


def test_the_host_waits_where_it_blocks() -> None:
    free, blocked = Graph(1, 1), Graph(1, 1)
    for graph, blocks in ((free, False), (blocked, True)):
        add(graph, "compute", 10.0, host_ms=1.0, blocks_host=blocks)
        add(graph, "issue", 0.0, "other", host_ms=4.0)
    assert period(free) == pytest.approx(10)
    assert period(blocked) == pytest.approx(15)


def test_inline_streams_are_the_host() -> None:
    graph = Graph(1, 1, frozenset({"compute"}))
    add(graph, "a", 3.0, host_ms=1.0)
    exchange = add(graph, "b", 5.0, "comm", host_ms=1.0)
    add(graph, "c", 2.0, deps=[exchange])
    assert period(graph) == pytest.approx(1 + 3 + 1 + 5 + 2)


@given(seeds)
@settings(max_examples=80, deadline=None)
def test_never_below_busy_streams_or_dependency_paths(seed: int) -> None:
    graph = random_graph(seed)
    timeline = simulate(graph, keep_steps=True)
    busy: dict[str, np.ndarray] = {}
    host = sum(op.host_ms for op in graph.ops)
    for op in graph.ops:
        busy[op.stream] = busy.get(op.stream, np.zeros(4)) + op.cost_ms
    floor = max(host, *(float(b.max()) for b in busy.values()))
    assert timeline.iteration_ms[0] >= floor * (1 - 1e-9)
    for iteration, step in enumerate(timeline.steps):
        for index, op in enumerate(graph.ops):
            assert (step.end[index] >= step.start[index] + op.cost_ms - 1e-9).all()
            for dep in op.deps:
                if iteration >= dep.lag:
                    before = timeline.steps[iteration - dep.lag].end[dep.op]
                    assert (step.start[index] >= before - 1e-9).all()
