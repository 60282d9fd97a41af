"""Good model files: what they become, and that all of ours load; the forms of dense, sequences."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import shardopt
from predictor.errors import InputError
from predictor.model.dense_settings import LengthShares
from predictor.model.distribution import Empirical, ReuseHistogram, Uniform, Zipf
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.workload import Constraints, DcnV2, DenseArch, DenseTimes, MeasuredDense, QComm
from shardopt.api.answer import plan
from shardopt.api.request import PlanRequest
from shardopt.config import load_model, read_model
from shardopt.config.write import model_text
from tests.builders import a_workload

MODELS = Path(__file__).parents[3] / "configs" / "models"
GIB = 1024**3


def test_a_good_file_becomes_the_workload_it_describes(
    write: Callable[[str], Path], good: str
) -> None:
    workload, notes, _ = read_model(write(good))
    assert notes == []
    assert (workload.name, workload.batch_size, workload.train_pipeline) == ("small", 8192, "base")
    assert workload.qcomm == QComm("fp16", "fp32")
    assert workload.sha256 == hashlib.sha256(good.encode()).hexdigest()
    assert workload.dense == DenseArch(13, (512, 128), (512, 1), "dot", "tf32", "adam")
    first, second = workload.tables
    assert (first.name, first.module, first.num_embeddings) == ("t_0", "ebc", 40_000_000)
    assert first.optimizer == "exact_row_wise_adagrad"
    assert first.constraints == Constraints(
        (ShardingType.TABLE_WISE, ShardingType.ROW_WISE), ("fused",), 32, 0.2, True, (0, 1), "a"
    )
    (feature,) = first.features
    assert (feature.pooling_factor, feature.id_order) == (3.0, "frequency")
    assert feature.distribution == Zipf(1.05, 2)
    assert (second.num_embeddings, second.data_type, second.pooling) == (400_000, "fp16", "none")
    assert (second.module, second.optimizer, second.constraints) == ("seq", "adam", Constraints())
    assert second.features[0].distribution == Uniform()
    assert second.features[1].distribution == ReuseHistogram(100, (0.5, 0.5))


def test_inference_is_not_trained_and_survives_writing(
    write: Callable[[str], Path], good: str
) -> None:
    text = good.replace("schema: 1", "schema: 1\nmode: inference").replace(
        "data_type: fp16", "data_type: int4"
    )
    workload, notes, _ = read_model(write(text))
    assert (workload.training, workload.tables[1].data_type, notes) == (False, "int4", [])
    again = load_model(write(model_text(workload), "again.yaml"))
    assert replace(again, sha256="") == replace(workload, sha256="")
    assert load_model(write(good)).training


@pytest.mark.parametrize(
    ("mode", "data_type", "optimizer", "expected"),
    [
        ("training", "int8", "adam", 1),
        ("training", "nfp8", "adam", 1),
        ("training", "nfp8", "exact_row_wise_adagrad", 0),
        ("training", "bf16", "adam", 0),
        ("inference", "int8", "adam", 0),
        ("inference", "bf16", "adam", 1),
        ("inference", "nfp8", "exact_row_wise_adagrad", 1),
    ],
)
def test_types_that_fbgemm_does_not_take_are_told(
    write: Callable[[str], Path],
    good: str,
    mode: str,
    data_type: str,
    optimizer: str,
    expected: int,
) -> None:
    text = good.replace("schema: 1", f"schema: 1\nmode: {mode}")
    text = text.replace("data_type: fp16", f"data_type: {data_type}")
    workload, notes, _ = read_model(
        write(text.replace("optimizer: adam", f"optimizer: {optimizer}", 1))
    )
    assert workload.tables[1].data_type == data_type
    assert len(notes) == expected


def test_batch_size_overrides_and_may_then_be_left_out(
    write: Callable[[str], Path], good: str
) -> None:
    assert load_model(write(good), batch_size=64).batch_size == 64
    without = good.replace("batch_size: 8192\n", "")
    assert load_model(write(without), batch_size=64).batch_size == 64
    with pytest.raises(InputError, match=r"batch_size: missing") as raised:
        load_model(write(without))
    assert raised.value.inputs == ("batch_size",)
    with pytest.raises(InputError, match="batch size is 0"):
        load_model(write(good), batch_size=0)


def test_defaults_and_the_note_on_uniform_ids(write: Callable[[str], Path]) -> None:
    path = write(
        "schema: 1\nbatch_size: 4\ntables:\n"
        "- {name: a, num_embeddings: 9, embedding_dim: 4, features: [{name: f, pooling_factor: 1}]}"
        "\ndense: {in_features: 2, bottom_mlp: [4], top_mlp: [1]}\n"
    )
    workload, notes, _ = read_model(path)
    assert workload.name == "model"
    assert workload.dense.interaction == "dot"
    assert workload.tables[0].features[0].distribution == Uniform()
    assert len(notes) == 1
    assert "index_distribution" in notes[0]


def test_numbers_as_people_write_them(write: Callable[[str], Path], good: str) -> None:
    for written in ("1e6", "1.0e+6", "1_000_000", "'1_000_000'", "1000000.0", "'1e6'"):
        text = good.replace("40_000_000", written)
        assert load_model(write(text)).tables[0].num_embeddings == 1_000_000


def test_anchors_and_merge_keys_work(write: Callable[[str], Path], good: str) -> None:
    text = good.replace("qcomm: {", "qcomm: &q {").replace("id_order: frequency", "num_poolings: 2")
    text += "# <<\n"
    assert load_model(write(text)).tables[0].features[0].num_poolings == 2
    merged = good.replace("  - name: t_0\n", "  - &t\n    name: t_0\n").replace(
        "    module: seq\n    num_embeddings: 4e5\n    embedding_dim: 128\n",
        "    <<: *t\n    module: seq\n    num_embeddings: 77\n",
    )
    second = load_model(write(merged)).tables[1]
    assert (second.num_embeddings, second.embedding_dim, second.name) == (77, 128, "t_1")


def test_dcn_and_measured_distributions(
    tmp_path: Path, write: Callable[[str], Path], good: str
) -> None:
    counts, weights = np.array([1.0, 9.0]), np.array([5.0, 1.0])
    np.savez(tmp_path / "stats.npz", **{"cat_0.counts": counts, "cat_0.weights": weights})
    text = good.replace("{zipf: {alpha: 1.05, q: 2}}", "{file: stats.npz, feature: cat_0}")
    text = text.replace("interaction: dot", "interaction: {dcn_v2: {layers: 3, low_rank_dim: 64}}")
    workload = load_model(write(text))
    assert workload.dense.interaction == DcnV2(3, 64)
    assert workload.tables[0].features[0].distribution == Empirical((1.0, 9.0), (5.0, 1.0))


def test_a_deviation_of_lengths_is_read_where_the_distribution_is(
    tmp_path: Path, write: Callable[[str], Path], good: str
) -> None:
    measured = {"counts": [1.0, 9.0], "weights": [5.0, 1.0], "pooling_factor": 6.0}
    for more, keys, expected in (
        ({"pooling_factor_std": 4.0}, "", 2.0),  # as wide for its mean as in the data
        ({"pooling_factor_std": 4.0, "pooling_factor_max": 9.0}, "", 2.0),
        ({"pooling_factor_std": 4.0}, "pooling_factor_std: 9\n        ", 9.0),
        ({}, "", None),
    ):
        arrays = {f"cat_0.{name}": np.array(v) for name, v in {**measured, **more}.items()}
        np.savez(tmp_path / "stats.npz", **arrays)
        text = good.replace("{zipf: {alpha: 1.05, q: 2}}", "{file: stats.npz, feature: cat_0}")
        text = text.replace("index_distribution: {file", f"{keys}index_distribution: {{file")
        feature = load_model(write(text)).tables[0].features[0]
        assert (feature.pooling_factor, feature.pooling_factor_std) == (3.0, expected)
        most = more.get("pooling_factor_max")
        assert feature.pooling_factor_max == (most and most / 2)


def test_mixed_modules_are_noted(write: Callable[[str], Path], good: str) -> None:
    _, notes, _ = read_model(write(good.replace("    module: seq\n", "")))
    assert len(notes) == 1
    assert "'ebc'" in notes[0]


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_model_loads(path: Path) -> None:
    workload, notes, _ = read_model(path)
    assert workload.name == path.stem
    assert notes == [] or path.stem == "example", "whose users are uniform"


def test_mlperf_model_has_the_published_sizes() -> None:
    workload = load_model(MODELS / "dlrm_dcnv2_criteo1tb.yaml")
    assert len(workload.tables) == 26
    assert sum(t.lookups_per_sample for t in workload.tables) == 214
    assert sum(t.num_embeddings for t in workload.tables) == 204_184_588
    assert {t.embedding_dim for t in workload.tables} == {128}


@pytest.mark.parametrize(("name", "gpus"), [("synthetic_100", 8), ("synthetic_1000", 128)])
def test_synthetic_models_fit_the_gpus_they_are_made_for(name: str, gpus: int) -> None:
    workload = load_model(MODELS / f"{name}.yaml")
    state = sum(4 * table.num_embeddings for table in workload.tables)
    usable = gpus * 80 * GIB * 0.85
    # half is left for the batch, its gradients and what does not pack
    assert 0.3 * usable < workload.embedding_bytes + state < 0.6 * usable


def test_synthetic_models_are_reproduced_byte_for_byte(tmp_path: Path) -> None:
    script = MODELS / "generate_synthetic.py"
    subprocess.run([sys.executable, str(script), "-o", str(tmp_path)], check=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(path.name for path in MODELS.glob("synthetic_*"))
    for name in names:
        assert (tmp_path / name).read_bytes() == (MODELS / name).read_bytes(), name


def test_loading_imports_no_framework() -> None:
    code = (
        "import sys; from shardopt.config import load_model, load_cluster; "
        "print([m for m in ('torch', 'torchrec', 'ortools', 'optuna', 'pandas', 'scipy') "
        "if m in sys.modules])"
    )
    root = Path(shardopt.__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert run.stdout.strip() == "[]"


MEASURED = """schema: 1
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
    workload, notes, _ = read_model(write(MEASURED))
    times = DenseTimes(8192, 3.1, 6.4, 0.3, 210.0, 6.2)
    assert workload.dense == MeasuredDense(times, optimizer="adam")
    assert not notes


