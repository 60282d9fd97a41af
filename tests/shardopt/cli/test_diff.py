"""`shardopt hardware` and `shardopt diff`."""

import json
import re
from pathlib import Path
from typing import Any


def test_hardware_lists_every_profile_and_how_far_it_can_be_trusted(run, as_json) -> None:
    data = as_json("hardware")
    assert data["default"] == "h100-sxm"
    assert "cpu-gloo" in data["profiles"]
    shown = " ".join(run("hardware").out.split())
    for name in ("v100-32gb", "a100-40gb", "a100-80gb", "h100-sxm *", "h200-sxm", "b200"):
        assert name in shown
    rows = as_json("hardware", "h100-sxm")["gemm"]["provenance"]["error"]["n"]
    assert re.search(rf"gemm [\d.]+ % \({rows}\)", shown)
    assert "h200-nvl not validated" in shown


UNDER_TORCHREC = "Whole iterations under TorchRec: "


def test_hardware_shows_sources_and_errors(run, as_json) -> None:
    data = as_json("hardware", "h100-sxm")
    assert data["memory"]["provenance"]["source"]
    assert data["memory"]["provenance"]["error"] is None
    error = data["known_error"][0]
    assert (error["suite"], error["runtime"]) == ("mlperf-dlrm", "HugeCTR")
    shown = " ".join(run("hardware", "h100-sxm").out.split())
    for words in ("collectives.inter", "hbm_gb_s", "1 sigma", "Known error: not validated"):
        assert words in shown
    assert f"on {data['gemm']['provenance']['error']['n']:,} rows of gemm" in shown
    own = shown.index(f"{UNDER_TORCHREC}not validated")
    assert own < shown.index("Whole iterations under HugeCTR (not TorchRec): mean error")
    assert f"{UNDER_TORCHREC}mean error" in run("hardware", "a100-40gb").out
    assert as_json("hardware", "b200")["known_error"] == []
    assert f"{UNDER_TORCHREC}not validated" in run("hardware", "b200").out


def test_hardware_of_a_file_over_a_base(run, as_json, tmp_path: Path) -> None:
    overheads = as_json("hardware", "h100-sxm")["overheads"]
    (tmp_path / "mine.yaml").write_text(json.dumps({"base": "h100-sxm", "overheads": overheads}))
    shown = run("hardware", "mine.yaml")
    assert shown.code == 0
    assert "overheads  from mine.yaml;" in shown.out
    assert "gemm  from h100-sxm;" in shown.out
    data = as_json("hardware", "mine.yaml")
    assert (data["name"], data["origins"]["overheads"]) == ("mine", "mine.yaml")
    assert data["origins"]["collectives.intra"] == "h100-sxm"
    assert "from h100-sxm" not in run("hardware", "h100-sxm").out


def test_diff(run, as_json, refused, tmp_path: Path, plan_data: dict[str, Any]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(plan_data))
    plan_data["tables"]["users"]["shards"][0]["rank"] = 1
    (tmp_path / "b.json").write_text(json.dumps(plan_data))
    data = as_json("diff", "a.json", "b.json")
    assert (data["same"], data["tables_same"]) == (False, 2)
    users = data["tables"]["users"]
    assert users["differs"] == ["ranks"]
    assert (users["a"]["ranks"], users["b"]["ranks"]) == ([0], [1])
    assert "TW on 0" in run("diff", "a.json", "b.json").out
    assert "No table differs (3)." in run("diff", "a.json", "a.json").out
    assert as_json("diff", "a.json", "a.json")["same"]
    refused("diff", "a.json", "none.json", says="none.json")


def test_a_table_in_one_column_shard_is_table_wise(as_json, plan, tmp_path, plan_data) -> None:
    for kind in ("column_wise", "table_column_wise"):
        plan_data["tables"]["users"]["sharding_type"] = kind
        (tmp_path / "b.json").write_text(json.dumps(plan_data))
        assert as_json("diff", plan, "b.json")["same"]
