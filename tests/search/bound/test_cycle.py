"""The cycle of one rank in plain numbers is that of the timeline."""

from __future__ import annotations

import random

import pytest

from predictor.iteration.critical_path import critical_cycle as cycle_of_timeline
from predictor.iteration.graph import Dep, Graph
from predictor.iteration.timeline import simulate
from search.bound.cycle import critical_cycle, make_nodes

OPS = 40


def a_graph(seed: int) -> Graph:
    """Several threads and streams, launches that come late, waits for other iterations."""
    rng = random.Random(seed)
    graph = Graph(1, 1, frozenset(["host", "compute"][: 1 + (seed % 4 == 0)]), 0.01)
    for i in range(OPS):
        graph.add(
            str(i),
            phase="any",
            resource="any",
            stream=rng.choice(["compute", "compute", "comm", "host", "copy"]),
            cost_ms=rng.choice([0.0, 0.05, rng.random()]),
            host_ms=rng.choice([0.0, 0.01, 0.05]),
            kernels=rng.choice([1, 1, 3]),
            deps=[rng.randrange(i)] if i and rng.random() < 0.6 else [],
            blocks_host=rng.random() < 0.05,
            thread=rng.choice(["main", "main", "main", "other"]),
        )
    for _ in range(3):
        graph.wait(rng.randrange(OPS), Dep(rng.randrange(OPS), rng.choice([1, 2])))
    return graph


@pytest.mark.parametrize("seed", range(30))
def test_it_sets_the_period(seed: int) -> None:
    graph = a_graph(seed)
    found = cycle_of_timeline(graph, simulate(graph, keep_steps=True))
    assert found is not None
    nodes, origin = make_nodes(graph, [False] * OPS)
    assert origin == [*range(OPS)]
    costs = [float(op.cost_ms[0]) for op in graph.ops]
    ops, length, iterations = critical_cycle(nodes, costs)
    assert length / iterations == pytest.approx(found[1] / found[2])
    assert bool(ops) == bool(found[0])


@pytest.mark.parametrize("seed", range(10))
def test_what_plans_may_do_without_never_makes_it_longer(seed: int) -> None:
    rng = random.Random(seed)
    graph = a_graph(seed)
    gone = [rng.random() < 0.2 for _ in range(OPS)]
    costs = [float(op.cost_ms[0]) for op in graph.ops]
    whole = critical_cycle(make_nodes(graph, [False] * OPS)[0], costs)
    nodes, origin = make_nodes(graph, gone)
    assert len(nodes) == OPS + sum(gone)
    part = critical_cycle(nodes, [costs[op] for op in origin])
    assert part[1] / part[2] <= whole[1] / whole[2] * (1 + 1e-9)
