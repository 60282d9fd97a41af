"""Points of single ops that dense parts of any model run, at the sizes that ranks on CPUs see.

Shapes are those of layers and of attention in general, drawn by a Sobol sequence; no model is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardopt.calibrate.design.points import Point, Size, is_test, logarithmic, sobol

SAMPLES, WIDTHS, SKINNY = (64, 8192), (8, 1024), (1, 16)
"""Of a linear layer: rows of its input, and widths; every third layer is skinny on one side."""
MAX_MACS = 4e8
COUNT, LENGTH, HEAD_WIDTH = (32, 1024), (8, 64), (8, 64)
"""Of attention: samples times heads, items of a history, width of a head."""
EXPERTS, EXPERT_WIDTH = (2, 12), (16, 256)
"""Of a mixture, whose products have one row each."""
MAX_BATCHED_MACS = 1e8
FUNCTIONS = ("silu", "gelu", "sigmoid", "tanh", "softmax")
FUNCTION_OCTAVES = (14, 17, 20)
"""Of elements: with the core's own caches and beyond them."""
SOFTMAX_WIDTH = 32
FORMS = ("whole", "sliced", "turned")
"""How the operands of a concatenation lie: on their own, as columns of a wider matrix, or with
rows and columns exchanged."""
PIECES, PIECE_ROWS, PIECE_WIDTHS = (2, 16), (128, 8192), (8, 128)
MAX_JOINED = 2**21
UNPOOLED_DIMS = (16, 32, 64, 128)
UNPOOLED_TABLES, UNPOOLED_BATCH, UNPOOLED_LENGTH = (1, 5), (32, 1024), (1.0, 50.0)
UNPOOLED_ROWS, UNPOOLED_ALPHA = (1e3, 1e6), 1.25
MAX_UNPOOLED_IDS = 60_000
DEPTHS = (2, 32)
"""Layers of next to nothing, whose difference is the host's time of one."""


def dense_part_points(size: Size) -> list[Point]:
    """All of this module."""
    return [
        *layer_points(size.ops),
        *batch_points(size.ops),
        *function_points(),
        *attention_points(size.ops),
        *concatenation_points(size.ops),
        *unpooled_points(2 * size.ops),
        *(Point("layers", {"depth": depth}) for depth in DEPTHS),
    ]


def layer_points(count: int) -> Iterator[Point]:
    """A linear layer's three products: forward with its bias, gradients of input and weight."""
    for i, u in enumerate(sobol(count, dims=3)):
        into, out = (round(logarithmic(x, *WIDTHS)) for x in u[1:])
        if i % 3 == 1:
            out = round(logarithmic(u[2], *SKINNY))
        rows = round(min(logarithmic(u[0], *SAMPLES), MAX_MACS / (into * out)))
        for layout, m, n, k in (
            ("addmm", rows, out, into),
            ("nn", rows, into, out),
            ("tn", out, into, rows),
        ):
            yield _product(1, m, n, k, layout, is_test(i))


def batch_points(count: int) -> Iterator[Point]:
    """Scores and values of attention, and the gradients of both; the same of mixtures."""
    for i, u in enumerate(sobol(count, dims=3)):
        length, width = round(logarithmic(u[1], *LENGTH)), round(logarithmic(u[2], *HEAD_WIDTH))
        most = MAX_BATCHED_MACS / (length * length * width)
        samples = round(min(logarithmic(u[0], *COUNT), most))
        for layout, m, n, k in (
            ("nt", length, length, width),
            ("nn", length, width, length),
            ("tn", length, width, length),
        ):
            yield _product(samples, m, n, k, layout, is_test(i))
    for i, u in enumerate(sobol(count // 2, dims=3)):
        samples = round(logarithmic(u[0], *COUNT))
        experts = round(logarithmic(u[1], *EXPERTS))
        width = round(logarithmic(u[2], *EXPERT_WIDTH))
        for layout, m, n, k in (
            ("nn", 1, width, experts),
            ("nt", 1, experts, width),
            ("outer", experts, width, 1),
        ):
            yield _product(samples, m, n, k, layout, is_test(i))


def _product(count: int, m: int, n: int, k: int, layout: str, test: bool) -> Point:
    params = {"count": count, "m": m, "n": n, "k": k, "layout": layout}
    return Point("product", params, test)


def function_points() -> Iterator[Point]:
    """Functions that are arithmetic on a core, not only memory."""
    for i, op in enumerate(FUNCTIONS):
        for j, octave in enumerate(FUNCTION_OCTAVES):
            yield Point("function", {"op": op, "elements": 2**octave}, is_test(i + j))


def attention_points(count: int) -> Iterator[Point]:
    """Fused attention with a mask."""
    for i, u in enumerate(sobol(count, dims=4)):
        heads = (1, 2, 4)[int(u[3] * 3)]
        length, width = round(logarithmic(u[1], *LENGTH)), round(logarithmic(u[2], *HEAD_WIDTH))
        most = MAX_BATCHED_MACS / (length * length * width)
        batch = max(1, round(min(logarithmic(u[0], *COUNT), most) / heads))
        shape = {"batch": batch, "heads": heads, "length": length, "width": width}
        yield Point("attention", shape, is_test(i))


def concatenation_points(count: int) -> Iterator[Point]:
    """Columns side by side, of operands in every form."""
    for i, u in enumerate(sobol(count, dims=3)):
        pieces = round(logarithmic(u[0], *PIECES))
        width = round(logarithmic(u[2], *PIECE_WIDTHS))
        rows = round(min(logarithmic(u[1], *PIECE_ROWS), MAX_JOINED / (pieces * width)))
        for form in FORMS:
            params = {"form": form, "pieces": pieces, "rows": rows, "width": width}
            yield Point("concatenation", params, is_test(i))


def unpooled_points(count: int) -> Iterator[Point]:
    """Lookups of sequences: one output row an id, tables of one width."""
    for i, u in enumerate(sobol(count, dims=6)):
        tables = round(logarithmic(u[0], *UNPOOLED_TABLES))
        batch = round(logarithmic(u[1], *UNPOOLED_BATCH))
        length = min(logarithmic(u[2], *UNPOOLED_LENGTH), MAX_UNPOOLED_IDS / (batch * tables))
        table: dict[str, Any] = {
            "rows": round(logarithmic(u[3], *UNPOOLED_ROWS)),
            "dim": UNPOOLED_DIMS[int(u[4] * len(UNPOOLED_DIMS))],
            "pooling": round(max(length, 0.1), 2),
            "alpha": round(float(u[5]) * UNPOOLED_ALPHA, 3),
        }
        params = {"batch": batch, "pooled": False, "tables": [table] * tables}
        yield Point("lookup_unpooled", params, is_test(i))
