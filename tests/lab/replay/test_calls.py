"""Kernel models of replays: files of calls, the fit, what it is kept apart from, what is stored."""

from pathlib import Path

import pytest

from predictor.cost.ops.cpu_ops import BINS, OpModels, OpRow
from predictor.errors import InputError
from predictor.hardware.loader import load_op_models
from predictor.iteration.op_graph import CallGroup, CollectiveStart, CollectiveWait, RankCalls

pytest.importorskip("scipy")

from lab.replay.calls import (
    CALL_BYTES,
    FILE,
    FIT,
    TEST,
    ModelCalls,
    captured_step,
    fit_replays,
    read_replays,
    write_models,
)
from lab.replay.models import CALIBRATIONS, MODELS, ORIGINALS

REPLAYS = Path(__file__).resolve().parents[3] / "configs" / "bench" / "replay"


def row(elements: int, kind: str = "mul c>1", count: int = 1) -> OpRow:
    reuse = (0.0, 8.0 * elements * count, *[0.0] * (BINS - 2))
    return OpRow(kind, (1, elements, elements, 0), reuse, count)


def calls(*elements: int, slower: float = 1.0, segment: int = 0) -> list[CallGroup]:
    return [
        CallGroup(segment, "aten::mul", (row(n),), 1, None, slower * (0.01 + 1e-6 * n))
        for n in elements
    ]


def model(name: str, part: str, of: list[CallGroup], ranks: int = 1) -> ModelCalls:
    spent = sum(call.ms or 0.0 for call in of)
    events = () if ranks == 1 else (CollectiveStart("allreduce_", 8),)
    rank = RankCalls(tuple(of), events, ())
    return ModelCalls(name, part, (spent, 1.1 * spent, 0.9 * spent), (rank,) * ranks)


def test_files_keep_what_a_fit_needs(tmp_path: Path) -> None:
    several = CallGroup(2, "aten::where", (row(512), row(1024, "where ccc>1")), 1, 12.5, 0.25)
    rank = RankCalls(
        (CallGroup(0, "aten::mul", (row(1024),), 1, None, 0.5), several),
        (CollectiveStart("alltoall_base_", 64), CollectiveWait(0)),
        (("corp::op", None),),
    )
    models = [ModelCalls("a", FIT, (1.5, 2.5), (rank, rank)), model("b", TEST, calls(4096))]
    write_models(tmp_path / FILE, models)
    found = read_replays(tmp_path)
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
def test_broken_files_are_named_by_line(tmp_path: Path, line: str) -> None:
    write_models(tmp_path / FILE, [model("a", FIT, calls(1024))])
    with (tmp_path / FILE).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match=f"{FILE}:2: not a model with its calls"):
        read_replays(tmp_path)
    with pytest.raises(InputError, match="python -m lab compare"):
        read_replays(tmp_path / "none")


def test_tested_models_are_in_no_fit() -> None:
    fits = [model(f"m{i}", FIT, calls(*(i * n for n in (10**5, 3 * 10**5)))) for i in (1, 2, 3)]
    tested = model("t", TEST, calls(10**5, 5 * 10**5, slower=9.0))
    with_it, without = fit_replays([*fits, tested], 1), fit_replays(fits, 1)
    asked = row(2 * 10**5)
    assert with_it.row_ms(asked) == without.row_ms(asked) == pytest.approx(0.21, rel=0.02)
    with pytest.raises(InputError, match="no calibration model of one rank"):
        fit_replays([tested], 1)


def test_ranks_that_share_a_memory_have_other_models() -> None:
    sizes = [10**5, 2 * 10**5, 5 * 10**5]
    relu = CallGroup(0, "aten::relu", (row(9, "relu c>1"),), 1, 1, 3)
    alone = model("one", FIT, [*calls(*sizes), relu])
    both = model("two", FIT, calls(*sizes, slower=2.0), ranks=2)
    models = fit_replays([alone, both], 2)
    assert models.row_ms(row(3 * 10**5)) == pytest.approx(0.62, rel=0.02)
    assert models.row_ms(row(9, "relu c>1")) == pytest.approx(3, rel=0.02)


def test_a_call_of_several_ops_is_split_by_their_bytes() -> None:
    small, large = row(0), row(512, "where ccc>1")
    call = CallGroup(0, "aten::where", (small, large), 1, None, 3.0)
    step = captured_step(RankCalls((call,), (), ()), 5.0)
    share = CALL_BYTES / (2 * CALL_BYTES + 8 * 512)
    assert step.ms == pytest.approx((3.0 * share, 3.0 * (1 - share)))


def test_no_tested_shape_is_fitted_on() -> None:
    shapes = list(MODELS.values())
    assert len(set(shapes)) == len(shapes)
    parts = {of.name: of.part for of in read_replays(REPLAYS)}
    assert {name for name, part in parts.items() if part == FIT} == set(CALIBRATIONS)
    assert {name for name, part in parts.items() if part == TEST} == set(ORIGINALS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_stored_models_are_those_fitted_on_the_committed_rows(ranks: int) -> None:
    group = load_op_models("cpu-gloo")
    replays = read_replays(REPLAYS)
    stored, fitted = OpModels.of_group(group, ranks), fit_replays(replays, ranks)
    assert stored.coefficients.keys() == fitted.coefficients.keys()
    # where two terms of a model go together, processors differ in which of them has the time
    fitted_on = [r for r in replays if r.part == FIT and len(r.ranks) >= ranks]
    every = (c for replay in fitted_on for rank in replay.ranks for c in rank.calls)
    rows = [row for call in every for row in call.rows if stored.has(row.kind)]
    assert len(rows) > 100
    for row in rows:
        assert stored.row_ms(row) == pytest.approx(fitted.row_ms(row), rel=1e-4), row.kind
    assert stored.stretch == pytest.approx(fitted.stretch, rel=1e-6)
    assert (stored.op_ms, stored.caches) == (pytest.approx(fitted.op_ms), fitted.caches)
