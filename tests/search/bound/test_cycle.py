"""Critical cycles of one rank in plain numbers, with operations that plans may do without."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, combinations

import numpy as np
import pytest

from predictor.iteration.graph import Dep, Graph
from predictor.iteration.timeline import simulate
from search.bound.cycle import Users, compile_rank
from tests.quick import seeds

OPS = 40


def a_graph(seed: int, threads: Sequence[str] = ("main", "main", "main", "other")) -> Graph:
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
            thread=rng.choice(threads),
        )
    for _ in range(3):
        graph.wait(rng.randrange(OPS), Dep(rng.randrange(OPS), rng.choice([1, 2])))
    return graph


def cycle_ms(graph: Graph, users: Sequence[Users]) -> float:
    costs = [op.cost_on(0) for op in graph.ops]
    program, origin = compile_rank(graph, users)
    assert len(origin) == len(users) + sum(groups is not None for groups in users)
    _, length, iterations = program.critical_cycle([costs[op] for op in origin])
    return length / iterations


def some_optional(seed: int, share: float = 0.2) -> list[Users]:
    """Operations that plans have if they use one of a few groups."""
    rng = random.Random(seed)
    return [
        frozenset(rng.sample(range(4), rng.choice([1, 1, 2]))) if rng.random() < share else None
        for _ in range(OPS)
    ]


def without(graph: Graph, users: Sequence[Users], used: set[int]) -> Graph:
    """The graph of a plan that uses some groups."""
    ops = [
        op
        if groups is None or groups & used
        else replace(op, cost_ms=0 * op.cost_ms, active=np.array([False]))
        for op, groups in zip(graph.ops, users, strict=True)
    ]
    return replace(graph, ops=ops)


@pytest.mark.parametrize("seed", range(30))
def test_it_sets_the_period(seed: int) -> None:
    graph = a_graph(seed)
    assert cycle_ms(graph, [None] * OPS) == pytest.approx(simulate(graph).iteration_ms[0])


@pytest.mark.parametrize("seed", range(10))
def test_what_plans_may_do_without_never_makes_it_longer(seed: int) -> None:
    graph = a_graph(seed)
    assert cycle_ms(graph, some_optional(seed)) <= cycle_ms(graph, [None] * OPS) * (1 + 1e-9)


@pytest.mark.parametrize("share", [0.2, 0.6])
@pytest.mark.parametrize("seed", seeds(range(6), 300))
def test_it_bounds_plans_with_any_of_the_groups(seed: int, share: float) -> None:
    """Operations that a plan has not cost nothing; one thread issues all, as in graphs of plans."""
    graph, users = a_graph(seed, ["main"]), some_optional(seed, share)
    for used in chain.from_iterable(combinations(range(4), n) for n in range(5)):
        plan = without(graph, users, set(used))
        assert cycle_ms(plan, users) <= simulate(plan).iteration_ms[0] * (1 + 1e-9)


def test_outputs_wait_for_their_lookup_and_that_for_what_all_plans_compute() -> None:
    """Cut loose from the stream of its lookup, the exchange would overlap all of the rest."""
    graph = Graph(1, 1)
    ops: list[tuple[str, str, list[int]]] = [
        ("dense", "compute", []),
        ("lookup", "compute", []),
        ("outputs", "comm", [1]),
        ("unpack", "compute", [2]),
    ]
    cost_ms = np.ones((1, 1))
    for name, stream, deps in ops:
        graph.add(name, phase="any", resource="any", stream=stream, cost_ms=cost_ms, deps=deps)
    assert cycle_ms(graph, [None, frozenset([0]), frozenset([0]), None]) == pytest.approx(4.0)
    # another exchange may have the outputs, and its lookup may come before the dense part
    assert cycle_ms(graph, [None, frozenset([0]), frozenset([1]), None]) == pytest.approx(3.0)
