"""Steps that ranks capture, and what a benchmark made of them must repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from predictor.model.plan import ShardingPlan
from predictor.model.workload import Workload
from predictor.trace.read import load_traces
from shardopt.replay.generate import generate, program_of
from shardopt.replay.launch import replay
from shardopt.replay.program.build import Annotations
from shardopt.replay.program.program import RankProgram
from shardopt.training.batch import batch_ring
from shardopt.training.loop import Training
from tests.distributed.ranks import on_ranks
from tests.distributed.training_case import CPU
from tests.shardopt.replay.captured import capture
from tests.shardopt.replay.differences import differences, signatures

QUICK = ["--device", "cpu", "--warm-up", "1", "--iterations", "2"]


def captured(folder: Path, load: Workload, plan: ShardingPlan, batches: int = 16) -> Path:
    """The folder with traces of a training step on two gloo ranks.

    Args:
        batches: of the ring.
    """
    on_ranks(capture_training, folder, load, plan, batches)
    return folder


def capture_training(folder: Path, load: Workload, plan: ShardingPlan, batches: int) -> None:
    """Train on this rank, and capture a step."""
    rank = dist.get_rank()
    training = Training(load, plan, CPU, batch_ring(load, seed=0, rank=rank, size=batches))
    capture(training.step, folder, warm_up=3, rank=rank)


def programs(folder: Path) -> list[RankProgram]:
    traces = load_traces([folder])
    return [program_of(trace, traces, Annotations()) for trace in traces.executions]


def check_same(first: Path, second: Path) -> list[RankProgram]:
    """The same ops in order, shapes, strides and types on every rank; those of the first."""
    ones, second_programs = programs(first), programs(second)
    assert [p.rank for p in ones] == [p.rank for p in second_programs]
    for program, again in zip(ones, second_programs, strict=True):
        assert not program.left_out
        assert not list(differences(signatures(program), signatures(again)))
    return ones


def check_fixpoint(traces: Path, place: Path) -> tuple[list[RankProgram], dict[str, Any]]:
    """Replayed and captured again, the ranks' programs are the same, and so are the bytes of
    collectives. The programs, and the result of the replay."""
    generate([traces], place / "b")
    result = replay(place / "b", [*QUICK, "--profile", str(place / "again")])
    assert (result["not_replayed"], result["notes"]) == ({}, [])
    assert result["ops_replayed"] == result["ops_total"] > 0
    generated = check_same(traces, place / "again")
    recorded = [[c.bytes for c in p.calls if c.bytes is not None] for p in generated]
    assert result["collective_bytes"] == recorded
    return generated, result
