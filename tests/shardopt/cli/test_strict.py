"""Messages and refusals for predictions that leave the rows behind their profile."""

import json
from pathlib import Path

import pytest
import yaml

from predictor.hardware.loader import load_hardware


@pytest.fixture
def narrow(tmp_path: Path) -> str:
    """H100, whose GEMM and collectives are fitted on less than any plan asks."""
    gemm = load_hardware("h100-sxm").gemm.model_dump(mode="json")
    gemm["provenance"]["range"] = {"m": [1, 256], "k": [1, 10**6]}
    intra = load_hardware("h100-sxm").collectives.intra.model_dump(mode="json")
    intra["provenance"]["range"] = {"size_bytes": [1, 4096], "ranks": [2, 8]}
    data = {"base": "h100-sxm", "gemm": gemm, "collectives": {"intra": intra}}
    (tmp_path / "narrow.yaml").write_text(yaml.safe_dump(data))
    return "narrow.yaml"


GEMM = "gemm of narrow.yaml: m of 32,768 (fitted up to 256)"


@pytest.mark.parametrize("command", ["predict", "explain"])
def test_given_plans(run, as_json, model: Path, plan: Path, narrow: str, command: str) -> None:
    words = (command, model, plan, "--hardware", narrow)
    data = as_json(*words)
    gemm, links = (data["predictions"][0] if command == "predict" else data)["out_of_range"]
    assert (links["group"], links["quantity"]) == ("collectives.intra", "size_bytes")
    expected = {"group": "gemm", "quantity": "m", "asked": 32768, "low": 1, "high": 256}
    assert gemm == gemm | expected
    refused = run(*words, "--strict")
    assert (refused.code, refused.out) == (4, "")
    assert GEMM in refused.err
    assert "--strict" in refused.err


def test_what_is_extrapolated_is_shown(run, model: Path, plan: Path, narrow: str) -> None:
    shown = " ".join(run("predict", model, plan, "--hardware", narrow).out.split())
    assert GEMM in shown
    assert "collectives.intra of narrow.yaml" in shown
    assert run("predict", model, plan, "--hardware", "h100-sxm", "--strict").code == 0


def test_plan_checks_its_best_plan(run, as_json, model: Path, narrow: str, tmp_path: Path) -> None:
    words = ("plan", model, "--gpus", 2, "--effort", 0.005)
    flags = ("--hardware", narrow)
    data = as_json(*words, *flags)
    assert data["out_of_range"] == data["plans"][0]["out_of_range"]
    assert {i["group"] for i in data["out_of_range"]} >= {"gemm"}
    refused = run(*words, *flags, "--strict", "-o", "out.json")
    assert (refused.code, refused.out) == (4, "")
    assert GEMM in refused.err
    assert not (tmp_path / "out.json").exists()
    inside = run(*words, "--strict", "--json")
    assert inside.code == 0, inside.err
    assert json.loads(inside.out)["out_of_range"] == []
