"""Critical cycles of one rank in plain numbers, with operations that plans may do without."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from predictor.iteration.graph import Dep, Graph
from predictor.iteration.timeline import simulate
from search.bound.cycle import compile_rank

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
            cost_ms=np.full(rng.choice([(1,), (1, 1)]), rng.choice([0.0, 0.05, rng.random()])),
            host_ms=rng.choice([0.0, 0.01, 0.05]),
            kernels=rng.choice([1, 1, 3]),
            deps=[rng.randrange(i)] if i and rng.random() < 0.6 else [],
            blocks_host=rng.random() < 0.05,
            thread=rng.choice(["main", "main", "main", "other"]),
        )
    for _ in range(3):
        graph.wait(rng.randrange(OPS), Dep(rng.randrange(OPS), rng.choice([1, 2])))
    return graph


def cycle_ms(graph: Graph, gone: list[bool]) -> float:
    costs = [op.cost_on(0) for op in graph.ops]
    program, origin = compile_rank(graph, gone)
    assert len(origin) == OPS + sum(gone)
    _, length, iterations = program.critical_cycle([costs[op] for op in origin])
    return length / iterations


@pytest.mark.parametrize("seed", range(30))
def test_it_sets_the_period(seed: int) -> None:
    graph = a_graph(seed)
    assert cycle_ms(graph, [False] * OPS) == pytest.approx(simulate(graph).iteration_ms[0])


@pytest.mark.parametrize("seed", range(10))
def test_what_plans_may_do_without_never_makes_it_longer(seed: int) -> None:
    graph, rng = a_graph(seed), random.Random(seed)
    gone = [rng.random() < 0.2 for _ in range(OPS)]
    assert cycle_ms(graph, gone) <= cycle_ms(graph, [False] * OPS) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_it_bounds_plans_without_them_too(seed: int) -> None:
    graph, rng = a_graph(seed), random.Random(seed)
    gone = [rng.random() < 0.2 for _ in range(OPS)]
    without = [
        replace(op, cost_ms=0 * op.cost_ms, active=np.array([False])) if left_out else op
        for op, left_out in zip(graph.ops, gone, strict=True)
    ]
    absent = replace(graph, ops=without)
    assert cycle_ms(absent, gone) <= simulate(absent).iteration_ms[0] * (1 + 1e-9)
