"""Several host threads, operations of some ranks only, groups of ranks, and a single run."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.iteration.critical_path import critical_path
from predictor.iteration.graph import Dep, Graph, Op
from predictor.iteration.timeline import Timeline, simulate_once
from tests.predictor.iteration.graphs import add

seeds = st.integers(0, 10**6)
RANKS = 3
THREADS = ("main", "autograd")
INLINE = frozenset({"host main", "host autograd"})


def random_trace_graph(seed: int) -> Graph:
    """Threads that wait for each other, three streams, collectives of two or three ranks."""
    pick = random.Random(seed)
    graph = Graph(RANKS, RANKS, INLINE, launch_latency_ms=pick.choice([0.0, 0.3]))
    for index in range(pick.randint(1, 16)):
        thread = pick.choice(THREADS)
        kind = pick.choice(["host", "kernel", "kernel", "copy", "collective"])
        deps = [Dep(pick.randrange(index)) for _ in range(min(index, pick.randint(0, 2)))]
        ranks: tuple[int, ...] | None = None
        if kind == "collective":
            ranks = pick.choice([(0, 1, 2), (0, 1), (1, 2)])
        elif pick.random() < 0.6:
            ranks = (pick.randrange(RANKS),)
        cost = [pick.uniform(0, 5) for _ in range(RANKS)]
        stream = {"host": f"host {thread}", "collective": "comm"}.get(kind, kind)
        add(
            graph,
            f"op{index}",
            cost,
            stream,
            host_ms=pick.choice([0.0, 0.1, 2.0]),
            deps=deps,
            scope=ranks if kind == "collective" else None,
            blocks_host=pick.random() < 0.15,
            thread=thread,
            ranks=ranks,
        )
    return graph


def there(op: Op, rank: int) -> bool:
    return op.ranks is None or rank in op.ranks


def longest_path(graph: Graph) -> float:
    """By dependencies and costs alone, in the ranks that an operation exists on."""
    best = np.zeros((len(graph.ops), RANKS))
    for index, op in enumerate(graph.ops):
        ready = np.max([np.zeros(RANKS), *(best[d.op] for d in op.deps)], axis=0)
        if op.scope is not None:
            ready[list(op.ranks or ())] = ready[list(op.ranks or ())].max()
        best[index] = [ready[r] + op.cost_ms[r] if there(op, r) else ready[r] for r in range(RANKS)]
    return float(best.max())


def busy(graph: Graph) -> float:
    """The stream or thread with the most to do."""
    spent: dict[tuple[str, int], float] = {}
    for op in graph.ops:
        for rank in range(RANKS):
            if not there(op, rank):
                continue
            inline = op.stream in graph.inline_streams
            thread, stream = ("thread " + op.thread, rank), (op.stream, rank)
            spent[thread] = spent.get(thread, 0) + op.host_ms + (op.cost_ms[rank] if inline else 0)
            spent[stream] = spent.get(stream, 0) + op.cost_ms[rank]
    return max(spent.values(), default=0.0)


def total(graph: Graph) -> float:
    return float(simulate_once(graph).iteration_ms[0])


@given(seeds)
@settings(max_examples=150, deadline=None)
def test_never_below_the_longest_path_nor_a_resource(seed: int) -> None:
    graph = random_trace_graph(seed)
    total_ms = total(graph)
    assert total_ms >= longest_path(graph) - 1e-9
    assert total_ms >= busy(graph) - 1e-9


@given(seeds)
@settings(max_examples=150, deadline=None)
def test_more_work_and_more_dependencies_never_end_earlier(seed: int) -> None:
    graph, pick = random_trace_graph(seed), random.Random(seed)
    before = simulate_once(graph).steps[0]
    index = pick.randrange(len(graph.ops))
    op = graph.ops[index]
    if index and pick.random() < 0.5:
        longer = replace(op, deps=(*op.deps, Dep(pick.randrange(index))))
    else:
        longer = replace(op, cost_ms=op.cost_ms + 3.0, host_ms=op.host_ms + 0.5)
    graph.ops[index] = longer
    assert (simulate_once(graph).steps[0].end >= before.end - 1e-9).all()


@given(seeds)
@settings(max_examples=100, deadline=None)
def test_collectives_start_together_and_absent_ranks_hold_nobody(seed: int) -> None:
    graph = random_trace_graph(seed)
    step = simulate_once(graph).steps[0]
    for index, op in enumerate(graph.ops):
        if op.scope is not None:
            assert isinstance(op.scope, tuple)
            starts = step.start[index, 0, list(op.scope)]
            assert starts == pytest.approx(step.ready[index, 0, list(op.scope)].max())


@given(seeds)
@settings(max_examples=100, deadline=None)
def test_the_critical_path_fills_the_run_without_gaps(seed: int) -> None:
    graph = random_trace_graph(seed)
    timeline = simulate_once(graph)
    path = critical_path(graph, timeline)
    assert sum(s.duration_ms for s in path) == pytest.approx(timeline.iteration_ms[0], abs=1e-6)
    for a, b in pairwise(path):
        assert b.start_ms == pytest.approx(a.end_ms, abs=1e-6)


def test_the_backward_runs_on_its_own_thread_while_the_main_one_waits() -> None:
    graph = Graph(1, 1, INLINE)
    call = add(graph, "calls backward", 1.0, "host main")
    begins = add(graph, "begins", 0.0, "host autograd", deps=[call], thread="autograd")
    grad = add(graph, "gradient", 5.0, host_ms=2.0, thread="autograd")
    ends = add(graph, "ends", 0.5, "host autograd", thread="autograd")
    after = add(graph, "continues", 1.0, "host main", deps=[ends])
    step = simulate_once(graph).steps[0]
    end = step.end[:, 0, 0]
    assert end[begins] == pytest.approx(1)
    assert step.start[grad, 0, 0] == pytest.approx(3)
    assert end[ends] == pytest.approx(3.5)  # launches run ahead of the device
    assert end[after] == pytest.approx(4.5)
    assert total(graph) == pytest.approx(8)


def filled(fills: bool, *, beside: bool | None = False) -> Timeline:
    graph = Graph(1, 1)
    add(graph, "large", 5.0, "compute", host_ms=1.0)
    add(graph, "small", 1.0, "side", host_ms=1.0)
    both = zip(graph.ops, (fills, beside), strict=True)
    graph.ops = [replace(op, fills=value) for op, value in both]
    return simulate_once(graph)


def test_what_becomes_ready_beside_a_kernel_that_fills_the_device_waits_for_it() -> None:
    assert filled(True).steps[0].start[1, 0, 0] == pytest.approx(6)
    assert filled(False).steps[0].start[1, 0, 0] == pytest.approx(2)
    assert filled(True, beside=None).steps[0].start[1, 0, 0] == pytest.approx(2), "a copy"
