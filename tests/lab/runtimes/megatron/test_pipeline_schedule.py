"""The pipeline schedule against closed forms and against the timeline."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.runtimes.megatron import pipeline_ms, schedule
from predictor.iteration.graph import COMPUTE, Graph
from predictor.iteration.timeline import simulate_once

TIMES = st.floats(0.0, 10.0)


def on_the_timeline(
    forward: list[float], backward: list[float], send: float, micro_batches: int
) -> float:
    """One rank a stage; what a stage hands over is met by the next on a link of its own."""
    stages = len(forward)
    graph = Graph(stages, stages)
    arrived: dict[tuple[int, bool, int], int] = {}
    for stage, is_backward, index in schedule(stages, micro_batches):
        step = -1 if is_backward else 1
        source = arrived.get((stage - step, is_backward, index))
        there = 0 <= stage + step < stages
        cost = (backward if is_backward else forward)[stage] + (send if there else 0.0)
        names = {"phase": "pass", "resource": "gemm"}
        ran = graph.add("pass", stream=COMPUTE, cost_ms=cost, ranks=(stage,),
                        deps=[] if source is None else [source], **names)  # fmt: skip
        if there:
            both = (min(stage, stage + step), max(stage, stage + step))
            arrived[stage, is_backward, index] = graph.add(
                "handed over", stream=f"link {stage} {is_backward}", cost_ms=0.0, deps=[ran],
                ranks=both, scope=both, **names,
            )  # fmt: skip
    return float(simulate_once(graph).iteration_ms[0])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), stages=st.integers(1, 4), micro_batches=st.integers(1, 7), send=TIMES)
def test_it_equals_the_timeline(
    data: st.DataObject, stages: int, micro_batches: int, send: float
) -> None:
    each = st.lists(TIMES, min_size=stages, max_size=stages)
    forward, backward = data.draw(each), data.draw(each)
    found = float(pipeline_ms(forward, backward, send, micro_batches))
    assert found == pytest.approx(on_the_timeline(forward, backward, send, micro_batches))


@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 12))
def test_every_pass_runs_once_after_what_it_waits_for(stages: int, micro_batches: int) -> None:
    order = schedule(stages, micro_batches)
    position = {one: i for i, one in enumerate(order)}
    assert len(position) == len(order) == 2 * stages * micro_batches
    for stage, is_backward, index in order:
        before = [(stage + 1, True, index)] if is_backward else [(stage - 1, False, index)]
        if is_backward:
            before.append((stage, False, index))
        for one in before:
            assert one not in position or position[one] < position[stage, is_backward, index]


@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 12), f=TIMES, b=TIMES)
def test_equal_stages_leave_the_known_bubble(
    stages: int, micro_batches: int, f: float, b: float
) -> None:
    """(m + p - 1) (f + b): Narayanan et al. 2021, section 2.2.1."""
    found = pipeline_ms([f] * stages, [b] * stages, 0.0, micro_batches)
    assert float(found) == pytest.approx((micro_batches + stages - 1) * (f + b))


@given(data=st.data(), stages=st.integers(2, 4), micro_batches=st.integers(1, 5))
def test_many_at_once_are_each_as_alone_and_never_faster_with_more_work(
    data: st.DataObject, stages: int, micro_batches: int
) -> None:
    rows = st.lists(st.lists(TIMES, min_size=stages, max_size=stages), min_size=3, max_size=3)
    forward, backward = np.array(data.draw(rows)), np.array(data.draw(rows))
    send = np.array(data.draw(st.lists(TIMES, min_size=3, max_size=3)))
    found = pipeline_ms(forward, backward, send, micro_batches)
    alone = [pipeline_ms(forward[i], backward[i], send[i], micro_batches) for i in range(3)]
    assert found == pytest.approx(np.array(alone))
    assert (pipeline_ms(forward + 1.0, backward, send, micro_batches) >= found).all()
    assert (pipeline_ms(forward, backward, send, micro_batches + 1) >= found - 1e-9).all()
