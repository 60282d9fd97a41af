"""Shapes of transformers and their names, and what a folder of measured steps holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.transformers import (
    FAMILIES,
    TransformerShape,
    gradient_sum,
    parse_shape,
    read_ops,
    read_rounds,
    rounds_file,
)
from predictor.cost.ops.cpu_ops import BINS, OpRow
from predictor.errors import InputError

sizes = st.integers(min_value=1, max_value=5000)


@given(st.sampled_from(FAMILIES), st.tuples(*[sizes] * 7))
def test_names_tell_the_shape(family: str, numbers: tuple[int, ...]) -> None:
    shape = TransformerShape(family, *numbers)
    assert parse_shape(shape.name) == shape


@pytest.mark.parametrize("name", ["", "bert", "t5-l1-d8-h1-f8-v8-s8-b8", "bert-l1-d8-h1-f8-v8-s8"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of a transformer"):
        parse_shape(name)


def test_flop_of_a_linear_model_is_six_per_weight_and_token() -> None:
    shape = TransformerShape("bert", 1, 64, 1, 256, 0, 1, 10)
    weights = 4 * 64**2 + 2 * 64 * 256
    assert shape.flop == 6 * 10 * (weights + 2 * 64)


def test_ops_and_buckets_are_those_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "ops.csv").write_text(
        "shape,part,kind,sizes,count,reuse_kib\n"
        "one,forward,mul c>1,1 2 3 0,2,0:1 3:2\n"
        ",backward.0,clone 10>1,4 4,1,\n"
        "two,forward,mul c>1,1 2 3 0,1,\n"
    )
    (tmp_path / "buckets.csv").write_text("shape,bucket,gradients,bytes\none,0,3,400\n")
    steps = read_ops(tmp_path)
    assert [call.op for call in steps["one"].calls] == ["forward", "backward.0"]
    reuse = (1024.0, 0.0, 0.0, 2048.0, *[0.0] * (BINS - 4))
    assert steps["one"].calls[0].rows == (OpRow("mul c>1", (1, 2, 3, 0), reuse, 2),)
    assert steps["one"].collectives == (gradient_sum(3, 400),)
    assert steps["two"].collectives == ()


def round_line(scale: float) -> str:
    return json.dumps(
        {
            "round": 0,
            "other_cores": 0.1,
            "steps": {"a": [[scale, 2 * scale], [3 * scale, 5 * scale]]},
            "alone": {"a": [[scale], [scale]]},
            "captured": {"a": [[1.0, 2.0], [3.0, 4.0]]},
        }
    )


BUSY = '{"round": 1, "other_cores": 1.1}'


def test_rounds_are_medians_of_the_slowest_rank(tmp_path: Path) -> None:
    rounds_file(tmp_path, 2).write_text(f"{round_line(1)}\n{BUSY}\n{round_line(1)}\n")
    rounds = read_rounds(tmp_path, 2)
    assert (rounds.count, rounds.disturbed) == (2, 1)
    assert rounds.steps == {"a": 4.0}
    assert rounds.alone == {"a": 1.0}
    assert rounds.captured == {"a": (2.0, 3.0)}


def test_rounds_that_others_disturbed_are_none(tmp_path: Path) -> None:
    rounds_file(tmp_path, 2).write_text(BUSY)
    with pytest.raises(InputError, match="none of its 1 rounds"):
        read_rounds(tmp_path, 2)


@pytest.mark.parametrize("line", ["{", "[]", '{"round": 1}'])
def test_broken_rounds_are_named_by_line(tmp_path: Path, line: str) -> None:
    rounds_file(tmp_path, 1).write_text(f"{round_line(1)}\n{line}\n")
    with pytest.raises(InputError, match=r"rounds-1.jsonl:2: not a round"):
        read_rounds(tmp_path, 1)


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
