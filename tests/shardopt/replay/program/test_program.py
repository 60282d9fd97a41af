"""Joined programs: the parts in order, with nothing in common but process groups."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from predictor.errors import InputError
from shardopt.replay.generate import generate
from shardopt.replay.program.program import Call, Number, RankProgram, Slot, TensorSpec, join_jobs
from shardopt.replay.write import source_of
from tests.shardopt.replay.captured import program
from tests.shardopt.replay.differences import signatures


def sending(groups: list[tuple[int, ...]]) -> RankProgram:
    """A product, an all-reduce of it in the last group, and the wait for that."""
    spec = TensorSpec((2,), (1,), "float32", 0)
    calls = [
        Call("aten::relu", "default", (Slot(0),), {}, (1,), (), 1, specs=(spec,)),
        Call(
            "c10d::allreduce_",
            "",
            ((Slot(1),),),
            {"group": Number(len(groups) - 1)},
            (),
            (),
            2,
            bytes=8,
            collective="allreduce_",
        ),
        Call("wait", "", (Number(1),), {}, (), (), -1, frees=(1,)),
    ]
    return RankProgram(0, calls, {0: spec}, {0: {"kind": "positive"}}, [], [], groups)


def test_numbers_works_and_groups_move_on() -> None:
    (whole,) = join_jobs(
        [[sending([(), (0, 1)])], [sending([(), (2, 3), (0, 1)])], [sending([()])]]
    )
    assert whole.groups == [(), (0, 1), (2, 3)]
    assert list(whole.made) == list(whole.fills) == [0, 2, 4]
    assert [spec.storage for spec in whole.made.values()] == [0, 1, 2]
    assert [call.reads() for call in whole.calls] == [[0], [1], [], [2], [3], [], [4], [5], []]
    sent = [call.keywords["group"] for call in whole.calls if call.is_collective]
    assert sent == [Number(1), Number(1), Number(0)]
    lines = [line for _, body in source_of(whole).sections for line in body]
    waits = [line for line in lines if line.startswith("work[")]
    assert waits == ["work[0].wait()", "work[1].wait()", "work[2].wait()"]


def test_joined_programs_run_what_both_ran(traces: Path) -> None:
    one = program(traces)
    (twice,) = join_jobs([[one], [one]])
    assert signatures(twice) == signatures(one) * 2
    given = set(twice.made)
    for call in twice.calls:
        assert set(call.reads()) <= given, call.op
        given = (given | set(call.gives())) - set(call.frees)
    assert given == set(twice.made)


def test_jobs_of_unlike_ranks(traces: Path, tmp_path: Path) -> None:
    other = replace(sending([()]), rank=1)
    with pytest.raises(InputError, match=r"has ranks \[0\], another \[1\]"):
        join_jobs([[sending([()])], [other]])
    made = generate([traces, traces], tmp_path / "b", join=True)
    assert made.ops_total == 2 * generate([traces], tmp_path / "one").ops_total
