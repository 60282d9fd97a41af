"""Scenarios from numbers, files and windows of data; what is wrong with them is told by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from search.problem import Problem
from shardopt.api.scenarios import read_scenarios
from shardopt.config import load_model, read_model
from shardopt.config.distributions import workloads_of_stats
from tests.search.problems import hosts
from tests.shardopt.api.windows import write_window

CPU = load_hardware("cpu-gloo")
MODEL = """
schema: 1
batch_size: 64
tables:
  - {{name: t, num_embeddings: 100, embedding_dim: 8, features: [{{name: f, pooling_factor: 2,
     index_distribution: {distribution}}}]}}
dense: {{bottom_mlp: [4, 8], top_mlp: [4, 1], interaction: dot, in_features: 4}}
"""


def write_model(folder: Path, distribution: str) -> Path:
    path = folder / "model.yaml"
    path.write_text(MODEL.format(distribution=distribution))
    return path


def two_windows(folder: Path) -> list[Path]:
    return [write_window(folder / f"{d}.npz", p) for d, p in (("mon", 2.0), ("tue", 3.0))]


def test_windows_of_a_model_file_are_scenarios_beside_the_draws(tmp_path: Path) -> None:
    two_windows(tmp_path)
    model = write_model(tmp_path, "{files: [mon.npz, tue.npz]}")
    windows = read_model(model)[2]
    assert [*windows] == ["mon", "tue"]
    assert windows["mon"].tables[0].features[0].pooling_factor == 2
    assert windows["tue"].tables[0].features[0].pooling_factor == pytest.approx(3.0)
    problem = Problem(windows["mon"], hosts(2), CPU)
    scenarios = read_scenarios(4, CPU, windows).of(problem)
    assert [s.name for s in scenarios[:3]] == ["mon", "tue", "draw 1"]
    assert sum(s.weight for s in scenarios) == pytest.approx(1)
    assert [s.name for s in read_scenarios("none", CPU, windows).of(problem)] == ["mon", "tue"]


@pytest.mark.parametrize("pooling", [[1.0, 2.0], -3.0, float("inf"), 0.0])
def test_a_window_whose_pooling_factor_is_none_keeps_that_of_the_model(
    tmp_path: Path, pooling: object
) -> None:
    write_window(tmp_path / "mon.npz", 2.0)
    write_window(tmp_path / "tue.npz", pooling)  # type: ignore[arg-type]
    windows = read_model(write_model(tmp_path, "{files: [mon.npz, tue.npz]}"))[2]
    assert windows["tue"].tables[0].features[0].pooling_factor == 2


def test_stats_files_give_windows_and_those_of_other_data_are_told_by_name(tmp_path: Path) -> None:
    workload = load_model(write_model(tmp_path, "uniform"))
    windows = workloads_of_stats(workload, two_windows(tmp_path))
    assert [w.tables[0].features[0].pooling_factor for w in windows.values()] == [2.0, 3.0]
    mon = write_window(tmp_path / "mon.npz", 2.0)
    for name, more, words in (
        ("other", {"names": ("g",)}, "none of the model's features"),
        ("large", {"rows": 500}, "window large: feature 'f' was measured on a table of 500 rows"),
    ):
        bad = write_window(tmp_path / f"{name}.npz", 2.0, **more)
        with pytest.raises(InputError, match=words):
            workloads_of_stats(workload, [mon, bad])
    with pytest.raises(InputError, match="257"):
        workloads_of_stats(workload, [mon] * 257)
    for files in (["mon.npz"], [f"{n}.npz" for n in range(257)]):
        with pytest.raises(InputError, match=r"index_distribution\.files"):
            read_model(write_model(tmp_path, f"{{files: [{', '.join(files)}]}}"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema: 1\nscenarios: [{name: a}, {name: a}]", "'a' is the name of two"),
        ("schema: 1\nscenarios: [{name: a}]", "has 1; give at least 2"),
        ("schema: 1\nscenarios: [{weight: 0.5}, {weight: 0.4}]", "weights sum to 0.9"),
        ("schema: 1\nscenarios: [{factors: {gem: 2}}, {}]", "did you mean 'gemm'"),
        ("schema: 1\nscenarios: [{factors: {gemm: -2}}, {}]", "scenarios.0..factors.gemm: got -2"),
        ("schema: 1\nscenarios: [{factor: {gemm: 2}}, {}]", "did you mean 'factors'"),
        ("schema: 1", "a scenario file has"),
    ],
)
def test_bad_scenario_files_are_told_by_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "scenarios.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        read_scenarios(str(path), CPU, {})
    with pytest.raises(InputError, match="give a number from 2"):
        read_scenarios(1, CPU, {})


def test_a_scenario_file_has_weights_and_factors(tmp_path: Path) -> None:
    path = tmp_path / "scenarios.json"
    path.write_text(
        '{"schema": 1, "scenarios": [{"name": "a", "weight": 0.25, "factors": {"gemm": 2}},'
        ' {"name": "b", "weight": 0.75}]}'
    )
    scenarios = read_scenarios(path, CPU, {})
    assert [(s.name, s.weight, dict(s.factors)) for s in scenarios.from_file] == [
        ("a", 0.25, {"gemm": 2.0}),
        ("b", 0.75, {}),
    ]
