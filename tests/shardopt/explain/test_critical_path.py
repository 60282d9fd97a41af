"""What the host spends its time on."""

from __future__ import annotations

import numpy as np
import pytest

from predictor.iteration.graph import Graph
from shardopt.explain.critical_path import host_work


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
