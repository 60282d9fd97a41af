"""GEMM, memory-bound kernels and copies to the device, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from shardopt.calibrate.design.points import Point
from shardopt.calibrate.rows import Measurement, row_of_samples
from shardopt.measure.sampling import Timer

DTYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def measure_gemm(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """``[m, k] @ [k, n]``, operands laid out as a linear layer's forward or backward has them.

    Layout addmm is its whole forward, with a bias.
    """
    import torch

    p = point.params
    dtype = getattr(torch, DTYPES[p["dtype"]])

    def operand(rows: int, columns: int, transposed: bool) -> Any:
        shape = (columns, rows) if transposed else (rows, columns)
        made = torch.randn(shape, device=timer.device).to(dtype)
        return made.t() if transposed else made

    a = operand(p["m"], p["k"], p["layout"] == "tn")
    b = operand(p["k"], p["n"], p["layout"] in ("nt", "addmm"))
    bias = torch.ones(p["n"], device=timer.device, dtype=dtype)
    call = partial(torch.addmm, bias) if p["layout"] == "addmm" else torch.mm
    # tf32 is how a GPU multiplies fp32 when it is told to
    torch.set_float32_matmul_precision("high" if p["dtype"] == "tf32" else "highest")
    taken = timer.samples(lambda: call(a, b), seconds)
    torch.set_float32_matmul_precision("highest")
    return [row_of_samples(point, taken)]


def measure_elementwise(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """A kernel that does little but move memory; its fact is the bytes read and written."""
    import torch

    size = point.params["bytes"]
    x = torch.ones(size // 4, device=timer.device)
    halves = list(x.split((size // 8, size // 4 - size // 8)))
    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        "clone": (2, x.clone),
        "relu": (2, lambda: torch.relu(x)),
        "add": (3, lambda: torch.add(x, x2)),
        "cat": (2, lambda: torch.cat(halves)),
    }
    x2 = torch.ones_like(x)
    passes, call = calls[point.params["op"]]
    return [row_of_samples(point, timer.samples(call, seconds), bytes_moved=passes * size)]


def measure_streaming(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Memory read once, and next to nothing written."""
    import torch

    x = torch.ones(point.params["bytes"] // 4, device=timer.device)
    return [row_of_samples(point, timer.samples(x.sum, seconds))]


def measure_copy_h2d(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """A copy from page-locked host memory to the device."""
    import torch

    there = torch.empty(point.params["bytes"] // 4, device=timer.device)
    here = torch.ones(there.shape, pin_memory=timer.device == "cuda")
    taken = timer.samples(lambda: there.copy_(here, non_blocking=True), seconds)
    return [row_of_samples(point, taken)]
