"""`shardopt bench generate` and `bench replay`: what they print, and input that they refuse."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")


def test_generate_and_replay(as_json, traces: Path, tmp_path: Path) -> None:
    generated = as_json("bench", "generate", traces, "-o", tmp_path / "b")
    assert (generated["ranks"], generated["ops_left_out"]) == (1, 0)
    result = as_json("bench", "replay", tmp_path / "b", "--iterations", 2, "--device", "cpu")
    assert result["ops_total"] == result["ops_replayed"] == generated["ops_total"]
    assert result["coverage"] == 1.0
    assert result["median_ms"] > 0
    assert len(result["samples_ms"]) == 2
    assert not any("time-limit" in note for note in result["notes"])


@pytest.mark.slow
def test_scaled_benchmarks_run(as_json, traces: Path, tmp_path: Path) -> None:
    """A job whose sizes do not grow is its own double."""
    words = ("--scale", "batch=3", "--doubled", traces)
    generated = as_json("bench", "generate", traces, "-o", tmp_path / "b", *words)
    result = as_json("bench", "replay", tmp_path / "b", "--iterations", 2, "--device", "cpu")
    assert result["ops_replayed"] == generated["ops_total"]
    assert result["coverage_by"] == "count"


@pytest.mark.slow
def test_time_that_is_up_ends_a_replay(run, traces: Path, tmp_path: Path) -> None:
    assert run("bench", "generate", traces, "-o", tmp_path / "b").code == 0
    done = run("bench", "replay", tmp_path / "b", "--device", "cpu", "--time-limit", 1e-6, "--json")
    result = json.loads(done.out)
    assert len(result["samples_ms"]) == 1
    assert any("1 of 20 iterations were measured" in note for note in result["notes"])
