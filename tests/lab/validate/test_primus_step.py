"""One step of a TorchRec model on eight B200: how well each class of its kernels is predicted."""

from __future__ import annotations

from statistics import fmean

import pytest

from lab.suites import Report
from lab.validate.primus_step import ATTENTION, CLASSES, PRODUCTS, STEP, validate_primus_step
from tests.public_data import EXCERPTS


@pytest.fixture(scope="module")
def report() -> Report:
    return validate_primus_step(EXCERPTS)


def test_classes_are_as_good_as_they_were(report: Report) -> None:
    assert len(report.rows) == 118
    errors = {
        part: [row.error for row in report.rows if row.part == part]
        for part in (PRODUCTS, ATTENTION)
    }
    assert fmean(map(abs, errors[PRODUCTS])) < 0.18
    assert sum(abs(error) < 0.15 for error in errors[PRODUCTS]) >= 53
    assert fmean(map(abs, errors[ATTENTION])) < 0.13


def test_the_whole_step_as_it_is_captured(report: Report) -> None:
    errors = {row.name["name"]: row.error for row in report.rows if row.part in (STEP, CLASSES)}
    bars = {"GEMM (cuBLAS)": 0.08, "Attention (FA4)": 0.12, "Embeddings (FBGEMM)": 0.08}
    bars |= {"Elementwise": 0.25, "Fused ops (Triton)": 0.46, "wall clock": 0.22}
    assert all(abs(errors[name]) < bar for name, bar in bars.items())


def test_what_the_kernels_of_a_class_take_together(report: Report) -> None:
    for way in ("attention forward", "attention backward"):
        kernels = [row for row in report.rows if row.family == way]
        measured, predicted = (
            sum(r.measured_ms for r in kernels),
            sum(r.predicted_ms for r in kernels),
        )
        assert abs(predicted / measured - 1) < 0.05


def test_half_of_a_class_teaches_the_other_half(report: Report) -> None:
    table = report.scores[0]
    bars = {"products, forward": 0.1, "products, gradients of weights": 0.01}
    bars |= {"products, gradients of inputs": 0.02, "attention forward": 0.02}
    after = {
        str(line[0]): [row[-1] for row in table.rows if row[0] == line[0]] for line in table.rows
    }
    assert after.keys() == {*bars, "attention backward"}
    for name, errors in after.items():
        assert len(errors) == 2
        assert all(isinstance(error, float) for error in errors)
        assert max(abs(float(str(error))) for error in errors) < bars.get(name, 0.06)
