"""`shardopt bench generate` and `bench replay`: what they print, and input that they refuse."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.shardopt.replay.captured import capture, small_step


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(small_step(), tmp_path_factory.mktemp("traces"))


def test_generate_and_replay(run, traces: Path, tmp_path: Path) -> None:
    done = run("bench", "generate", traces, "-o", tmp_path / "b", "--json")
    assert done.code == 0, done.err
    made = json.loads(done.out)
    assert (made["ranks"], made["ops_left_out"]) == (1, 0)
    done = run("bench", "replay", tmp_path / "b", "--json", "--iterations", 2, "--device", "cpu")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["ops_total"] == result["ops_replayed"] == made["ops_total"]
    assert result["coverage"] == 1.0
    assert result["median_ms"] > 0
    assert len(result["samples_ms"]) == 2
    assert not any("time-limit" in note for note in result["notes"])


@pytest.mark.slow
def test_time_that_is_up_ends_a_replay(run, traces: Path, tmp_path: Path) -> None:
    assert run("bench", "generate", traces, "-o", tmp_path / "b").code == 0
    done = run("bench", "replay", tmp_path / "b", "--device", "cpu", "--time-limit", 1e-6, "--json")
    result = json.loads(done.out)
    assert len(result["samples_ms"]) == 1
    assert any("1 of 20 iterations were measured" in note for note in result["notes"])


@pytest.mark.parametrize("indices", ["zipf", "zipf:x", "zipf:-1", "zipf:nan", "normal:1", ""])
def test_distributions_that_there_are_not(run, traces: Path, tmp_path: Path, indices: str) -> None:
    done = run("bench", "generate", traces, "-o", tmp_path / "b", "--indices", indices)
    assert done.code == 2
    assert "give uniform or zipf:ALPHA" in done.err


def test_folders_that_hold_something_else(run, traces: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    done = run("bench", "generate", traces, "-o", tmp_path)
    assert done.code == 2
    assert "holds other files" in done.err
    done = run("bench", "generate", traces, "-o", tmp_path / "no" / "where")
    assert done.code == 2
    assert "create it first" in done.err


def test_replay_of_no_benchmark(run, tmp_path: Path) -> None:
    done = run("bench", "replay", tmp_path)
    assert done.code == 2
    assert "bench generate" in done.err
    done = run("bench", "replay", tmp_path, "--iterations", 0)
    assert done.code == 2
    assert "--iterations" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--scale", "batch=0"), "give batch=N"),
        (("--scale", "rows=2"), "give batch=N"),
        (("--scale", "batch=2,batch=2"), "give batch=N"),
        (("--scale", "batch=2", "--batch", 0), "from 1"),
        (("--scale", "batch=2", "--batch", 3), "no multiple of 3 samples"),
        (("--scale", "batch=2", "--batch", 4, "--doubled", "x.json"), "do not go together"),
        (("--batch", 4), "flags: --batch, --scale"),
        (("--doubled", "x.json"), "flags: --doubled, --scale"),
        (("--scale", "batch=2", "--doubled", "x.json", "--join"), "flags: --scale, --join"),
    ],
)
def test_scales_that_there_are_not(
    run, traces: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    done = run("bench", "generate", traces, "-o", tmp_path / "b", *words)
    assert done.code == 2
    assert said in done.err
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False])
def test_scaled_benchmarks_run(run, traces: Path, tmp_path: Path, alone: bool) -> None:
    """Of two traces, a job whose sizes do not grow is its own double."""
    words = ("--scale", "batch=3", *(() if alone else ("--doubled", traces)))
    done = run("bench", "generate", traces, "-o", tmp_path / "b", "--json", *words)
    assert done.code == 0, done.err
    made = json.loads(done.out)
    done = run("bench", "replay", tmp_path / "b", "--json", "--iterations", 2, "--device", "cpu")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["ops_replayed"] == made["ops_total"]
    assert result["coverage_by"] == "count"


@pytest.mark.slow
def test_predict(run, traces: Path, tmp_path: Path) -> None:
    assert run("bench", "generate", traces, "-o", tmp_path / "b").code == 0
    done = run("bench", "predict", tmp_path / "b", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["predicted_ms"] > 0
    assert result["without_law"]["aten::_embedding_bag_forward_only"]["count"] == 1
    assert 0 < sum(of["share"] for of in result["without_law"].values()) < 1
    done = run("bench", "predict", tmp_path / "b", "--hardware", "h100-sxm")
    assert done.code == 2
