"""GEMM, memory-bound kernels and the host's time per framework op, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardopt.bench.timing import Samples
from shardopt.calibrate.design import Point
from shardopt.calibrate.rows import Measured, measured
from shardopt.calibrate.sampling import Timer

OPS_PER_SAMPLE = 200
"""Small ops are timed many at once: one is shorter than the clock is good for."""


def measure_gemm(point: Point, timer: Timer, seconds: float) -> list[Measured]:
    """``[m, k] @ [k, n]``, operands laid out as a linear layer's forward or backward has them.

    Layout addmm is its whole forward, with a bias.
    """
    import torch

    p = point.params
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[p["dtype"]]

    def operand(rows: int, columns: int, transposed: bool) -> Any:
        shape = (columns, rows) if transposed else (rows, columns)
        made = torch.randn(shape, device=timer.device).to(dtype)
        return made.t() if transposed else made

    a = operand(p["m"], p["k"], p["layout"] == "tn")
    b = operand(p["k"], p["n"], p["layout"] in ("nt", "addmm"))
    if p["layout"] == "addmm":
        bias = torch.ones(p["n"], device=timer.device, dtype=dtype)
        return [measured(point, timer.samples(lambda: torch.addmm(bias, a, b), seconds))]
    return [measured(point, timer.samples(lambda: torch.mm(a, b), seconds))]


def measure_elementwise(point: Point, timer: Timer, seconds: float) -> list[Measured]:
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
    return [measured(point, timer.samples(call, seconds), bytes_moved=passes * size)]


def measure_host(point: Point, timer: Timer, seconds: float) -> list[Measured]:
    """Mean host time of a small op recorded for the backward, over a mix of five."""
    import torch

    x = torch.ones(8, device=timer.device, requires_grad=True)

    def some() -> None:
        for _ in range(OPS_PER_SAMPLE // 5):
            y = torch.add(x, 1.0)
            z = torch.cat((y, y))
            a, _ = torch.split(z, 8)
            torch.relu(a)
            a.view(2, 4)

    taken = timer.samples(some, seconds).seconds
    return [measured(point, Samples(tuple(t / OPS_PER_SAMPLE for t in taken)))]
