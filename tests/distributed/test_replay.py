"""Generated benchmarks run, and captured again they are the graph that they were made from."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torchrec")

from lab.transformers import TransformerShape
from predictor.errors import InputError
from predictor.trace.read import load_traces
from shardopt.replay.generate import generate, program_of
from shardopt.replay.launch import ReplayError, replay
from shardopt.replay.program.build import Annotations
from shardopt.replay.program.program import RankProgram
from tests.distributed.ranks import run_ranks
from tests.shardopt.replay.captured import capture, edited, small_step
from tests.shardopt.replay.differences import differences, signatures

pytestmark = pytest.mark.distributed

QUICK = ["--device", "cpu", "--warm-up", "1", "--iterations", "2"]


def programs(folder: Path) -> list[RankProgram]:
    found = load_traces([folder])
    return [program_of(trace, found, Annotations()) for trace in found.executions]


def check_fixpoint(traces: Path, place: Path) -> dict:
    """The same ops in order, shapes, strides, types and bytes of collectives on every rank."""
    generate([traces], place / "b")
    result = replay(place / "b", [*QUICK, "--profile", str(place / "again")])
    assert result["ops_replayed"] == result["ops_total"] > 0
    assert result["not_replayed"] == {}
    assert result["coverage"] == 1.0
    assert result["coverage_by"] == "time"
    first, second = programs(traces), programs(place / "again")
    assert [p.rank for p in first] == [p.rank for p in second]
    for one, other in zip(first, second, strict=True):
        assert not list(differences(signatures(one), signatures(other)))
    recorded = [[c.bytes for c in p.calls if c.bytes is not None] for p in first]
    assert result["collective_bytes"] == recorded
    return result


@pytest.mark.slow
def test_convnet_with_embedding_bag(tmp_path: Path) -> None:
    check_fixpoint(capture(small_step(), tmp_path / "traces"), tmp_path)


@pytest.mark.slow
def test_transformer(tmp_path: Path) -> None:
    from lab.replay.transformers import Training

    training = Training(TransformerShape("bert", 1, 32, 2, 64, 50, 8, 2))
    check_fixpoint(capture(training.step, tmp_path / "traces"), tmp_path)


@pytest.fixture(scope="module")
def dlrm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of two gloo ranks that train a DLRM under TorchRec, sharded in five ways."""
    job = tmp_path_factory.mktemp("dlrm")
    run_ranks("replay_worker", job)
    return job / "traces"


@pytest.mark.slow
def test_dlrm_under_torchrec(dlrm: Path, tmp_path: Path) -> None:
    result = check_fixpoint(dlrm, tmp_path)
    assert result["ranks"] == 2
    folder = tmp_path / "b"
    comms = replay(folder, [*QUICK, "--subset", "comms"])
    compute = replay(folder, [*QUICK, "--subset", "compute"])
    assert comms["ops_total"] + compute["ops_total"] == result["ops_total"]
    assert comms["ops_total"] == sum(map(len, result["collective_bytes"]))
    assert compute["collective_bytes"] == [[], []]
    part = replay(folder, [*QUICK, "--from-annotation", "## forward ##"])
    assert 0 < part["ops_replayed"] == part["ops_total"] < result["ops_total"]
    only = replay(folder, [*QUICK, "--ops", "addmm"])
    assert 0 < only["ops_replayed"] == only["ops_total"]
    for ranks in (1, 3):
        other = replay(folder, QUICK, ranks)
        assert other["ranks"] == ranks
        assert "even parts instead" in " ".join(other["notes"])
    with pytest.raises(ReplayError, match="there are: "):
        replay(folder, [*QUICK, "--from-annotation", "nowhere"])


def rewritten(traces: Path, change: Callable[[dict], None]) -> Path:
    return edited(traces / "rank0.et.json", change)


@pytest.mark.slow
def test_ops_that_are_not_installed_are_replaced(tmp_path: Path) -> None:
    def rename(node: dict) -> None:
        for attribute in node["attrs"]:
            if attribute["name"] == "op_schema" and node["name"] == "aten::relu":
                attribute["value"] = attribute["value"].replace("aten::relu", "corp::relu")

    traces = capture(small_step(), tmp_path / "traces")
    generate([rewritten(traces, rename)], tmp_path / "b")
    result = replay(tmp_path / "b", QUICK)
    assert result["not_replayed"] == {"corp::relu.default: is not installed here": 1}
    assert result["ops_replayed"] == result["ops_total"] - 1
    assert result["median_ms"] > 0
    with pytest.raises(ReplayError, match=r"--strict: not replayed: corp::relu"):
        replay(tmp_path / "b", [*QUICK, "--strict"])


def test_folders_without_a_benchmark(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no benchmark"):
        replay(tmp_path)
    (tmp_path / "data.json").write_text(json.dumps({"schema": "other"}))
    with pytest.raises(InputError, match="not a benchmark of schema"):
        replay(tmp_path)
