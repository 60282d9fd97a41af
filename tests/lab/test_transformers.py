"""Shapes of transformers and their names."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.transformers import (
    FAMILIES,
    Bucket,
    GradientSync,
    TrainingStep,
    TransformerShape,
    parse_shape,
)
from predictor.cost.ops.cpu_ops import BINS, Caches, OpModels, OpRow

sizes = st.integers(min_value=1, max_value=5000)


@given(st.sampled_from(FAMILIES), st.tuples(*[sizes] * 7))
def test_names_tell_the_shape(family: str, numbers: tuple[int, ...]) -> None:
    shape = TransformerShape(family, *numbers)
    assert parse_shape(shape.name) == shape


@pytest.mark.parametrize("name", ["", "bert", "t5-l1-d8-h1-f8-v8-s8-b8", "bert-l1-d8-h1-f8-v8-s8"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name or "bert"):
        parse_shape(name)


def test_flop_of_a_linear_model_is_six_per_weight_and_token() -> None:
    shape = TransformerShape("bert", 1, 64, 1, 256, 0, 1, 10)
    weights = 4 * 64**2 + 2 * 64 * 256
    assert shape.flop == 6 * 10 * (weights + 2 * 64)


@pytest.mark.slow
def test_losses_of_the_models_fall() -> None:
    pytest.importorskip("torch")
    from lab.replay.transformers import MODELS, Training

    for family in MODELS:
        training = Training(TransformerShape(family, 2, 32, 2, 64, 50, 8, 2))
        for group in training.optimizer.param_groups:
            group["lr"] = 1e-2
        before = training.model(training.ids).item()
        for _ in range(20):
            training.step()
        assert training.model(training.ids).item() < 0.8 * before


def test_a_step_is_the_sum_of_its_ops_and_of_the_gradients_that_ranks_sum() -> None:
    models = OpModels({"mul c>1": np.array([0, 0, 1.0, 0, 0, 0, 0])}, Caches(1e6, 1e8))
    rows = tuple(OpRow("mul c>1", (1, ms, ms, 0), (0.0,) * BINS) for ms in (10, 20, 5))
    step = TrainingStep(rows, (Bucket(2, 100), Bucket(3, 1000)))
    assert step.ms(models, None) == pytest.approx(35)
    assert step.ms(models, GradientSync(1.0, 0.5, 0.01)) == pytest.approx(35 + 2 + 5 * 0.5 + 11)
