"""`shardopt hardware` and `shardopt diff`."""

import json
from pathlib import Path
from typing import Any


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
