"""A step of made-up ranks as an iteration: what computes and what meets."""

from __future__ import annotations

import numpy as np
import pytest

from lab.op_graph import op_graph
from lab.transformers import GradientSync, gradient_sum, training_step
from predictor.cost.ops.cpu_ops import BINS, Caches, OpModels, OpRow
from predictor.iteration.timeline import simulate

MODELS = OpModels({"mul c>1": np.array([0, 0, 1.0, 0, 0, 0, 0])}, Caches(1e6, 1e8))


def rows(ms: int) -> tuple[OpRow, ...]:
    return (OpRow("mul c>1", (1, ms, ms, 0), (0.0,) * BINS),)


STEP = training_step(
    {"forward": rows(10), "backward.0": rows(7), "backward.1": rows(13), "optimizer": rows(5)},
    (gradient_sum(2, 100), gradient_sum(3, 1000)),
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_takes_the_sum_of_its_parts(ranks: int) -> None:
    assert [row.sizes[1] for row in STEP.rows] == [10, 7, 13, 5]
    graph = op_graph(STEP, MODELS, lambda start: 0.0, ranks)
    assert float(simulate(graph).iteration_ms[0]) == pytest.approx(35)


def test_the_optimizer_waits_for_the_sums() -> None:
    sync = GradientSync(1.0, 0.5, 0.01)
    graph = op_graph(STEP, MODELS, lambda start: sync.ms(start.gradients, start.bytes), 2)
    last_ms = sync.ms(3, 1000)
    assert float(simulate(graph).iteration_ms[0]) == pytest.approx(10 + 7 + 13 + last_ms + 5)
