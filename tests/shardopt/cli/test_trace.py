"""`shardopt trace`: breakdown, prediction, the timeline, and files that cannot be used."""

import json
from pathlib import Path

import pytest

from tests.predictor.trace.synthetic import execution, kineto, write

PARTS = {"compute", "exposed_communication", "memcpy", "host_bound", "idle"}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two ranks of three steps."""
    return [write(tmp_path, f"rank{r}.json.gz", kineto(r, steps=3)) for r in (0, 1)]


def test_json(as_json, files: list[Path]) -> None:
    data = as_json("trace", *files)
    assert [(s["rank"], s["step"]) for s in data["steps"]] == [
        (rank, f"ProfilerStep#{step}") for rank in (0, 1) for step in (3, 4, 5)
    ]
    for step in data["steps"]:
        assert set(step["breakdown"]) == PARTS
        assert sum(step["breakdown"].values()) == pytest.approx(step["measured_ms"])
        assert step["predicted_ms"] > 0
    mean = sum(s["measured_ms"] for s in data["steps"]) / 6
    assert sum(data["breakdown"].values()) == pytest.approx(mean)
    assert data["device"] == "Some GPU"
    assert data["kernels"][0]["name"] == "ncclKernel_AllReduce_RING_LL_Sum_float"
    assert {s["rank"] for s in data["critical_path"]} <= {0, 1}
    assert data["notes"] == []
    assert not any(s["outside"] for s in data["steps"])


def test_report(run, files: list[Path]) -> None:
    done = run("trace", *files)
    assert done.code == 0, done.err
    for words in ("Ranks 0-1 of 2 on Some GPU", "predicted", "Steps", "mm_kernel", "critical path"):
        assert words in done.out
    assert all(len(line) <= 100 for line in done.out.splitlines())


def test_without_prediction_the_breakdown_stays(run, tmp_path: Path) -> None:
    path = write(tmp_path, "rank0.json", kineto(0, markers=False))
    done = run("trace", path, "--json")
    (step,) = json.loads(done.out)["steps"]
    assert (step["step"], step["predicted_ms"]) == ("whole trace", None)
    assert "no ProfilerStep markers" in done.err
    assert "no prediction: " in done.err
    assert "where the time goes" in run("trace", path).out


def test_ranks_of_a_part_of_the_job_keep_their_numbers(as_json, tmp_path: Path) -> None:
    path = write(tmp_path, "rank5.json", kineto(5, world_size=8, steps=3))
    data = as_json("trace", path)
    assert {s["rank"] for s in data["steps"]} == {s["rank"] for s in data["critical_path"]} == {5}


def test_execution_traces_alone(run, as_json, refused, tmp_path: Path) -> None:
    path = write(tmp_path, "et_2.json", execution(2))
    done = run("trace", path)
    assert done.code == 0, done.err
    assert "no times, kernels or streams" in done.out
    assert "no times for rank 2" in done.err
    data = as_json("trace", path)
    assert (data["steps"], data["breakdown"]) == ([], {})
    assert data["executions"][0]["collectives"] == [{"op": "all_reduce", "size_bytes": 4000}]
    assert "no steps" in run("trace", path, "--quiet").out
    refused("trace", path, "--trace", "out.json", says="no times to draw")


def test_timeline_draws_both(run, files: list[Path], tmp_path: Path) -> None:
    done = run("trace", *files, "--trace", "out.json")
    assert done.code == 0, done.err
    assert "wrote out.json" in done.err
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [names[pid] for pid in sorted(names)] == [
        "rank 0 measured",
        "rank 0 predicted",
        "rank 1 measured",
        "rank 1 predicted",
    ]
    drawn = {names[e["pid"]] for e in events if e["ph"] == "X" and "mm_kernel" in e["name"]}
    assert drawn == set(names.values())
    last = max(e["ts"] for e in events if e["name"] == "ProfilerStep#5")
    assert last == 0
