"""Programs with more embedding modules run the sparse part as often, the dense part once."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from predictor.errors import InputError
from shardopt.replay.check import Scale
from shardopt.replay.generate import generate
from shardopt.replay.more_tables import repeat_tables
from shardopt.replay.program.build import KNOWN
from shardopt.replay.program.program import Call, RankProgram, Slot, TensorSpec
from shardopt.replay.program.schema import find_op
from tests.shardopt.replay.captured import program
from tests.shardopt.replay.differences import check_runs, signatures

LOOKUP = "fbgemm::some_embedding_codegen_lookup_function"


def test_embedding_bags_of_one_rank(traces: Path) -> None:
    single = program(traces)
    (three,) = repeat_tables([single], 3)
    check_runs(three)
    more = Counter(call.op for call in three.calls)
    more.subtract(Counter(call.op for call in single.calls))
    assert +more == {"aten::embedding_bag": 2, "aten::_embedding_bag_backward": 2}
    bags = [call for call in three.calls if call.op == "aten::embedding_bag"]
    assert len({call.section for call in bags}) == 1
    weights = [call.reads()[0] for call in bags]
    assert len({three.made[n].storage for n in weights}) == 3
    assert len({three.made[n].shape for n in weights}) == 1
    assert [three.fills[call.reads()[1]]["kind"] for call in bags] == ["ids"] * 3
    assert signatures(bags_first(three)) == signatures(single)
    assert repeat_tables([single], 1) == [single]


def bags_first(source: RankProgram) -> RankProgram:
    """Without the copies, which read no number of the first program."""
    calls, copies = [], Counter[str]()
    for call in source.calls:
        copies[call.op] += 1
        copied = call.op in ("aten::embedding_bag", "aten::_embedding_bag_backward")
        if not copied or copies[call.op] == 1:
            calls.append(call)
    return RankProgram(source.rank, calls, source.made, source.fills, [], [])


def test_generated_benchmarks_have_more_tables(traces: Path, tmp_path: Path) -> None:
    generated = generate([traces], tmp_path / "b", scale=Scale(tables=2))
    assert sum(call.op == "aten::embedding_bag" for call in generated.programs[0].calls) == 2
    calls = json.loads((tmp_path / "b" / "rank0.json").read_text())["calls"]
    assert sum(call["op"] == "aten::embedding_bag" for call in calls) == 2


FLOATS = TensorSpec((4,), (1,), "float32", 0)
WHOLE = TensorSpec((4,), (1,), "int64", 0)


def call(op: str, reads: tuple[Any, ...], gives: int | None = None, **more: Any) -> Call:
    collective = op.removeprefix("c10d::") if op.startswith("c10d::") else ""
    terms = tuple(Slot(n) if isinstance(n, int) else n for n in reads)
    overload = find_op(op, "default")
    schema = () if overload is None else overload._schema.arguments
    names = KNOWN[collective] if collective else tuple(parameter.name for parameter in schema)
    group = {"group": 0} if collective else {}
    specs = (more.pop("spec", FLOATS),) if gives is not None else ()
    outputs = () if gives is None else (gives,)
    plain = Call(op, "default", terms, group, outputs, (), 0, 1.0)
    return replace(plain, specs=specs, names=names, **more)


def ranks(*, received: bool = True, extra: tuple[Call, ...] = ()) -> list[RankProgram]:
    """Rank 0 has a table and rank 1 none: it only takes part in the exchange.

    Args:
        received: the exchange sends what the lookup gives.
    """
    tensors = {
        n: TensorSpec((4,), (1,), "int64" if n == 1 else "float32", n) for n in (0, 1, 2, 3, 4)
    }
    ends = {"waits": (0,)}
    first = [
        call("aten::empty", (), 10),
        call(LOOKUP, (0, 1), 11),
        call("c10d::alltoall_base_", (10, 11 if received else 2, (), ()), **ends),
        call("aten::mm", (10, 3), 12),
        *extra,
    ]
    second = [
        call("aten::empty", (), 10),
        call("c10d::alltoall_base_", (10, 2, (), ()), **ends),
        call("aten::mm", (10, 3), 12),
    ]
    return [
        RankProgram(rank, calls, dict(tensors), {}, [], [], [()])
        for rank, calls in enumerate((first, second))
    ]


def test_ranks_without_tables_take_part() -> None:
    for repeated in repeat_tables(ranks(), 3):
        check_runs(repeated)
        ops = [call.op for call in repeated.calls]
        assert ops.count("c10d::alltoall_base_") == ops.count("aten::empty") == 3
        assert ops.count("aten::mm") == 1
        assert ops.count(LOOKUP) == 3 * (repeated.rank == 0)
        sends = [call for call in repeated.calls if call.is_collective]
        assert len({call.reads()[0] for call in sends}) == 3
        dense = next(call for call in repeated.calls if call.op == "aten::mm")
        assert dense.reads() == [10, 3]


def test_what_cannot_be_told_is_listed() -> None:
    with pytest.raises(InputError, match=r"2 reasons: rank 0: c10d::alltoall_base_"):
        repeat_tables(ranks(received=False), 2)
    later = call("c10d::alltoall_base_", (4, 12, (), ()))
    with pytest.raises(InputError, match=r"collective 2\)"):
        repeat_tables(ranks(extra=(later,)), 2)
    without = ranks()[1:]
    with pytest.raises(InputError, match="no lookup"):
        repeat_tables(without, 2)


def test_ids_are_distributed_as_often() -> None:
    specs = {0: FLOATS, 1: WHOLE, 2: WHOLE, 5: WHOLE}
    specs = {n: TensorSpec((4,), (1,), s.dtype, n) for n, s in specs.items()}
    calls = [
        call("aten::add_", (5,)),
        call("aten::neg", (2,), 20, spec=WHOLE),
        call("aten::empty", (), 21, spec=WHOLE),
        call("c10d::alltoall_base_", (21, 20, (), ()), waits=(0,)),
        call("aten::sum", (21,), 22, spec=WHOLE),
        call("aten::eq", (2,), 23, spec=WHOLE),
        call(LOOKUP, (0, 1), 24),
        call("aten::mul", (24, 23), 25),
        call("aten::sum", (1,), 26, spec=WHOLE),
    ]
    (two,) = repeat_tables([RankProgram(0, calls, specs, {}, [], [], [()])], 2)
    check_runs(two)
    counts = Counter(call.op for call in two.calls)
    twice = {"aten::neg", "aten::empty", "c10d::alltoall_base_", LOOKUP}
    assert {op for op, count in counts.items() if count == 2} == twice
    assert counts["aten::sum"] == 2 + 1, "of what was received, and of ids after the lookups"
    assert counts["aten::add_"] == counts["aten::eq"] == counts["aten::mul"] == 1
