"""The README's model, the profile of docs/commands.md and the Python there work as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from predictor.hardware.loader import load_hardware
from shardopt import load_model

ROOT = Path(__file__).resolve().parents[2]


def block(page: str, language: str) -> str:
    """The first code block of a language on a page."""
    found = re.search(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    assert found
    return found[1]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The README's model, as model.yaml where the test runs."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.yaml"
    path.write_text(block("README.md", "yaml"))
    return path


def test_the_model_and_the_profile_load(model: Path, tmp_path: Path) -> None:
    committed = ROOT / "configs" / "models" / "example.yaml"
    assert load_model(model) == load_model(committed)
    profile = tmp_path / "here.yaml"
    profile.write_text(block("docs/commands.md", "yaml"))
    assert load_hardware(str(profile)).overheads.op_us == 12


def test_the_python_runs(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(block("docs/commands.md", "python").replace("gpus=8", "gpus=8, effort=0.01"), names)
    assert names["same"].iteration_ms == pytest.approx(names["found"].iteration_ms)
    assert names["help"].iteration_ms == pytest.approx(names["found"].iteration_ms)
    assert str(names["found"].iteration_ms) in capsys.readouterr().out