def test_lengths_of_samples_are_read(write: Callable[[str], Path]) -> None:
    lengths = "pooling_factor_std: 75, pooling_factor_max: 400, length_correlation: 0.5"
    text = SEQUENCES.replace("pooling_factor_std: 75", lengths)
    workload = load_model(write(f"{text}balance_batches: true\n"))
    feature = workload.tables[0].features[0]
    assert (feature.pooling_factor_max, feature.length_correlation) == (400, 0.5)
    assert workload.balance_batches
    grows = load_model(write(f"{MEASURED}  length_shares: {{linear: 0.2, square: 0.5}}\n"))
    assert grows.dense.length_shares == LengthShares(0.2, 0.5)


def test_another_batch_size_is_noted_as_an_extrapolation(write: Callable[[str], Path]) -> None:
    workload, (note,), _ = read_model(write(MEASURED), batch_size=4096)
    assert "8192; at 4096" in note
    assert "extrapolation" in note
    assert isinstance(workload.dense, MeasuredDense)
    half = workload.dense.at_batch_size(4096)
    times = half.measured
    assert (times.forward_ms, times.backward_ms, times.optimizer_ms) == (1.55, 3.2, 0.3)
    assert half.gradient_bytes == workload.dense.gradient_bytes
    assert half.activation_bytes == pytest.approx(3.1 * 2**30)


