"""`shardopt explain`: critical path, waits, changes that help, sensitivity, page and trace."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.shardopt.cli.conftest import said_as_json
from tests.shardopt.conftest import MODEL, a_plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model, a plan, and a plan with all embeddings on rank 0."""
    folder = tmp_path_factory.mktemp("explain")
    (folder / "model.yaml").write_text(MODEL)
    (folder / "given.json").write_text(json.dumps(a_plan()))
    lopsided = a_plan()
    shards = [{"rank": 0, "offset": [0, 0], "size": [50000, 64]}]
    lopsided["tables"]["items"] |= {"sharding_type": "table_wise", "shards": shards}
    (folder / "lopsided.json").write_text(json.dumps(lopsided))
    return folder


BOTH = ("model.yaml", "lopsided.json", "given.json")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """JSON output of the command on the lopsided plan, beside the other."""
    return said_as_json(folder, "explain", *BOTH, "--html", "out.html", "--trace", "out.json")


def test_the_path_fills_the_iteration(found: dict[str, Any]) -> None:
    path = found["critical_path"]
    assert path[0]["start_ms"] == 0
    assert sum(s["duration_ms"] for s in path) == pytest.approx(found["iteration_ms"])
    assert all(a["start_ms"] <= b["start_ms"] for a, b in pairwise(path))


def test_who_waits_for_whose_tables(found: dict[str, Any]) -> None:
    first = found["waits"][0]
    assert (first["rank"], first["late_rank"]) == (1, 0)
    assert "items" in first["causes"][0]["tables"]
    assert "days" not in first["causes"][0]["tables"]


def test_changes_come_as_tables_of_a_plan_that_is_that_much_faster(
    folder: Path, found: dict[str, Any]
) -> None:
    changes = found["changes"]["found"]
    assert 1 <= len(changes) <= 3
    savings = [change["saving_ms"] for change in changes]
    assert savings == sorted(savings, reverse=True)
    for change in changes:
        changed = json.loads((folder / "lopsided.json").read_text())
        changed["tables"].update(change["tables"])
        (folder / "changed.json").write_text(json.dumps(changed))
        (after,) = said_as_json(folder, "predict", "model.yaml", "changed.json")["predictions"]
        assert after["iteration_ms"] == pytest.approx(change["iteration_ms"])
        assert found["iteration_ms"] - after["iteration_ms"] == pytest.approx(change["saving_ms"])


def test_further_plans_are_compared(folder: Path, found: dict[str, Any]) -> None:
    alone = said_as_json(folder, "predict", "model.yaml", "given.json")
    assert found["others"] == alone["predictions"]


@pytest.mark.usefixtures("found")
def test_page_and_trace_are_written_whole(folder: Path) -> None:
    text = (folder / "out.html").read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert text.rstrip().endswith("</html>")
    trace = json.loads((folder / "out.json").read_text())
    assert trace["otherData"]["plan"] == "lopsided.json"
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}
    named = [e for e in trace["traceEvents"] if e["name"] == "thread_name"]
    tracks = {(e["pid"], e["args"]["name"]) for e in named}
    assert {(rank, stream) for rank in (0, 1) for stream in ("host", "compute", "comm")} <= tracks
