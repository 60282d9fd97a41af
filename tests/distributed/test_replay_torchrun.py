"""Benchmarks under torchrun, joined ones, and the way round through the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec")

from predictor.trace.read import load_traces
from shardopt.replay.generate import generate, program_of
from shardopt.replay.launch import replay
from shardopt.replay.program.build import Annotations
from shardopt.replay.program.program import RankProgram
from tests.distributed.ranks import REPOSITORY, run_ranks
from tests.shardopt.replay.differences import differences, signatures

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

QUICK = ["--device", "cpu", "--warm-up", "1", "--iterations", "2"]


def captured(worker: str, place: Path) -> Path:
    """What a worker of two gloo ranks writes."""
    run_ranks(worker, place)
    return place


@pytest.fixture(scope="module")
def dlrm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured("replay_worker", tmp_path_factory.mktemp("dlrm")) / "traces"


@pytest.fixture(scope="module")
def collectives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured("collectives_worker", tmp_path_factory.mktemp("collectives"))


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return kept | {"PYTHONPATH": str(REPOSITORY), "GLOO_SOCKET_IFNAME": "lo"}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], env=environment(), capture_output=True, text=True, timeout=180
    )


def torchrun(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return run(*start, *words)


def test_under_torchrun(dlrm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    made = generate([dlrm], folder)
    alone = torchrun(2, str(folder / "benchmark.py"), *QUICK)
    assert alone.returncode == 0, alone.stderr
    # one object, from rank 0
    result = json.loads(alone.stdout)
    assert (result["ranks"], result["ops_replayed"]) == (2, made.ops_total)
    command = ["-m", "shardopt", "bench", "replay", str(folder), *QUICK]
    done = torchrun(2, *command, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["collective_bytes"] == result["collective_bytes"]
    shown = torchrun(3, *command)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("ms per iteration on 3 CPU ranks") == 1
    wrong = torchrun(2, *command, "--from-annotation", "nowhere")
    assert wrong.returncode != 0
    assert "no part has this name" in wrong.stderr
    assert wrong.stdout == ""
    refused = torchrun(1, *command, "--ranks", "1")
    assert refused.returncode != 0
    assert "leave --ranks out under torchrun" in refused.stderr


def test_two_jobs_of_ranks_joined(dlrm: Path, collectives: Path, tmp_path: Path) -> None:
    parts = [dlrm, collectives / "all_ranks", collectives / "one_to_one"]
    made = generate(parts, tmp_path / "b", join=True)
    result = replay(tmp_path / "b", QUICK)
    assert result["not_replayed"] == {}
    assert result["notes"] == []
    assert result["ops_replayed"] == made.ops_total == result["ops_total"]
    alone = [generate([part], tmp_path / str(at)) for at, part in enumerate(parts)]
    assert made.ops_total == sum(of.ops_total for of in alone)
    recorded = [
        [c.bytes for of in alone for c in of.programs[rank].calls if c.bytes is not None]
        for rank in range(2)
    ]
    assert result["collective_bytes"] == recorded


def programs(folder: Path) -> list[RankProgram]:
    found = load_traces([folder])
    return [program_of(trace, found, Annotations()) for trace in found.executions]


def test_the_way_round_through_the_command_line(dlrm: Path, tmp_path: Path) -> None:
    first, again, second = (str(tmp_path / name) for name in ("first", "again", "second"))
    command = ["-m", "shardopt", "bench"]
    for words in (
        ["generate", str(dlrm), "-o", first, "--quiet"],
        ["replay", first, *QUICK, "--profile", again, "--quiet"],
        ["generate", again, "-o", second, "--quiet"],
        ["replay", second, *QUICK, "--json"],
    ):
        done = run(*command, *words)
        assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["coverage"] == 1.0
    for one, other in zip(programs(dlrm), programs(Path(again)), strict=True):
        assert not list(differences(signatures(one), signatures(other)))
    # shapes, strides and types of what is made up front, and where it lies
    for rank in range(2):
        made = [json.loads((Path(of) / f"rank{rank}.json").read_text()) for of in (first, second)]
        shapes = [
            sorted((spec["shape"], spec["strides"], spec["dtype"]) for spec in of["made"].values())
            for of in made
        ]
        assert shapes[0] == shapes[1]
        assert [of["op"] for of in made[0]["calls"]] == [of["op"] for of in made[1]["calls"]]
