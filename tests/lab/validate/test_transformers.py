"""`validate transformers`: rows, parts, errors, and the fit behind it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.fit.megatron import START, fit, measured, predicted, split_rows
from lab.runtimes.megatron import MegatronStep, load_megatron
from lab.suites import COLUMNS
from lab.validate.transformers import (
    FIT,
    MULTI,
    MULTI_FILE,
    SEEN,
    SINGLE_FILE,
    UNSEEN,
    read_steps,
    validate_transformers,
)
from predictor.hardware.loader import load_hardware
from tests.public_data import FULL, every_table

HEADER = ",".join(COLUMNS[SINGLE_FILE])
FITTED_ROW = "8,16,4,2048,16,16,1024,2,1,4"
OTHER_ROW = "2,16,4,1024,16,12,1024,1,1,2"
"""Composed of timings of fitted rows."""
UNSEEN_ROW = "4,16,2,2048,16,12,1024,4,1,1"
MULTI_HEADER = ",".join(("Parameters (billion)", *COLUMNS[MULTI_FILE]))


def single(folder: Path, *rows: str) -> Path:
    (folder / SINGLE_FILE).write_text("\n".join(("# source: somewhere", HEADER, *rows)) + "\n")
    return folder


def test_rows_of_timings_that_the_fit_saw_are_no_headline(tmp_path: Path) -> None:
    rows = (f"{FITTED_ROW},218.1", f"{OTHER_ROW},200.0", f"{UNSEEN_ROW},150.0")
    report = validate_transformers(single(tmp_path, *rows))
    assert [row.part for row in report.rows] == [UNSEEN, SEEN, FIT]
    assert [row.name["tensor_parallel"] for row in report.listed] == [4]
    assert report.summary.n == 1
    assert "sums of 1 timing" in report.notes[-1]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("2,16,4,1024,16,12,1024,1,1,2,fast", "iteration_ms is 'fast'"),
        ("2,16,4,1024,16,12,1024,1,1,2,-1", "must be above 0"),
        ("4,16,4,1024,16,12,1024,1,1,2,200", "n_gpus is 4, split 1 x 1 x 2"),
        ("2,16,5,1024,16,12,1024,1,1,2,200", "global batch 16 is not a multiple of 5"),
        ("2,16,4,1024,16,12.5,1024,1,1,2,200", "layers is 12.5, not a whole number"),
        ("2,100000000,1,1024,16,12,1024,1,1,2,200", "micro-batches are too many"),
        ("2,16,4", "has 3 columns, the header has"),
    ],
)
def test_a_row_that_cannot_be_read_is_named_and_left_out(
    tmp_path: Path, row: str, text: str
) -> None:
    report = validate_transformers(single(tmp_path, row, f"{OTHER_ROW},200.0"))
    assert len(report.rows) == 1
    assert report.skipped[0].startswith(f"{SINGLE_FILE}:3: ")
    assert text in report.skipped[0]


def test_several_nodes_count_apart(tmp_path: Path) -> None:
    row = "18.4,256,1024,8,6144,48,40,2048,8,32,1,9603.6"
    (tmp_path / MULTI_FILE).write_text(f"{MULTI_HEADER}\n{row}\n")
    report = validate_transformers(tmp_path)
    assert [r.part for r in report.rows] == [MULTI]
    assert report.summary.n == 0
    model = read_steps(tmp_path, MULTI_FILE).rows[0][1]
    assert model.recompute
    assert model.local_vocabulary % 128 == 0


def test_the_fit_finds_the_constants_behind_rows(tmp_path: Path) -> None:
    """Seven configurations, launch-bound, kernel-bound and misaligned, timed by the model."""
    lines = [
        f"{gpus},{batch},{micro},{hidden},16,12,1024,{t},{d},{p},1"
        for gpus, batch, micro, hidden, t, d, p in (
            (1, 8, 8, 2048, 1, 1, 1),
            (2, 16, 1, 1024, 2, 1, 1),
            (2, 16, 4, 1024, 1, 1, 2),
            (4, 32, 8, 2048, 2, 1, 2),
            (4, 16, 2, 1024, 4, 1, 1),
            (8, 16, 8, 1024, 8, 1, 1),
            (4, 16, 8, 2048, 1, 1, 4),
        )
    ]
    rows = read_steps(single(tmp_path, *lines)).rows
    truth = replace(START, kernel_us=55.0, elementwise_factor=1.8, send_gb_s=20.0)
    step = MegatronStep(load_hardware("a100-40gb"), truth)
    timed = [(c, m, float(t)) for (c, m, _), t in zip(rows, predicted(step, rows), strict=True)]
    fitted = fit(step, timed)
    assert fitted.kernel_us == pytest.approx(55.0, rel=0.05)
    step.use(fitted)
    assert np.abs(predicted(step, timed) / measured(timed) - 1).max() < 0.02


@every_table
def test_the_shipped_rows_are_those_of_the_smallest_hashes(folder: Path) -> None:
    rows, held_out = split_rows(read_steps(folder).rows)
    assert {configuration for configuration, _, _ in rows} == load_megatron().rows
    assert not {configuration for configuration, _, _ in held_out} & load_megatron().rows


@every_table
def test_held_out_rows_stay_within_the_bar(folder: Path) -> None:
    report = validate_transformers(folder)
    assert not report.skipped
    held_out, of_several_nodes = (632, 109) if folder == FULL else (158, 55)
    parts = report.by_part()
    assert parts[UNSEEN].n + parts[SEEN].n == held_out
    assert parts[MULTI].n == of_several_nodes
    assert parts[SEEN].mape < 0.05
    assert parts[MULTI].mape < 0.15
