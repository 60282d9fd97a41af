"""The compiled timeline gives the timeline's figures, whatever the graph."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from predictor.iteration.graph import Dep, Graph
from predictor.iteration.steady_state import CompiledTimeline, compile_timeline
from predictor.iteration.timeline import simulate

RANKS, WIDTH, PLANS = 4, 2, 6
STREAMS = ("host", "compute", "comm", "copy")
SCOPES = (None, None, "world", "intra", "cross")


def random_graph(structure: int, costs: int, *, whole: bool) -> Graph:
    """Graphs of one structure, whose costs and missing operations differ."""
    pick, values = random.Random(structure), np.random.default_rng(costs)
    graph = Graph(RANKS, WIDTH, frozenset({"host"}), pick.choice([0.0, 0.3]))
    count = pick.randint(3, 14)
    for index in range(count):
        stream = pick.choice(STREAMS)
        before = pick.sample(range(index), min(index, pick.randint(0, 2)))
        shape = pick.choice([(1,), (PLANS, 1), (PLANS, RANKS)])
        optional = not whole and pick.random() < 0.4
        graph.add(
            f"op {index}",
            phase="",
            resource="",
            stream=stream,
            cost_ms=pick.uniform(0, 3) if shape == (1,) else values.uniform(0, 3, shape),
            host_ms=pick.choice([0.0, 0.5, 2.0]),
            kernels=pick.choice([1, 3]),
            deps=[Dep(op) for op in before],
            scope=None if stream == "host" else pick.choice(SCOPES),
            blocks_host=pick.random() < 0.1,
            active=values.random(PLANS) < 0.6 if optional else None,
            thread=pick.choice(["main", "main", "other"]),
        )
    for _ in range(pick.randint(0, 3)):
        graph.wait(pick.randrange(count), Dep(pick.randrange(count), lag=pick.randint(1, 3)))
    return graph


@pytest.mark.parametrize("whole", [True, False])
def test_a_program_equals_the_timeline(whole: bool) -> None:
    for seed in range(150):
        program = CompiledTimeline(random_graph(seed, 0, whole=whole), whole=whole)
        for costs in (0, 1):
            graph = random_graph(seed, costs, whole=whole)
            expected = simulate(graph, plans=PLANS).iteration_ms
            assert program.iteration_ms(graph, PLANS) == pytest.approx(
                expected, rel=1e-9, abs=1e-12
            )


def variants(graph: Graph) -> Iterator[Graph]:
    """Graphs that differ from one in a single thing that a program depends on."""
    op, (first, *rest) = graph.ops[-1], graph.ops
    yield replace(graph, launch_latency_ms=graph.launch_latency_ms + 1.0)
    yield replace(graph, inline_streams=frozenset())
    yield replace(graph, intra_group_size=1)
    for change in (
        {"host_ms": op.host_ms + 1.0},
        {"kernels": op.kernels + 2},
        {"blocks_host": not op.blocks_host},
        {"deps": () if op.deps else (Dep(0, lag=1),)},
        {"scope": None if op.scope else "world"},
        {"thread": "third"},
        {"stream": "compute" if op.stream == "copy" else "copy"},
        {"cost_ms": np.array([9.0])},
        {"cost_ms": np.linspace(9.0, 10.0, RANKS)[None]},
        {"active": np.arange(PLANS) % 2 == 0},
    ):
        yield replace(graph, ops=[first, *rest[:-1], replace(op, **change)])


def test_only_graphs_of_one_program_share_it() -> None:
    for seed in range(30):
        graph = random_graph(seed, 0, whole=True)
        shared = compile_timeline(graph, whole=True)
        assert compile_timeline(random_graph(seed, 1, whole=True), whole=True) is shared
        for other in variants(graph):
            whole = all(op.active is None for op in other.ops)
            found = compile_timeline(other, whole=whole).iteration_ms(other, PLANS)
            expected = simulate(other, plans=PLANS).iteration_ms
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def left_out(graph: Graph, plan: int) -> Graph:
    """The graph of a plan without the operations that it does not have; their dependants wait for
    what they would have waited for."""
    there = [op.active is None or bool(op.active[plan]) for op in graph.ops]
    place = [sum(there[:index]) for index in range(len(there))]

    def deps(waits: tuple[Dep, ...], lag: int = 0) -> Iterator[Dep]:
        for dep in waits:
            if there[dep.op]:
                yield Dep(place[dep.op], dep.lag + lag)
            else:
                yield from deps(graph.ops[dep.op].deps, dep.lag + lag)

    ops = []
    for op, exists in zip(graph.ops, there, strict=True):
        if exists:
            costs = np.atleast_2d(op.cost_ms)
            own = costs[min(plan, len(costs) - 1)]
            ops.append(replace(op, cost_ms=own, active=None, deps=tuple(deps(op.deps))))
    return replace(graph, ops=ops)


def test_an_operation_that_a_plan_does_not_have_is_as_if_it_were_left_out() -> None:
    for seed in range(150):
        graph = random_graph(seed, 0, whole=False)
        if all(op.active is None or all(dep.lag == 0 for dep in op.deps) for op in graph.ops):
            together_ms = simulate(graph, plans=PLANS).iteration_ms
            expected = [simulate(left_out(graph, p)).iteration_ms[0] for p in range(PLANS)]
            assert together_ms == pytest.approx(np.array(expected), rel=1e-9, abs=1e-12)


def test_a_critical_cycle_sets_the_period() -> None:
    for seed in range(150):
        graph = random_graph(seed, 0, whole=True)
        graph.ops = [replace(op, cost_ms=op.cost_ms[:1]) for op in graph.ops]
        period = float(simulate(graph).iteration_ms[0])
        costs = [np.atleast_2d(op.cost_ms).T for op in graph.ops]
        _, length, iterations = CompiledTimeline(graph, whole=True).critical_cycle(costs)
        assert length / iterations == pytest.approx(period), seed


def test_what_single_ranks_have_is_refused() -> None:
    graph = Graph(2, 2)
    graph.add("op", phase="", resource="", stream="compute", cost_ms=1.0, ranks=(0,))
    with pytest.raises(ValueError, match="'op' is not the same on all ranks"):
        CompiledTimeline(graph, whole=True)
