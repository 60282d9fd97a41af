"""Ops of made-up ranks as an iteration: what computes, what meets, what nothing prices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from lab.transformers import GradientSync, gradient_sum, training_step
from predictor.cost.ops.cpu_ops import BINS, VIEW, Caches, OpModels, OpRow
from predictor.errors import InputError
from predictor.iteration.op_graph import (
    CallGroup,
    CollectiveStart,
    CollectiveWait,
    RankCalls,
    op_graph,
    rank_times,
)
from predictor.iteration.timeline import simulate

MODELS = OpModels({"mul c>1": np.array([0, 0, 1.0, 0, 0, 0, 0])}, Caches(1e6, 1e8))


def rows(ms: int, kind: str = "mul c>1") -> tuple[OpRow, ...]:
    return (OpRow(kind, (1, ms, ms, 0), (0.0,) * BINS),)


STEP = training_step(
    {"forward": rows(10), "backward.0": rows(7), "backward.1": rows(13), "optimizer": rows(5)},
    (gradient_sum(2, 100), gradient_sum(3, 1000)),
)


def iteration_ms(*ranks: RankCalls, sync: GradientSync | None = None) -> float:
    def cost_ms(starts: Sequence[CollectiveStart]) -> float:
        return 0.0 if sync is None else sync.ms(starts[0].gradients, starts[0].bytes)

    times = [rank_times(rank, MODELS) for rank in ranks]
    graph, _ = op_graph(times, ranks, cost_ms, len(ranks))
    return float(simulate(graph).iteration_ms[0])


def test_one_rank_takes_the_sum_of_its_parts() -> None:
    assert iteration_ms(STEP) == pytest.approx(35)


def test_ranks_wait_for_the_slower_one() -> None:
    start = (CollectiveStart("allreduce_", 8), CollectiveWait(0))

    def rank(before: int, after: int) -> RankCalls:
        calls = (CallGroup(0, "mul", rows(before), 1), CallGroup(2, "mul", rows(after), 1))
        return RankCalls(calls, start)

    assert iteration_ms(rank(3, 2), rank(9, 2)) == pytest.approx(11)


def test_ranks_that_do_not_meet_are_refused() -> None:
    one = RankCalls((), (CollectiveStart("allreduce_", 8),))
    with pytest.raises(InputError, match="same collectives in the same order"):
        iteration_ms(one, RankCalls((), ()))
    some = RankCalls((), (CollectiveStart("allreduce_", 8, group=(0,)),))
    with pytest.raises(InputError, match=r"joins only ranks \[0\]"):
        iteration_ms(some, some)


def test_recorded_times_are_used_where_there_is_no_kernel_model() -> None:
    calls = (
        CallGroup(0, "aten::mul", rows(2), 1, 9.0),
        CallGroup(0, "aten::gelu", (*rows(4), *rows(8, "gelu c>1")), 1, 7000.0),
        CallGroup(0, "corp::op", (), 3, None),
        CallGroup(0, "aten::t", rows(0, f"{VIEW} t"), 1, 500.0),
    )
    times = rank_times(RankCalls(calls, left_out=(("aten::gone", 2000.0),)), MODELS)
    assert times.segments_ms == pytest.approx((2 + 7.0 + 0.5,))
    assert times.recorded_ms == 7.5
    assert times.without_model == (
        ("aten::gone", 1, 2000.0),
        ("aten::gelu", 1, 7000.0),
        ("corp::op", 3, None),
        ("aten::t", 1, 500.0),
    )
