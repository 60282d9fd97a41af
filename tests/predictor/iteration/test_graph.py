"""Operations and how they are added."""

from __future__ import annotations

import numpy as np

from predictor.iteration.graph import Dep, Graph


def add(graph: Graph, **more: object) -> int:
    return graph.add(  # type: ignore[arg-type]
        "op", phase="p", resource="r", stream="s", **{"cost_ms": 1.0, **more}
    )


def test_indices_count_up_and_bare_dependencies_are_of_this_iteration() -> None:
    graph = Graph(2, 1)
    assert [add(graph), add(graph, deps=[0, Dep(0, lag=1)])] == [0, 1]
    assert graph.ops[1].deps == (Dep(0, 0), Dep(0, 1))
    assert graph.ops[0].cost_ms.shape == (1,)
    assert add(graph, cost_ms=np.ones((3, 2))) == 2
    assert graph.ops[2].cost_ms.shape == (3, 2)


def test_waiting_adds_to_what_is_waited_for() -> None:
    graph = Graph(1, 1)
    first, second = add(graph), add(graph, deps=[0])
    graph.wait(second, Dep(second, lag=1))
    graph.wait(first, Dep(second, lag=2), Dep(second, lag=1))
    assert graph.ops[second].deps == (Dep(first), Dep(second, 1))
    assert graph.ops[first].deps == (Dep(second, 2), Dep(second, 1))
