"""`shardopt explain`: critical path, waits, changes that help, sensitivity, page and trace."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def lopsided(tmp_path: Path, plan_data: dict[str, Any]) -> Path:
    """All of the embeddings on rank 0."""
    plan_data["tables"]["items"] = {
        "sharding_type": "table_wise",
        "compute_kernel": "fused",
        "shards": [{"rank": 0, "offset": [0, 0], "size": [50000, 64]}],
    }
    path = tmp_path / "lopsided.json"
    path.write_text(json.dumps(plan_data))
    return path


def test_json_path_fills_the_iteration_and_a_page_is_written_whole(
    run, model: Path, plan: Path, tmp_path: Path
) -> None:
    done = run("explain", model, plan, "--json", "--html", "out.html")
    data = json.loads(done.out)
    path = data["critical_path"]
    assert path[0]["start_ms"] == 0
    assert sum(s["duration_ms"] for s in path) == pytest.approx(data["iteration_ms"])
    assert all(a["start_ms"] <= b["start_ms"] for a, b in pairwise(path))
    text = (tmp_path / "out.html").read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert text.rstrip().endswith("</html>")
    assert [path.name for path in tmp_path.glob("*.html")] == ["out.html"]


def test_who_waits_for_whose_tables(run, model: Path, lopsided: Path) -> None:
    data = json.loads(run("explain", model, lopsided, "--json").out)
    first = data["waits"][0]
    assert (first["rank"], first["late_rank"]) == (1, 0)
    assert "items" in first["causes"][0]["tables"]
    assert "days" not in first["causes"][0]["tables"]
    shown = run("explain", model, lopsided).out
    for word in ("Rank 1 waits", "Critical path", "Sensitivity"):
        assert word in " ".join(shown.split())


def test_changes_come_as_tables_of_a_plan_that_is_that_much_faster(
    run, model: Path, lopsided: Path, tmp_path: Path
) -> None:
    data = json.loads(run("explain", model, lopsided, "--json").out)
    found = data["changes"]["found"]
    assert 1 <= len(found) <= 3
    savings = [change["saving_ms"] for change in found]
    assert savings == sorted(savings, reverse=True)
    for change in found:
        changed = json.loads(lopsided.read_text())
        changed["tables"].update(change["tables"])
        path = tmp_path / "changed.json"
        path.write_text(json.dumps(changed))
        after = json.loads(run("predict", model, path, "--json").out)["predictions"][0]
        assert after["iteration_ms"] == pytest.approx(change["iteration_ms"])
        assert data["iteration_ms"] - after["iteration_ms"] == pytest.approx(change["saving_ms"])


def test_further_plans_are_compared(run, model: Path, plan: Path, lopsided: Path) -> None:
    data = json.loads(run("explain", model, plan, lopsided, "--json").out)
    (other,) = data["others"]
    alone = json.loads(run("predict", model, lopsided, "--json").out)["predictions"][0]
    assert other == alone
    assert run("explain", model, plan, lopsided, "--quiet").out.count(" ms") == 2


def test_trace_is_written_and_opens_as_json(run, model: Path, plan: Path, tmp_path: Path) -> None:
    done = run("explain", model, plan, "--trace", "out.json", "--quiet")
    assert done.code == 0
    trace = json.loads((tmp_path / "out.json").read_text())
    assert trace["otherData"]["plan"] == str(plan)
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}
    named = [e for e in trace["traceEvents"] if e["name"] == "thread_name"]
    tracks = {(e["pid"], e["args"]["name"]) for e in named}
    assert {(rank, stream) for rank in (0, 1) for stream in ("host", "compute", "comm")} <= tracks


@pytest.mark.parametrize("flag", ["--trace", "--html"])
def test_outputs_that_cannot_be(refused, model: Path, plan: Path, flag: str) -> None:
    refused("explain", model, plan, flag, "no/out.json", says="no")
    refused("explain", model, plan, flag, plan, says="is an input")
    refused("explain", model, plan, "--html", "out", "--trace", "./out", says="different files")
