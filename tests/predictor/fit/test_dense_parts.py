"""Fits of single ops find the constants that made the rows, whatever the call itself takes."""

import numpy as np
import pytest

from predictor.cost.gemm import small_product_ms
from predictor.fit import dense_parts as fits
from predictor.fit.cpu import NS, TableCounts, TbeRows

pytest.importorskip("scipy")

CALL_MS = 0.06


def test_batches_share_what_operands_cost_and_not_what_layouts_do() -> None:
    rng = np.random.default_rng(0)
    shared, own = (0.8, 0.5, 1.3), {"nn": 0.02, "outer": 0.25}
    shapes = [
        (("nn", "outer")[i % 2], *(int(n) for n in rng.integers(2, 64, 3)), 1 if i % 2 else 20)
        for i in range(24)
    ]
    time = [
        CALL_MS + count * small_product_ms((*shared, own[layout]), m, n, k)
        for layout, count, m, n, k in shapes
    ]
    found, whole = fits.after_call(fits.batch_columns(shapes, tuple(own)), np.array(time))
    assert whole[0] == pytest.approx(CALL_MS, rel=1e-3)
    again = fits.with_call(fits.batch_columns(shapes, tuple(own))) @ whole
    assert again == pytest.approx(time, rel=1e-3)
    assert found[3] / NS == pytest.approx(own["nn"], rel=0.05)


def test_attention_and_unpooled_lookups_are_linear_in_their_work() -> None:
    assert fits.attention_columns([(8, 10, 4)]) == [[8, 8 * 10 * 10 * 4]]
    tables = [TableCounts(1e5, 32.0, 64.0, 500.0, 300.0)] * 2
    (row,) = fits.unpooled_columns(TbeRows([tables], np.ones(1)), fits.UNPOOLED_BACKWARD)
    assert row == pytest.approx([2e-3, 1000 * 32 * NS, 600 * NS, 600 * 32 * NS])
