"""Generated benchmarks run, alone and under torchrun, and captured again they are the graph that
they were made from: of single processes, of a DLRM on two ranks, of every collective of gloo."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from lab.transformers import TransformerShape
from predictor.errors import InputError
from shardopt.cli.app import main
from shardopt.replay.generate import generate
from shardopt.replay.launch import ReplayError, replay
from shardopt.replay.program.program import RankProgram
from tests.distributed import training_case as case
from tests.distributed.ranks import on_ranks, torchrun
from tests.distributed.replay_case import QUICK, captured, check_fixpoint, check_same
from tests.shardopt.replay.captured import capture, edited, small_step

pytestmark = pytest.mark.distributed


def test_folders_without_a_benchmark(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no benchmark"):
        replay(tmp_path)
    (tmp_path / "data.json").write_text(json.dumps({"schema": "other"}))
    with pytest.raises(InputError, match="schema"):
        replay(tmp_path)


@pytest.mark.slow
def test_convnet_with_embedding_bag(tmp_path: Path) -> None:
    _, result = check_fixpoint(capture(small_step(), tmp_path / "traces"), tmp_path)
    assert (result["coverage"], result["coverage_by"]) == (1.0, "time")


@pytest.mark.slow
def test_transformer(tmp_path: Path) -> None:
    from lab.replay.transformers import Training

    training = Training(TransformerShape("bert", 1, 32, 2, 64, 50, 8, 2))
    check_fixpoint(capture(training.step, tmp_path / "traces"), tmp_path)


@pytest.mark.slow
def test_ops_that_are_not_installed_are_replaced(tmp_path: Path) -> None:
    def rename(node: dict[str, Any]) -> None:
        for attribute in node["attrs"]:
            if attribute["name"] == "op_schema" and node["name"] == "aten::relu":
                attribute["value"] = attribute["value"].replace("aten::relu", "corp::relu")

    traces = capture(small_step(), tmp_path / "traces")
    generate([edited(traces / "rank0.et.json", rename)], tmp_path / "b")
    result = replay(tmp_path / "b", QUICK)
    assert result["not_replayed"] == {"corp::relu.default: is not installed here": 1}
    assert result["ops_replayed"] == result["ops_total"] - 1
    assert result["median_ms"] > 0
    with pytest.raises(ReplayError, match="corp::relu"):
        replay(tmp_path / "b", [*QUICK, "--strict"])


# --- a DLRM under TorchRec -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def dlrm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of two gloo ranks that train a DLRM under TorchRec, sharded in five ways."""
    plan = case.make_plan(case.MIXED)
    return captured(tmp_path_factory.mktemp("dlrm"), case.workload(), plan)


def test_dlrm_under_torchrec(dlrm: Path, tmp_path: Path) -> None:
    _, result = check_fixpoint(dlrm, tmp_path)
    assert result["ranks"] == 2


