"""Every collective that gloo can capture is replayed as it was, and none waits for ever."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from predictor.trace.read import load_traces
from shardopt.replay.generate import generate, program_of
from shardopt.replay.launch import replay
from shardopt.replay.program.build import Annotations
from shardopt.replay.program.program import RankProgram
from tests.distributed.ranks import run_ranks
from tests.shardopt.replay.differences import differences, signatures

pytestmark = pytest.mark.distributed

QUICK = ["--device", "cpu", "--warm-up", "1", "--iterations", "2"]
ALL_RANKS = [
    "allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_",
    "_allgather_base_", "allgather_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
    "gather_", "scatter_", "alltoall_", "alltoall_base_", "allgather_into_tensor_coalesced_",
    "reduce_scatter_tensor_coalesced_", "barrier", "monitored_barrier_",
]  # fmt: skip


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of two gloo ranks, a folder a kind of collective."""
    place = tmp_path_factory.mktemp("collectives")
    run_ranks("collectives_worker", place)
    return place


def programs(folder: Path) -> list[RankProgram]:
    found = load_traces([folder])
    return [program_of(trace, found, Annotations()) for trace in found.executions]


def collectives(program: RankProgram) -> list[str]:
    return [call.collective for call in program.calls if call.is_collective]


def check_fixpoint(traces: Path, place: Path) -> list[RankProgram]:
    """Replayed and captured again, the ranks' programs are the same, op for op."""
    generate([traces], place / "b")
    result = replay(place / "b", [*QUICK, "--profile", str(place / "again")])
    first, second = programs(traces), programs(place / "again")
    for one, other in zip(first, second, strict=True):
        assert not one.left_out
        assert not list(differences(signatures(one), signatures(other)))
    assert (result["not_replayed"], result["notes"]) == ({}, [])
    assert result["ops_replayed"] == result["ops_total"]
    recorded = [[c.bytes for c in p.calls if c.bytes is not None] for p in first]
    assert result["collective_bytes"] == recorded
    return first


@pytest.mark.slow
def test_collectives_of_all_ranks(job: Path, tmp_path: Path) -> None:
    for program in check_fixpoint(job / "all_ranks", tmp_path):
        assert collectives(program) == ALL_RANKS


@pytest.mark.slow
def test_sends_and_receives(job: Path, tmp_path: Path) -> None:
    zero, one = check_fixpoint(job / "one_to_one", tmp_path)
    both = ["send", "recv_", "send", "recv_"]
    assert collectives(zero) == ["send", *both, "send"]
    assert collectives(one) == ["recv_", *both, "recv_any_source_"]
    sent = [[c.bytes for c in p.calls if c.is_collective] for p in (zero, one)]
    assert sent == [[16, 16, 0, 8, 0, 28], [0, 16, 0, 8, 0, 0]]


@pytest.mark.slow
def test_functional_collectives_and_dtensors(job: Path, tmp_path: Path) -> None:
    for program in check_fixpoint(job / "in_wrappers", tmp_path):
        gathers = ["allgather_into_tensor_coalesced_"] * 2
        assert collectives(program) == [
            "allreduce_", gathers[0], "reduce_scatter_tensor_coalesced_", "alltoall_base_",
            "scatter_", "scatter_", *gathers,
        ]  # fmt: skip
        assert "aten::mm" in [call.op for call in program.calls]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_sends_without_their_partner_are_named_and_not_run(
    job: Path, tmp_path: Path, ranks: int
) -> None:
    generate([job / "one_to_one"], tmp_path)
    result = replay(tmp_path, QUICK, ranks)
    assert result["ranks"] == ranks
    reasons = result["not_replayed"]
    why = "its partner, rank 1, is not replayed" if ranks == 1 else "no rank that is replayed"
    # one rank: all it has; a third: what rank 0 had, which meets nothing
    assert sum(reasons.values()) == 6
    assert all(why in reason for reason in reasons if "recv_any" not in reason), reasons
    assert result["ops_total"] - result["ops_replayed"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_collectives_of_other_numbers_of_ranks(job: Path, tmp_path: Path, ranks: int) -> None:
    generate([job / "all_ranks"], tmp_path)
    result = replay(tmp_path, QUICK, ranks)
    assert (result["ranks"], result["not_replayed"]) == (ranks, {})
    even = {note.partition(":")[0] for note in result["notes"]}
    assert {"allgather_", "gather_", "scatter_", "alltoall_", "alltoall_base_"} <= even
    assert even.isdisjoint({"allreduce_", "allreduce_coalesced_", "barrier"})
