"""Constants of single ops of dense parts, from their own rows, and how well they hold.

Why: docs/decisions/0060.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor import units
from predictor.cost.fixed_costs import HOST_OPS
from predictor.cost.gemm import product_rate
from predictor.fit import dense_parts as fits
from predictor.fit.cpu import NS
from predictor.fit.held_out import HeldOut
from predictor.hardware.schema import HardwareProfile
from shardopt.calibrate.profile.tables import tbe_rows
from shardopt.calibrate.rows import PASSES, Measurement

Array = NDArray[np.float64]
RowsOf = Callable[..., list[Measurement]]

LAYOUTS = ("nn", "nt", "tn", "outer")
FUNCTIONS = {
    "silu": ("silu", "silu_backward"),
    "gelu": ("gelu", "gelu_backward"),
    "sigmoid": ("sigmoid", "sigmoid_backward"),
    "tanh": ("tanh", "tanh_backward"),
    "softmax": ("_softmax", "_softmax_backward_data"),
}
"""Point -> PyTorch's ops of its forward and backward."""
FUNCTION_BYTES = (8, 12)
"""Read and written an element, forward and backward."""
JOINED_BYTES = 8
ATTENTION_FLOP = (4, 10)
"""Over a score and an element of a head's width, as the cost model counts them."""
LAYER_KERNELS, LAYER_OPS = 6, 6 * HOST_OPS.op + 6 * HOST_OPS.view
"""Of a linear layer with its ReLU, forward and backward."""
FEWEST = 6


@dataclass
class DensePartCosts:
    """Constants by group of the profile, and errors on rows held out by what they are of."""

    gemm: dict[str, Any] = field(default_factory=dict)
    elementwise: dict[str, Any] = field(default_factory=dict)
    embedding: dict[str, float] = field(default_factory=dict)
    step_us: dict[str, float] = field(default_factory=dict)
    layer_op_us: float | None = None
    errors: dict[str, HeldOut] = field(default_factory=dict)


def dense_part_costs(of: RowsOf, profile: HardwareProfile) -> DensePartCosts:
    """Of the rows that there are; older calibrations have none.

    Args:
        of: rows of a family, part and split, as `Builder.of` gives them.
        profile: with the constants of streaming and of large products.
    """
    found = DensePartCosts()
    if len(of("product")) < FEWEST:
        return found
    _batches(found, [r for r in of("product") if r.point.params["count"] > 1])
    _attention(found, of, profile)
    _functions(found, of, profile)
    _concatenations(found, of("concatenation"), profile)
    _unpooled(found, of)
    _host(found, of, profile)
    return found


def _fit(
    found: DensePartCosts,
    name: str,
    rows: Sequence[Measurement],
    columns: Sequence[Sequence[float]],
) -> Array:
    """Coefficients in ms from the rows that are fitted; notes the errors on those that are not."""
    time = np.array([r.median_us for r in rows]) * units.us(1.0)
    test = np.array([r.point.test for r in rows])
    table = [list(row) for row in columns]
    fit = [row for row, held in zip(table, test, strict=True) if not held]
    costs, whole = fits.after_call(fit, time[~test])
    errors = fits.with_call(table) @ whole / time - 1.0
    found.errors[name] = HeldOut(errors[test], int((~test).sum()))
    return costs


def _batches(found: DensePartCosts, rows: Sequence[Measurement]) -> None:
    shapes = [
        (p["layout"], p["count"], p["m"], p["n"], p["k"]) for p in (r.point.params for r in rows)
    ]
    costs = _fit(found, "small products", rows, fits.batch_columns(shapes, LAYOUTS)) / NS
    shared = [float(cost) for cost in costs[:3]]
    found.gemm["batches"] = {
        layout: (*shared, float(cost)) for layout, cost in zip(LAYOUTS, costs[3:], strict=True)
    }


def _attention(found: DensePartCosts, of: RowsOf, profile: HardwareProfile) -> None:
    rate = product_rate(profile.gemm, "fp32", profile.name)
    heads_us, shares = [], []
    for part, flop in zip(PASSES, ATTENTION_FLOP, strict=True):
        rows = of("attention", part)
        shapes = [
            (p["batch"] * p["heads"], p["length"], p["width"])
            for p in (r.point.params for r in rows)
        ]
        head, product = _fit(found, f"attention {part}", rows, fits.attention_columns(shapes))
        heads_us.append(float(head) / units.us(1.0))
        shares.append(float(np.clip(flop / rate / max(product, 1e-18), 1e-3, 1.0)))
    found.gemm["attention_head_us"] = tuple(heads_us)
    found.gemm["attention_forward"], found.gemm["attention_backward"] = shares


def _functions(found: DensePartCosts, of: RowsOf, profile: HardwareProfile) -> None:
    each: dict[str, float] = {}
    for part, moved, at in zip(PASSES, FUNCTION_BYTES, (0, 1), strict=True):
        for name, ops in FUNCTIONS.items():
            rows = [r for r in of("function", part) if r.point.params["op"] == name]
            times = {r.point.params["elements"]: r.median_us * units.us(1.0) for r in rows}
            if len(times) > 1:
                slope = (times[max(times)] - times[min(times)]) / (max(times) - min(times))
                each[ops[at]] = max(0.0, (slope - moved / profile.streaming) / NS)
    found.elementwise["math_ns"] = each


def _concatenations(
    found: DensePartCosts, rows: Sequence[Measurement], profile: HardwareProfile
) -> None:
    streamed = JOINED_BYTES / (profile.streaming * profile.elementwise.columns)
    for form in ("sliced", "turned"):
        some = [r for r in rows if r.point.params["form"] == form]
        elements = [
            [float(p["pieces"] * p["rows"] * p["width"])] for p in (r.point.params for r in some)
        ]
        (cost,) = _fit(found, f"concatenation, {form}", some, elements)
        found.elementwise[f"{form}_ns_per_element"] = max(0.0, (cost - streamed) / NS)


def _unpooled(found: DensePartCosts, of: RowsOf) -> None:
    names = zip(PASSES, (fits.UNPOOLED_FORWARD, fits.UNPOOLED_BACKWARD), strict=True)
    for part, terms in names:
        rows = of("lookup_unpooled", part)
        costs = _fit(
            found, f"lookup {part}, unpooled", rows, fits.unpooled_columns(tbe_rows(rows), terms)
        )
        found.embedding |= {
            f"{part}_unpooled_{name}": float(cost) for name, cost in zip(terms, costs, strict=True)
        }


def _host(found: DensePartCosts, of: RowsOf, profile: HardwareProfile) -> None:
    """A layer from the difference of deep and shallow ones; a step by its tensors."""
    times = {r.point.params["depth"]: r.median_us for r in of("layers")}
    if len(times) > 1:
        layer = (times[max(times)] - times[min(times)]) / (max(times) - min(times))
        floors = LAYER_KERNELS * profile.elementwise.floor_us
        found.layer_op_us = max(0.0, (layer - floors) / LAYER_OPS)
    by_op: Mapping[str, list[Measurement]] = {
        op: [r for r in of("optimizer") if r.point.params["op"] == op]
        for op in {r.point.params["op"] for r in of("optimizer")}
    }
    for op, rows in by_op.items():
        shapes = [(float(r.facts["tensors"]), float(r.facts["elements"])) for r in rows]
        cost, _ = _fit(found, f"step of {op}", rows, shapes)
        found.step_us[op] = float(cost) / units.us(1.0)