@pytest.mark.slow
def test_parts_of_a_dlrm_and_other_numbers_of_ranks(dlrm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    generate([dlrm], folder)
    result = replay(folder, QUICK)
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
        replayed = replay(folder, QUICK, ranks)
        assert replayed["ranks"] == ranks
        assert "even parts instead" in " ".join(replayed["notes"])
    with pytest.raises(ReplayError, match="there are: "):
        replay(folder, [*QUICK, "--from-annotation", "nowhere"])


@pytest.mark.slow
def test_under_torchrun(dlrm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    generated = generate([dlrm], folder)
    alone = torchrun(2, folder / "benchmark.py", *QUICK)
    assert alone.returncode == 0, alone.stderr
    # one object, from rank 0
    result = json.loads(alone.stdout)
    assert (result["ranks"], result["ops_replayed"]) == (2, generated.ops_total)
    command = ["-m", "shardopt", "bench", "replay", str(folder), *QUICK]
    done = torchrun(2, *command, "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["collective_bytes"] == result["collective_bytes"]
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


@pytest.mark.slow
def test_the_way_round_through_the_command_line(
    dlrm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, again, second = (str(tmp_path / name) for name in ("first", "again", "second"))
    for words in (
        ["generate", str(dlrm), "-o", first, "--quiet"],
        ["replay", first, *QUICK, "--profile", again, "--quiet"],
        ["generate", again, "-o", second, "--quiet"],
        ["replay", second, *QUICK, "--json"],
    ):
        capsys.readouterr()
        assert main(["bench", *words]) == 0
    assert json.loads(capsys.readouterr().out)["coverage"] == 1.0
    check_same(dlrm, Path(again))
    # shapes, strides and types of what is made up front, and where it lies
    for rank in range(2):
        programs_of_rank = [
            json.loads((Path(benchmark) / f"rank{rank}.json").read_text())
            for benchmark in (first, second)
        ]
        shapes = [
            sorted(
                (spec["shape"], spec["strides"], spec["dtype"])
                for spec in benchmark["made"].values()
            )
            for benchmark in programs_of_rank
        ]
        assert shapes[0] == shapes[1]
        assert [benchmark["op"] for benchmark in programs_of_rank[0]["calls"]] == [
            benchmark["op"] for benchmark in programs_of_rank[1]["calls"]
        ]


# --- every collective of gloo --------------------------------------------------------------------

ALL_RANKS = [
    "allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_",
    "_allgather_base_", "allgather_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
    "gather_", "scatter_", "alltoall_", "alltoall_base_", "allgather_into_tensor_coalesced_",
    "reduce_scatter_tensor_coalesced_", "barrier", "monitored_barrier_",
]  # fmt: skip


def made(*shape: int) -> torch.Tensor:
    """A tensor that ops of the trace make."""
    return torch.ones(*shape)


def all_ranks() -> None:
    """Each collective of c10d that gloo has."""
    first = dist.get_rank() == 0
    work = dist.all_reduce(made(5), async_op=True)
    dist.all_reduce_coalesced([made(2), made(3)])
    dist.broadcast(made(4), 1)
    dist.reduce(made(6), 1)
    dist.all_gather([made(3), made(3)], made(3))
    dist.all_gather_into_tensor(made(6), made(3))
    dist.all_gather_coalesced([[made(2), made(3)], [made(2), made(3)]], [made(2), made(3)])
    dist.reduce_scatter(made(3), [made(3), made(3)])
    dist.reduce_scatter_tensor(made(3), made(6))
    dist.gather(made(4), [made(4), made(4)] if first else None, dst=0)
    dist.scatter(made(4), None if first else [made(4), made(4)], src=1)
    dist.all_to_all([made(3), made(3)], [made(3), made(3)])
    splits = [1, 2] if first else [2, 3]
    dist.all_to_all_single(made(sum(splits)), made(sum(splits)), splits, splits)
    with dist.distributed_c10d._coalescing_manager():
        dist.all_gather_into_tensor(made(6), made(3))
        dist.all_gather_into_tensor(made(4), made(2))
    with dist.distributed_c10d._coalescing_manager():
        dist.reduce_scatter_tensor(made(3), made(6))
        dist.reduce_scatter_tensor(made(2), made(4))
    dist.barrier()
    dist.monitored_barrier()
    work.wait()


@cache
def mesh() -> DeviceMesh:
    """Return a mesh of both ranks, made before the capture because making it reads values."""
    return DeviceMesh("cpu", [0, 1])


def in_wrappers() -> None:
    """Functional collectives, and a product of DTensors."""
    world = dist.group.WORLD
    torch.relu(functional.all_reduce(made(4), "sum", world))
    torch.relu(functional.all_gather_tensor(made(4), 0, world))
    torch.relu(functional.reduce_scatter_tensor(made(4), "sum", 0, world))
    torch.relu(functional.all_to_all_single(made(4), [2, 2], [2, 2], world))
    sharded = distribute_tensor(made(4, 4), mesh(), [Shard(0)])
    right = distribute_tensor(made(4, 4), mesh(), [Shard(1)])
    (sharded @ right).full_tensor()


def capture_collectives(folder: Path) -> None:
    """Both steps, each in a folder of its name."""
    for step in (all_ranks, in_wrappers):
        capture(step, folder / step.__name__, warm_up=1, rank=dist.get_rank())


@pytest.fixture(scope="module")
def collectives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of two gloo ranks, a folder a kind of collective."""
    folder = tmp_path_factory.mktemp("collectives")
    on_ranks(capture_collectives, folder)
    return folder


def names(program: RankProgram) -> list[str]:
    return [call.collective for call in program.calls if call.is_collective]


def test_collectives_of_all_ranks(collectives: Path, tmp_path: Path) -> None:
    for program in check_fixpoint(collectives / "all_ranks", tmp_path)[0]:
        assert names(program) == ALL_RANKS


@pytest.mark.slow
def test_functional_collectives_and_dtensors(collectives: Path, tmp_path: Path) -> None:
    for program in check_fixpoint(collectives / "in_wrappers", tmp_path)[0]:
        gathers = ["allgather_into_tensor_coalesced_"] * 2
        assert names(program) == [
            "allreduce_", gathers[0], "reduce_scatter_tensor_coalesced_", "alltoall_base_",
            "scatter_", "scatter_", *gathers,
        ]  # fmt: skip
        assert "aten::mm" in [call.op for call in program.calls]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_collectives_of_other_numbers_of_ranks(
    collectives: Path, tmp_path: Path, ranks: int
) -> None:
    generate([collectives / "all_ranks"], tmp_path)
    result = replay(tmp_path, QUICK, ranks)
    assert (result["ranks"], result["not_replayed"]) == (ranks, {})
    even = {note.partition(":")[0] for note in result["notes"]}
    assert {"allgather_", "gather_", "scatter_", "alltoall_", "alltoall_base_"} <= even
    assert even.isdisjoint({"allreduce_", "allreduce_coalesced_", "barrier"})


@pytest.mark.slow
def test_two_jobs_of_ranks_joined(dlrm: Path, collectives: Path, tmp_path: Path) -> None:
    parts = [dlrm, collectives / "all_ranks"]
    joined = generate(parts, tmp_path / "b", join=True)
    result = replay(tmp_path / "b", QUICK)
    assert result["not_replayed"] == {}
    assert result["notes"] == []
    assert result["ops_replayed"] == joined.ops_total == result["ops_total"]
    alone = [generate([part], tmp_path / str(at)) for at, part in enumerate(parts)]
    assert joined.ops_total == sum(of.ops_total for of in alone)
    recorded = [
        [c.bytes for of in alone for c in of.programs[rank].calls if c.bytes is not None]
        for rank in range(2)
    ]
    assert result["collective_bytes"] == recorded
