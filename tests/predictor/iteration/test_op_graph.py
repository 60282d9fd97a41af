"""A step of made-up rows: what it takes on one rank, and with gradients summed over two."""

from __future__ import annotations

import numpy as np
import pytest

from predictor.cost.cpu_ops import Caches, OpLaws, OpRow
from predictor.cost.reuse import BINS
from predictor.iteration.op_graph import Bucket, OpStep, SyncLaw, step_graph, step_ms

LAWS = OpLaws({"mul c>1": np.array([0, 0, 1.0, 0, 0, 0, 0])}, Caches(1e6, 1e8))


def rows(ms: int) -> tuple[OpRow, ...]:
    return (OpRow("mul c>1", (1, ms, ms, 0), (0.0,) * BINS),)


STEP = OpStep(
    {"forward": rows(10), "backward.0": rows(7), "backward.1": rows(13), "optimizer": rows(5)},
    (Bucket(2, 100), Bucket(3, 1000)),
)


def test_one_rank_takes_the_sum_of_its_parts() -> None:
    assert step_ms(STEP, LAWS) == pytest.approx(35)


def test_summing_is_work_of_the_same_core() -> None:
    sync = SyncLaw(bucket_ms=0.5, gradient_ms=0.1, byte_ms=0.01)
    expected = 35 + 2 * 0.5 + 5 * 0.1 + 1100 * 0.01
    assert step_ms(STEP, LAWS, sync, ranks=2) == pytest.approx(expected)


def test_buckets_leave_while_the_backward_goes_on() -> None:
    graph = step_graph(STEP, LAWS, SyncLaw(1, 0, 0), ranks=2)
    names = [op.name for op in graph.ops]
    assert names.index("all-reduce bucket 0") < names.index("backward.1")
    assert names[-1] == "optimizer"
