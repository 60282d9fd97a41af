"""The README's model, the cluster, profile and Python of docs/commands.md work as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from predictor.hardware.loader import load_hardware
from predictor.hardware.networks import Network
from shardopt import load_model
from shardopt.config.cluster import load_cluster

ROOT = Path(__file__).resolve().parents[2]


def block(page: str, language: str, place: int = 0) -> str:
    """A code block of a language on a page, by its place among these."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    return str(blocks[place])


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The README's model, as model.yaml where the test runs."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.yaml"
    path.write_text(block("README.md", "yaml"))
    return path


def test_the_model_the_cluster_and_the_profile_load(model: Path, tmp_path: Path) -> None:
    committed = ROOT / "configs" / "models" / "example.yaml"
    assert load_model(model) == load_model(committed)
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(block("docs/commands.md", "yaml", 0))
    assert load_cluster(cluster).fabric == Network("roce", 400)
    profile = tmp_path / "here.yaml"
    profile.write_text(block("docs/commands.md", "yaml", 1))
    assert load_hardware(str(profile)).overheads.op_us == 12


def test_the_python_runs(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    little = 'gpus=2, effort=0.005, scenarios="none"'
    exec(block("docs/commands.md", "python").replace("gpus=8", little), names)
    assert names["same"].iteration_ms == pytest.approx(names["found"].iteration_ms)
    assert names["help"].iteration_ms == pytest.approx(names["found"].iteration_ms)
    assert str(names["found"].iteration_ms) in capsys.readouterr().out
