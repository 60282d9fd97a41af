"""The suite of benchmarks: its figures come from the committed rows."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("scipy")

from lab.replay.calls import FILE, FIT, read_replays, write_models
from lab.suites import COMMITTED
from lab.validate.replay import validate_replay
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from shardopt.replay.predict import OP_MODELS, predict_ranks, stored_models

FOLDER = COMMITTED / "replay"


@pytest.mark.slow
def test_figures_are_those_of_the_committed_rows() -> None:
    models = read_replays(FOLDER)
    report = validate_replay(FOLDER)
    assert report.summary.n == sum(model.part != FIT for model in models) == 19
    one = next(model for model in models if model.name == "dlrm 2 ranks wide")
    row = next(row for row in report.counted if row.name["model"] == one.name)
    # what the package stores is the fit on the same rows
    again = predict_ranks(one.ranks, stored_models(2), load_hardware(OP_MODELS))
    assert row.predicted_ms == pytest.approx(again["predicted_ms"])
    assert row.measured_ms == median(one.replay_ms)
    assert all(cells[4] == 0 for cells in report.scores[1].rows)


def test_slower_replays_are_larger_errors(tmp_path: Path) -> None:
    names = ("convnet a", "convnet e", "mlp a", "mlp b", "mlp", "convnet small")
    models = [model for model in read_replays(FOLDER) if model.name in names]
    slower = [
        model
        if model.part == FIT
        else replace(model, replay_ms=tuple(2 * ms for ms in model.replay_ms))
        for model in models
    ]
    found = []
    for name, of in (("before", models), ("after", slower)):
        (tmp_path / name).mkdir()
        write_models(tmp_path / name / FILE, of)
        found.append(validate_replay(tmp_path / name))
    before, after = found
    assert before.summary.n == 2
    for row, other in zip(before.counted, after.counted, strict=True):
        assert other.predicted_ms == pytest.approx(row.predicted_ms)
        assert other.error == pytest.approx((row.error - 1) / 2, abs=1e-3)


def test_folders_without_rows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lab compare"):
        validate_replay(tmp_path)
