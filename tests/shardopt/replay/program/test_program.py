"""Joined programs: the parts in order, with nothing in common but process groups."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from predictor.errors import InputError
from shardopt.replay.generate import generate
from shardopt.replay.program.program import Call, RankProgram, Slot, TensorSpec, join_jobs
from tests.shardopt.replay.captured import program
from tests.shardopt.replay.differences import check_runs, signatures

SPEC = TensorSpec((2,), (1,), "float32", 0)


def sending(groups: list[tuple[int, ...]]) -> RankProgram:
    """A product, and an all-reduce of it in the last group that is waited for."""
    product = Call("aten::relu", "default", (Slot(0),), {}, (1,), (), 1, specs=(SPEC,))
    keywords = {"group": len(groups) - 1}
    exchange = Call("c10d::allreduce_", "", ((Slot(1),),), keywords, (), (), 2, bytes=8)
    exchange = replace(exchange, frees=(1,), waits=(0,))
    return RankProgram(0, [product, exchange], {0: SPEC}, {0: {"kind": "positive"}}, [], [], groups)


def test_numbers_works_and_groups_move_on() -> None:
    jobs = [[()], [(), (0, 1)], [(), (2, 3), (0, 1)]]
    (joined,) = join_jobs([[sending(groups)] for groups in (jobs[1], jobs[2], jobs[0])])
    assert joined.groups == [(), (0, 1), (2, 3)]
    assert list(joined.made) == list(joined.fills) == [0, 2, 4]
    assert [spec.storage for spec in joined.made.values()] == [0, 1, 2]
    assert [call.reads() for call in joined.calls] == [[0], [1], [2], [3], [4], [5]]
    exchanges = [call for call in joined.calls if call.is_collective]
    assert [call.group for call in exchanges] == [1, 1, 0]
    assert [call.waits for call in exchanges] == [(0,), (1,), (2,)]


def test_joined_programs_run_what_both_ran(traces: Path) -> None:
    single = program(traces)
    (twice,) = join_jobs([[single], [single]])
    assert signatures(twice) == signatures(single) * 2
    check_runs(twice)


def test_jobs_of_unlike_ranks(traces: Path, tmp_path: Path) -> None:
    of_rank_1 = replace(sending([()]), rank=1)
    with pytest.raises(InputError, match=r"\[0\], another \[1\]"):
        join_jobs([[sending([()])], [of_rank_1]])
    generated = generate([traces, traces], tmp_path / "b", join=True)
    assert generated.ops_total == 2 * generate([traces], tmp_path / "one").ops_total
