"""`shardopt explain`: critical path, changes that help, the trace."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def plan(tmp_path: Path, plan_data: dict[str, Any]) -> Path:
    path = tmp_path / "given.json"
    path.write_text(json.dumps(plan_data))
    return path


def test_report(run, model: Path, plan: Path) -> None:
    done = run("explain", model, plan)
    assert done.code == 0, done.err
    for words in ("Critical path", "What would help most", "Ranks", "The largest part is"):
        assert words in done.out


def test_json_path_fills_the_iteration(run, model: Path, plan: Path) -> None:
    data = json.loads(run("explain", model, plan, "--json").out)
    path = data["critical_path"]
    assert path[0]["start_ms"] == 0
    assert sum(s["duration_ms"] for s in path) == pytest.approx(data["iteration_ms"])
    assert all(a["start_ms"] <= b["start_ms"] for a, b in pairwise(path))


def test_changes_help_and_come_sorted(run, model: Path, plan: Path) -> None:
    data = json.loads(run("explain", model, plan, "--json").out)
    savings = [change["saving_ms"] for change in data["what_if"]]
    assert savings == sorted(savings, reverse=True)
    assert savings
    for change in data["what_if"]:
        assert change["saving_ms"] > 0
        total = change["iteration_ms"] + change["saving_ms"]
        assert total == pytest.approx(data["iteration_ms"])


def test_trace_is_written_and_opens_as_json(run, model: Path, plan: Path, tmp_path: Path) -> None:
    done = run("explain", model, plan, "--trace", "out.json", "--quiet")
    assert done.code == 0
    trace = json.loads((tmp_path / "out.json").read_text())
    assert trace["otherData"]["plan"] == str(plan)
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}


def test_trace_to_nowhere_is_refused(run, model: Path, plan: Path) -> None:
    done = run("explain", model, plan, "--trace", "no/out.json")
    assert (done.code, done.out) == (2, "")
    done = run("explain", model, plan, "--trace", plan)
    assert (done.code, "is an input" in done.err) == (2, True)
