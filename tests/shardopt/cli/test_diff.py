"""`shardopt hardware` and `shardopt diff`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest


def test_hardware_lists_every_profile(run) -> None:
    done = run("hardware")
    assert done.code == 0
    for name in ("v100-32gb", "a100-40gb", "a100-80gb", "h100-sxm *", "h200-sxm", "b200"):
        assert name in done.out
    data = json.loads(run("hardware", "--json").out)
    assert data["default"] == "h100-sxm"
    assert "cpu-gloo" in data["profiles"]


def test_hardware_shows_sources(run) -> None:
    done = run("hardware", "h100-sxm")
    assert done.code == 0
    for words in ("memory", "collectives.inter", "hbm_gb_s", "1 sigma"):
        assert words in done.out
    data = json.loads(run("hardware", "h100-sxm", "--json").out)
    assert data["memory"]["provenance"]["source"]


def test_hardware_says_how_far_it_can_be_trusted(run) -> None:
    data = json.loads(run("hardware", "h100-sxm", "--json").out)
    rows = data["gemm"]["provenance"]["error"]["n"]
    listed = " ".join(run("hardware").out.split())
    assert "Known errors" in listed
    assert re.search(rf"gemm [\d.]+ % \({rows}\)", listed)
    assert "h200-nvl not validated" in listed
    shown = " ".join(run("hardware", "h100-sxm").out.split())
    own = shown.index("Whole iterations under TorchRec: not validated")
    assert own < shown.index("Whole iterations under HugeCTR (not TorchRec): mean error")
    assert "one row a configuration" in shown
    assert f"on {rows:,} rows of gemm" in shown
    assert "Known error: not validated" in shown
    assert data["memory"]["provenance"]["error"] is None
    assert data["known_error"][0]["suite"] == "mlperf-dlrm"
    assert data["known_error"][0]["runtime"] == "HugeCTR"
    assert "Whole iterations under TorchRec: mean error" in run("hardware", "a100-40gb").out
    assert "Whole iterations under TorchRec: not validated" in run("hardware", "b200").out
    assert json.loads(run("hardware", "b200", "--json").out)["known_error"] == []


def test_hardware_of_a_file_over_a_base(run, tmp_path: Path) -> None:
    overheads = json.loads(run("hardware", "h100-sxm", "--json").out)["overheads"]
    (tmp_path / "mine.yaml").write_text(json.dumps({"base": "h100-sxm", "overheads": overheads}))
    shown = run("hardware", "mine.yaml")
    assert shown.code == 0
    assert "overheads  from mine.yaml;" in shown.out
    assert "gemm  from h100-sxm;" in shown.out
    assert "Whole iterations under TorchRec: not validated" in shown.out
    data = json.loads(run("hardware", "mine.yaml", "--json").out)
    assert (data["name"], data["origins"]["overheads"]) == ("mine", "mine.yaml")
    assert data["origins"]["collectives.intra"] == "h100-sxm"
    assert "from h100-sxm" not in run("hardware", "h100-sxm").out


def test_a_partial_file_is_refused_with_what_it_lacks(run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: h100-sxm\ngemm: {floor_us: 3}\n")
    done = run("hardware", "mine.yaml")
    assert (done.code, done.out) == (4, "")
    assert "mine.yaml:2: gemm." in done.err


def test_hardware_that_is_unknown(run) -> None:
    done = run("hardware", "h200")
    assert (done.code, done.out) == (4, "")
    assert "h200-sxm" in done.err


def test_diff(run, tmp_path: Path, plan_data: dict[str, Any]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(plan_data))
    plan_data["tables"]["users"]["shards"][0]["rank"] = 1
    (tmp_path / "b.json").write_text(json.dumps(plan_data))
    data = json.loads(run("diff", "a.json", "b.json", "--json").out)
    assert (data["same"], data["tables_same"]) == (False, 2)
    users = data["tables"]["users"]
    assert users["differs"] == ["ranks"]
    assert (users["a"]["ranks"], users["b"]["ranks"]) == ([0], [1])
    assert "TW on 0" in run("diff", "a.json", "b.json").out
    same = run("diff", "a.json", "a.json")
    assert (same.code, "No table differs (3)." in same.out) == (0, True)
    assert json.loads(run("diff", "a.json", "a.json", "--json").out)["same"]


def test_diff_of_a_missing_file(run, tmp_path: Path) -> None:
    done = run("diff", "a.json", "b.json")
    assert (done.code, done.out) == (2, "")
    assert "a.json: no such file" in done.err


def test_a_table_in_one_column_shard_is_table_wise(run, tmp_path: Path, plan_data) -> None:
    (tmp_path / "a.json").write_text(json.dumps(plan_data))
    for kind in ("column_wise", "table_column_wise"):
        plan_data["tables"]["users"]["sharding_type"] = kind
        (tmp_path / "b.json").write_text(json.dumps(plan_data))
        done = run("diff", "a.json", "b.json", "--json")
        assert json.loads(done.out)["same"]


@pytest.mark.parametrize("command", ["predict", "explain"])
def test_a_model_and_a_plan_in_each_others_place(
    run, model: Path, tmp_path: Path, plan_data, command: str
) -> None:
    (tmp_path / "p.json").write_text(json.dumps(plan_data))
    done = run(command, "p.json", model)
    assert done.code == 2
    assert "model.yaml: is a model file, not a plan; the model comes first" in done.err
    done = run(command, "p.json", "p.json")
    assert done.code == 2
    assert "p.json: is a plan, not a model file; the model comes first" in done.err


@pytest.mark.parametrize("command", ["plan", "predict", "diff", "stats", "--help"])
def test_the_help_lists_the_exit_codes(run, command: str) -> None:
    shown = " ".join(run(*dict.fromkeys((command, "--help"))).out.split())
    codes = shown[shown.index("Exit codes:") :]
    assert [int(code) for code in re.findall(r"\b\d+\b", codes)] == [0, 2, 3, 4, 70, 130, 143, 141]
