"""Laws of replays: files of calls, the fit and what it is kept apart from."""

from pathlib import Path

import pytest

from predictor.cost.cpu_ops import OpRow
from predictor.cost.reuse import BINS
from predictor.errors import InputError
from shardopt.replay.predict.fit import (
    CALL_BYTES,
    DEFAULT_FOLDER,
    FILE,
    captured,
    read_replays,
    replay_laws,
)
from shardopt.replay.predict.rows import (
    FIT,
    TEST,
    Calls,
    ModelCalls,
    RankCalls,
    read_models,
    write_models,
)


def row(elements: int, kind: str = "mul c>1", count: int = 1) -> OpRow:
    reuse = (0.0, 8.0 * elements * count, *[0.0] * (BINS - 2))
    return OpRow(kind, (1, elements, elements, 0), reuse, count)


def calls(*elements: int, slower: float = 1.0, segment: int = 0) -> list[Calls]:
    return [
        Calls(segment, "aten::mul", (row(n),), 1, None, slower * (0.01 + 1e-6 * n))
        for n in elements
    ]


def model(name: str, part: str, of: list[Calls], ranks: int = 1) -> ModelCalls:
    spent = sum(call.ms or 0.0 for call in of)
    events = () if ranks == 1 else ({"kind": "allreduce_", "bytes": 8, "group": []},)
    rank = RankCalls(tuple(of), events, ())
    return ModelCalls(name, part, (spent, 1.1 * spent, 0.9 * spent), (rank,) * ranks)


def test_files_keep_what_laws_need(tmp_path: Path) -> None:
    several = Calls(2, "aten::where", (row(512), row(1024, "where ccc>1")), 1, 12.5, 0.25)
    rank = RankCalls(
        (Calls(0, "aten::mul", (row(1024),), 1, None, 0.5), several),
        ({"kind": "alltoall_base_", "bytes": 64, "group": []}, {"waits_for": 0}),
        (("corp::op", None),),
    )
    models = [ModelCalls("a", FIT, (1.5, 2.5), (rank, rank)), model("b", TEST, calls(4096))]
    write_models(tmp_path / FILE, models)
    found = read_models(tmp_path / FILE)
    assert [of.name for of in found] == ["a", "b"]
    assert found[0] == models[0]
    assert found[1].ranks[0].calls[0].ms == pytest.approx(0.01 + 4096e-6, rel=1e-3)


@pytest.mark.parametrize(
    "line",
    [
        "nothing",
        "{}",
        '{"model": "a", "part": "fit", "replay_ms": [], "ranks": []}',
        '{"model": "a", "part": "both", "replay_ms": [1], "ranks": [{"events": [], "calls": [], '
        '"left_out": []}]}',
        '{"model": "a", "part": "fit", "replay_ms": [1], "ranks": [{"events": [], "left_out": [], '
        '"calls": [[0, "aten::t", 1, NaN, null, []]]}]}',
    ],
)
def test_broken_files_are_told_by_line(tmp_path: Path, line: str) -> None:
    write_models(tmp_path / FILE, [model("a", FIT, calls(1024))])
    with (tmp_path / FILE).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match=f"{FILE}:2: is no model's calls"):
        read_replays(tmp_path)
    with pytest.raises(InputError, match="--data DIR"):
        read_replays(tmp_path / "none")


def test_tested_models_are_in_no_fit() -> None:
    fits = [model(f"m{i}", FIT, calls(*(i * n for n in (10**5, 3 * 10**5)))) for i in (1, 2, 3)]
    tested = model("t", TEST, calls(10**5, 5 * 10**5, slower=9.0))
    with_it, without = replay_laws([*fits, tested], 1), replay_laws(fits, 1)
    asked = row(2 * 10**5)
    assert with_it.row_ms(asked) == without.row_ms(asked) == pytest.approx(0.21, rel=0.02)
    with pytest.raises(InputError, match="no calibration model of one rank"):
        replay_laws([tested], 1)


def test_ranks_that_share_a_memory_have_laws_of_their_own() -> None:
    sizes = [10**5, 2 * 10**5, 5 * 10**5]
    alone = model("one", FIT, [*calls(*sizes), Calls(0, "aten::t", (row(9, "relu c>1"),), 1, 1, 3)])
    both = model("two", FIT, calls(*sizes, slower=2.0), ranks=2)
    laws = replay_laws([alone, both], 2)
    assert laws.row_ms(row(3 * 10**5)) == pytest.approx(0.62, rel=0.02)
    assert laws.row_ms(row(9, "relu c>1")) == pytest.approx(3, rel=0.02)


def test_a_call_of_several_ops_is_split_by_their_bytes() -> None:
    small, large = row(0), row(512, "where ccc>1")
    call = Calls(0, "aten::where", (small, large), 1, None, 3.0)
    step = captured(RankCalls((call,), (), ()), 5.0)
    share = CALL_BYTES / (2 * CALL_BYTES + 8 * 512)
    assert step.ms == pytest.approx((3.0 * share, 3.0 * (1 - share)))


def test_no_tested_shape_is_fitted_on() -> None:
    pytest.importorskip("torchrec")
    from shardopt.replay.compare.originals import CALIBRATIONS, MODELS, ORIGINALS

    shapes = list(MODELS.values())
    assert len(set(shapes)) == len(shapes)
    parts = {of.name: of.part for of in read_replays(DEFAULT_FOLDER)}
    assert {name for name, part in parts.items() if part == FIT} == set(CALIBRATIONS)
    assert {name for name, part in parts.items() if part == TEST} == set(ORIGINALS)
