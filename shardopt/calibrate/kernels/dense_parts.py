"""Single ops of dense parts on one rank; see `shardopt.calibrate.design.dense_parts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardopt.calibrate.design.points import Point
from shardopt.calibrate.kernels.ops import measure_both_passes
from shardopt.calibrate.rows import Measurement, row_of_samples
from shardopt.measure.sampling import Timer

TINY_WIDTH, TINY_BATCH = 8, 8
SOFTMAX_WIDTH = 32


def measure_product(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """``count`` products ``[m, k] @ [k, n]``; layout addmm is a linear layer with its bias."""
    import torch

    p = point.params
    turned_left, turned_right = p["layout"] == "tn", p["layout"] in ("nt", "addmm")

    def operand(rows: int, columns: int, turned: bool) -> Any:
        shape = (columns, rows) if turned else (rows, columns)
        made = torch.ones(p["count"], *shape, device=timer.device)
        return made.transpose(1, 2) if turned else made

    a = operand(p["m"], p["k"], turned_left)
    b = operand(p["k"], p["n"], turned_right)
    call: Callable[[], Any] = lambda: torch.bmm(a, b)  # noqa: E731
    if p["count"] == 1:
        left, right = a[0], b[0]
        bias = torch.ones(p["n"], device=timer.device)
        call = lambda: torch.mm(left, right)  # noqa: E731
        if p["layout"] == "addmm":
            call = lambda: torch.addmm(bias, left, right)  # noqa: E731
    return [row_of_samples(point, timer.samples(call, seconds))]


def measure_function(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """A function of every element, and its gradient."""
    import torch
    from torch.nn import functional

    op, elements = point.params["op"], point.params["elements"]
    x = torch.linspace(-3.0, 3.0, elements, device=timer.device)
    x = x.view(-1, SOFTMAX_WIDTH).clone().requires_grad_()
    calls: dict[str, Callable[[], Any]] = {
        "silu": lambda: functional.silu(x),
        "gelu": lambda: functional.gelu(x),
        "sigmoid": lambda: torch.sigmoid(x),
        "tanh": lambda: torch.tanh(x),
        "softmax": lambda: torch.softmax(x, dim=-1),
    }
    return measure_both_passes(point, calls[op], [x], timer, seconds, {})


def measure_attention(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """`scaled_dot_product_attention` with a causal mask, as attention over a history has it."""
    import torch
    from torch.nn import functional

    p = point.params
    shape = (p["batch"], p["heads"], p["length"], p["width"])
    given = [torch.full(shape, 0.1, device=timer.device, requires_grad=True) for _ in range(3)]
    future = torch.full((p["length"], p["length"]), float("-inf"), device=timer.device).triu(1)

    def forward() -> Any:
        return functional.scaled_dot_product_attention(*given, attn_mask=future)

    return measure_both_passes(point, forward, given, timer, seconds, {})


def measure_concatenation(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Matrices joined along their last dimension."""
    import torch

    p = point.params
    pieces, rows, width = p["pieces"], p["rows"], p["width"]
    if p["form"] == "sliced":
        whole = torch.ones(rows, (pieces + 1) * width, device=timer.device)
        parts = [whole[:, i * width : (i + 1) * width] for i in range(pieces)]
    elif p["form"] == "turned":
        parts = [torch.ones(width, rows, device=timer.device).t() for _ in range(pieces)]
    else:
        parts = [torch.ones(rows, width, device=timer.device) for _ in range(pieces)]
    return [row_of_samples(point, timer.samples(lambda: torch.cat(parts, dim=1), seconds))]


def measure_layers(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Forward and backward of linear layers with ReLU that compute next to nothing."""
    import torch

    layers: list[Any] = []
    for _ in range(point.params["depth"]):
        layers += [torch.nn.Linear(TINY_WIDTH, TINY_WIDTH), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers).to(timer.device)
    x = torch.ones(TINY_BATCH, TINY_WIDTH, device=timer.device, requires_grad=True)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(x).sum().backward()

    return [row_of_samples(point, timer.samples(step, seconds))]
