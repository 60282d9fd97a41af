"""Fits what single ops of dense parts cost one core, from rows of `shardopt calibrate`.

Each row holds a call of code that lies in no cache, which no op of an iteration pays: every fit has
a constant for it, which is dropped. Times are linear in the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from predictor.cost.gemm import small_product_work
from predictor.fit.cpu import NS, TbeRows, non_negative
from predictor.units import us

Array = NDArray[np.float64]
Columns = Sequence[Sequence[float]]

UNPOOLED_FORWARD = (
    "table_us",
    "ns_per_lookup",
    "ns_per_lookup_dim",
    "ns_per_row",
    "ns_per_row_dim",
)
UNPOOLED_BACKWARD = ("table_us", "ns_per_lookup_dim", "ns_per_row", "ns_per_row_dim")


def after_call(columns: Columns, time: Array) -> tuple[Array, Array]:
    """Coefficients of ``columns [rows, terms]``, and those with the call's own ahead of them."""
    found = non_negative(with_call(columns), time)
    return found[1:], found


def with_call(columns: Columns) -> Array:
    """A one ahead of each row."""
    table = np.array(columns, dtype=np.float64)
    return np.hstack((np.ones((len(table), 1)), table))


def batch_columns(
    shapes: Sequence[tuple[str, int, int, int, int]], layouts: Sequence[str]
) -> list[list[float]]:
    """Work of batches (layout, count, m, n, k): what every layout shares, then the products of
    each of ``layouts``."""
    columns = []
    for layout, count, m, n, k in shapes:
        *shared, products = small_product_work(m, n, k)
        own = [products * (layout == each) for each in layouts]
        columns.append([count * work for work in (*shared, *own)])
    return columns


def attention_columns(shapes: Sequence[tuple[int, int, int]]) -> list[list[float]]:
    """Samples' heads, and products of (heads, length, width)."""
    return [[heads, heads * length * length * width] for heads, length, width in shapes]


def unpooled_columns(rows: TbeRows, names: Sequence[str]) -> list[list[float]]:
    """ms that one unit of each constant adds to lookups without pooling."""
    terms = []
    for tables in rows.tables:
        ids, width = sum(t.ids for t in tables), tables[0].dim
        distinct = sum(t.distinct for t in tables)
        known = {
            "table_us": us(float(len(tables))),
            "ns_per_lookup": NS * ids,
            "ns_per_lookup_dim": NS * ids * width,
            "ns_per_row": NS * distinct,
            "ns_per_row_dim": NS * distinct * width,
        }
        terms.append([known[name] for name in names])
    return terms