def test_where_layers_are_needed_the_message_says_so() -> None:
    workload = a_workload(dense=MeasuredDense(DenseTimes(512, 1.5, 2.5, 0.25, 0.0)))
    with pytest.raises(InputError, match="in_features, bottom_mlp"):
        _ = workload.dlrm


SEQUENCES = """schema: 1
batch_size: 64
tables:
  - name: history
    module: ec
    num_embeddings: 1000
    embedding_dim: 64
    pooling: none
    index_dedup: true
    features:
      - {name: f, pooling_factor: 50, pooling_factor_std: 75, index_distribution: uniform}
dense: {in_features: 13, bottom_mlp: [64], interaction: concat, top_mlp: [64, 1]}
"""


def test_hash_tables_are_noted(write: Callable[[str], Path]) -> None:
    text = SEQUENCES.replace("index_dedup: true", "storage: dynamicemb")
    workload, notes, _ = read_model(write(text))
    assert workload.tables[0].storage == "dynamicemb"
    assert any("'history'" in note and "dynamicemb" in note for note in notes)


SHARED = """
schema: 1
batch_size: 4
tables:
- {name: a, num_embeddings: 9, embedding_dim: 10, features: [{name: f, pooling_factor: 0}]}
- {name: b, num_embeddings: 99, embedding_dim: 33, features: [{name: f, pooling_factor: 3}]}
dense: {in_features: 2, bottom_mlp: [4], top_mlp: [1], interaction: concat}
"""


def test_what_torchrec_takes_is_read(write: Callable[[str], Path]) -> None:
    """One feature of two tables, one without ids, and dims that fused kernels refuse."""
    a, b = load_model(write(SHARED)).tables
    assert [t.features[0].name for t in (a, b)] == ["f", "f"]
    assert (a.lookups_per_sample, b.lookups_per_sample) == (0, 3)
    assert (a.embedding_dim, b.embedding_dim) == (10, 33)


@pytest.mark.parametrize("hardware", ["h100-sxm", "cpu-gloo"])
def test_dims_that_fused_kernels_refuse_are_planned_and_told(
    write: Callable[[str], Path], hardware: str
) -> None:
    request = PlanRequest(model=write(SHARED), gpus=2, hardware=hardware, effort=0.005)
    answer = plan(request)
    kernels = {t.compute_kernel for t in answer.result.best.plan.tables.values()}
    assert kernels == {ComputeKernel.DENSE}
    assert any("'a' (embedding_dim 10)" in note for note in answer.setting.notes)
