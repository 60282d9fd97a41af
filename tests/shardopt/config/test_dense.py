"""The measured form of ``dense``: read, written, refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from predictor.errors import InputError
from predictor.model.workload import MeasuredDense
from shardopt.config import load_model
from shardopt.config.model import load_model_with_notes
from shardopt.config.write import model_text
from tests.builders import a_workload

MODEL = """schema: 1
batch_size: 8192
tables:
  - name: t
    num_embeddings: 1000
    embedding_dim: 64
    features: [{name: f, pooling_factor: 2, index_distribution: uniform}]
dense:
  measured:
    batch_size: 8192
    forward_ms: 3.1
    backward_ms: 6.4
    optimizer_ms: 0.3
    gradient_mib: 210
    activation_gib: 6.2
  optimizer: adam
"""


def test_measured_times_are_read(write: Callable[[str], Path]) -> None:
    workload, notes = load_model_with_notes(write(MODEL))
    assert workload.dense == MeasuredDense(
        8192, 3.1, 6.4, 0.3, 210 * 2**20, round(6.2 * 2**30), optimizer="adam"
    )
    assert not notes


def test_another_batch_size_is_noted_as_an_extrapolation(write: Callable[[str], Path]) -> None:
    workload, (note,) = load_model_with_notes(write(MODEL), batch_size=4096)
    assert "measured at a batch of 8192; at 4096" in note
    assert "extrapolation" in note
    assert isinstance(workload.dense, MeasuredDense)
    half = workload.dense.at_batch_size(4096)
    assert (half.forward_ms, half.backward_ms, half.optimizer_ms) == (1.55, 3.2, 0.3)
    assert half.gradient_bytes == workload.dense.gradient_bytes
    assert half.activation_bytes == pytest.approx(3.1 * 2**30)


@pytest.mark.parametrize("activations", [None, 3 * 2**30])
def test_what_is_read_is_what_was_written(tmp_path: Path, activations: int | None) -> None:
    dense = MeasuredDense(512, 1.5, 2.5, 0.25, 3 * 2**20, activations, "adagrad", 50.0, 13)
    made = a_workload(dense=dense)
    path = tmp_path / "model.yaml"
    path.write_text(model_text(made))
    assert replace(load_model(path), sha256="") == made


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("forward_ms: 3.1", "forward_ms: -1", [":11", "dense.measured.forward_ms", "got -1"]),
        ("    backward_ms: 6.4\n", "", [":9", "backward_ms: missing", "backward kernels"]),
        ("forward_ms", "forward", [":11", "unknown key", "did you mean 'forward_ms'?"]),
        ("batch_size: 8192\n    f", "batch_size: 0\n    f", [":10", "got 0", "at least 1"]),
        ("optimizer: adam", "top_mlp: [1]", [":16", "dense.top_mlp", "unknown key", "measured"]),
    ],
)
def test_problems_name_line_and_key(
    write: Callable[[str], Path], old: str, new: str, parts: list[str]
) -> None:
    assert old in MODEL
    with pytest.raises(InputError) as caught:
        load_model(write(MODEL.replace(old, new)))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_what_is_no_mapping_is_refused(write: Callable[[str], Path]) -> None:
    head, _ = MODEL.split("dense:")
    with pytest.raises(InputError, match=r"dense.measured: got \[3.1, 6.4\]; it must be a mapping"):
        load_model(write(head + "dense: {measured: [3.1, 6.4]}\n"))


def test_a_batch_of_none_is_refused() -> None:
    with pytest.raises(InputError, match="of a batch of 0"):
        MeasuredDense(0, 1.0, 1.0, 1.0, 0)


def test_where_layers_are_needed_the_message_says_so() -> None:
    workload = a_workload(dense=MeasuredDense(512, 1.5, 2.5, 0.25, 0))
    with pytest.raises(InputError, match="give in_features, bottom_mlp and top_mlp"):
        _ = workload.dlrm
