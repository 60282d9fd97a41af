"""Output and stored rows of a calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from predictor.errors import InputError
from shardopt.calibrate import families, host, run
from shardopt.calibrate import points as design
from shardopt.calibrate.points import CalibrationSettings, Point
from shardopt.calibrate.rows import (
    CalibrationRows,
    Measurement,
    Origin,
    accept,
    missing,
    row_of_samples,
)
from shardopt.config.model import load_model
from shardopt.measure.sampling import Samples
from shardopt.ranks.launch import OnReport
from shardopt.ranks.rank import Rank
from shardopt.ranks.realtime import Runtime

ROOT = Path(__file__).parents[3]

ORIGIN = Origin("machine", "versions")


def settings(folder: Path, **others: Any) -> CalibrationSettings:
    return CalibrationSettings("gloo", 2, design.TINY, folder / "rows.csv", **others)


TABLES = [[1000, 8, 64, 288.0, 240.0]]


@pytest.mark.parametrize(
    ("point", "facts", "said"),
    [
        (
            Point("model_lookup", {"model_sha": "abc", "table": "t", "batch_size": 16, "ranks": 2}),
            {"tables": TABLES},
            "model_lookup forward 1 tables, 240 distinct rows",
        ),
        (
            Point("collective", {"op": "all_to_all", "bytes": 256, "ranks": 2}),
            {},
            "collective forward all_to_all 256 2",
        ),
    ],
)
def test_a_row_is_named_kept_and_counted(
    tmp_path: Path,
    point: Point,
    facts: dict[str, object],
    said: str,
) -> None:
    asked = settings(tmp_path)
    file, lines = CalibrationRows(asked.rows, ORIGIN), list[str]()
    save = run.saver(asked, file, [point, Point("gemm", {})], lines.append)
    save(row_of_samples(point, Samples((1e-3, 1e-3, 1e-3)), "forward", **facts))
    assert lines == [f"[1/2] {said}: 1.000 ms"]
    assert [row.point for row in file.rows] == [point]
    assert file.rows[0].settings
    assert asked.rows.is_file()


@pytest.mark.parametrize("runtime", Runtime)
def test_rows_say_their_runtime_and_two_are_never_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: Runtime
) -> None:
    monkeypatch.setattr(run, "origin", lambda backend: ORIGIN)
    asked = design.CalibrationSettings(
        "gloo", 2, design.TINY, tmp_path / "rows.csv", runtime=runtime
    )
    point = Point("gemm", {"m": 64, "dtype": "fp32", "layout": "nn"})
    save = run.saver(asked, run.open_rows(asked, print), [point], print)
    save(row_of_samples(point, Samples((1e-3, 1e-3))))
    assert [row.runtime for row in run.open_rows(asked, print).rows] == [runtime]
    other = next(r for r in Runtime if r is not runtime)
    with pytest.raises(InputError, match=f"rows of the {runtime} runtime") as caught:
        run.open_rows(replace(asked, runtime=other), print)
    assert caught.value.inputs == ("runtime",)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Point]:
    """Every point that was measured, in order; it takes 20 s, and is uneven unless it is a
    collective's second time."""
    pytest.importorskip("fbgemm_gpu")
    from shardopt.calibrate import kernels, together

    done = list[Point]()
    monkeypatch.setattr(run, "origin", lambda backend: ORIGIN)
    monkeypatch.setattr(run.time, "monotonic", lambda: 20.0 * len(done))

    def measured_points(
        points: list[Point],
        _device: object,
        _settings: object,
        lasts: Callable[[float], bool],
        talk: object = None,
    ) -> Iterator[Measurement]:
        for point in points:
            if lasts(1.0):
                done.append(point)
                steady = point.family == "collective" and done.count(point) == 2
                last = 1e-3 if steady or "steady" in point.params else 0.1
                yield row_of_samples(point, Samples((1e-3,) * 9 + (last,)))

    def run_ranks(
        body: Callable[..., None], _: int, *task: Any, on_report: OnReport, **_others: object
    ) -> None:
        body(Rank(0, 1, 0, 1), partial(on_report, 0), *task)

    alone = None, SimpleNamespace(share=lambda value: value)
    monkeypatch.setattr(run, "joined_ranks", lambda *_: nullcontext(alone))
    monkeypatch.setattr(run.logging, "disable", lambda _: None)
    monkeypatch.setattr(kernels, "measure_alone", measured_points)
    monkeypatch.setattr(together, "measure_together", measured_points)
    monkeypatch.setattr(run, "run_ranks", run_ranks)
    return done


def test_doubtful_points_are_measured_again_after_all_others_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[Point]
) -> None:
    """Also where the run is interrupted before it, and resumed."""
    kernel = Point("gemm", {"m": 64, "dtype": "fp32", "layout": "nn"})
    exchange = Point("collective", {"op": "all_reduce", "bytes": 256, "ranks": 2})
    monkeypatch.setattr(run, "points_of", lambda settings: ([kernel], [exchange]))
    asked = settings(tmp_path)
    lines = list[str]()
    file = run.measure(asked, lines.append)
    assert measured == [kernel, exchange, kernel, exchange]
    assert sum("again" in line for line in lines) == 2
    assert [row.point for row in accept(file.rows).rows] == [kernel, exchange]

    whole = asked.rows.read_text().splitlines(keepends=True)
    asked.rows.write_text("".join(whole[:3]))
    measured[:] = [exchange]
    run.measure(asked, lines.append)
    assert measured == [exchange, kernel, exchange]
    run.measure(asked, lines.append)
    assert measured == [exchange, kernel, exchange], "what was repeated stays so"


def test_a_limit_leaves_time_for_all_ranks_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[Point]
) -> None:
    kernels = [Point("gemm", {"m": m, "steady": 1}) for m in range(4)]
    exchanges = [Point("collective", {"op": "issue", "bytes": n, "steady": 1}) for n in range(4)]
    monkeypatch.setattr(run, "points_of", lambda settings: (kernels, exchanges))
    asked = settings(tmp_path, minutes=1.0)
    there = []
    for _ in range(6):
        before = len(measured)
        file = run.measure(asked, lambda text: None)
        assert len(measured) - before <= 4, "a point that is begun is finished"
        there.append([len(of) - len(missing(file.rows, of)) for of in (kernels, exchanges)])
    assert there[0] == [2, 1]
    assert there[-1] == [4, 4]


def test_iterations_that_there_is_no_time_for_are_left_to_the_next_run() -> None:
    """They take most of a minute on a busy machine, and begin last."""
    pytest.importorskip("fbgemm_gpu")
    from shardopt.calibrate import together

    device: Any = SimpleNamespace(type="cpu")
    talk: Any = None
    points = host.iteration_points(2)
    asked = settings(Path())
    late = together.measure_iterations(points, device, asked, talk, go_on=lambda: False, later=True)
    assert list(late) == []


def test_the_tables_of_a_model_come_first() -> None:
    model = load_model(ROOT / "configs" / "models" / "dlrm_criteo_kaggle.yaml")
    points = families.alone(design.QUICK, model, ranks=2)
    own = [point.family == "model_lookup" for point in points]
    assert own == sorted(own, reverse=True)
    assert sum(own) == len(model.tables)
