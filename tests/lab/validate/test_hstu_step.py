"""One step of a generative recommender on 16 H100, and what balancing its batches gained."""

from __future__ import annotations

import pytest

from lab.hstu import ALPHA, beyond
from lab.suites import Report
from lab.validate.hstu_step import BALANCED, CLASSES, KERNELS, STEP, validate_hstu_step
from tests.public_data import EXCERPTS


@pytest.fixture(scope="module")
def report() -> Report:
    return validate_hstu_step(EXCERPTS)


def test_the_step_and_its_embeddings_are_met(report: Report) -> None:
    errors = {row.name["quantity"]: row.error for row in report.rows if row.part in (STEP, CLASSES)}
    bars = {"step_median": 0.1, "embedding op": 0.3, "attention fwd+bwd": 0.2, "elementwise": 0.35}
    assert all(abs(errors[name]) < bar for name, bar in bars.items())
    assert "nccl exposed" in errors


def test_waiting_for_the_longest_batch_is_what_balancing_gained(report: Report) -> None:
    (row,) = (row for row in report.rows if row.part == BALANCED)
    assert abs(row.error) < 0.1
    assert row.interval_ms is not None
    low, high = row.interval_ms
    assert low < row.measured_ms < high


def test_products_are_those_of_the_profile(report: Report) -> None:
    errors = {row.name["quantity"]: row.error for row in report.rows if row.part == KERNELS}
    for way in ("gemm uvqk backward", "gemm projection forward", "gemm projection backward"):
        assert abs(errors[way]) < 0.05


def test_two_fifths_of_ids_without_an_end_lie_beyond_the_table() -> None:
    assert beyond(50_000_000, ALPHA) == pytest.approx(0.40, abs=0.01)
    assert beyond(10**18, ALPHA) > 0.1
