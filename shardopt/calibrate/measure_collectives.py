"""Collectives as TorchRec calls them, among ranks that arrive together.

All ranks work on memory until an agreed instant and then enter, as they do in an iteration; a rank
that spins on the clock instead finds gloo several times slower at small sizes. A sample lasts from
the last rank's entry until the last has left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardopt.bench.timing import Samples
from shardopt.calibrate.design import Point
from shardopt.calibrate.rows import Measured, measured
from shardopt.calibrate.sampling import WARM_UP, Timer

AHEAD_S = 4e-3
"""From agreeing to entering, spent computing: gloo's cost after work differs from its cost in a
loop of collectives."""
POINTS_PER_BLOCK = 8
"""Measured in turn, round by round, so that a busy moment disturbs all of them alike."""
UNEVEN = 4
"""How many times the bytes of the others the busiest rank sends."""
ISSUE = "issue"


def measure_blocks(
    points: Sequence[Point], timer: Timer, rounds: int
) -> Iterator[tuple[Point, Measured]]:
    """Rows block by block; every rank must run this, all get the same rows."""
    for first in range(0, len(points), POINTS_PER_BLOCK):
        block = points[first : first + POINTS_PER_BLOCK]
        calls = [_call(point, timer.device) for point in block]
        entered: list[list[float]] = [[] for _ in block]
        left: list[list[float]] = [[] for _ in block]
        for round_ in range(WARM_UP + rounds):
            for i in range(len(calls)):
                at = (i + round_) % len(calls)
                times = _enter_together(calls[at], timer)
                if block[at].params["op"] == ISSUE:
                    # the host's own time, whoever else is where
                    times = (0.0, times[1] - times[0])
                if round_ >= WARM_UP:
                    entered[at].append(times[0])
                    left[at].append(times[1])
        last_in, last_out = _latest(entered, timer.device), _latest(left, timer.device)
        for point, begins, ends in zip(block, last_in, last_out, strict=True):
            taken = (end - begin for begin, end in zip(begins, ends, strict=True))
            yield point, measured(point, Samples(tuple(taken)))


def _enter_together(call: Callable[[], object], timer: Timer) -> tuple[float, float]:
    """When this rank entered and when it left."""
    import torch
    import torch.distributed as dist

    # one clock for all processes of a host: CLOCK_MONOTONIC
    until = torch.tensor([time.monotonic() + AHEAD_S], dtype=torch.float64, device=timer.device)
    dist.all_reduce(until, dist.ReduceOp.MAX)
    instant = float(until)
    while time.monotonic() < instant:
        timer.flush()
    entered = time.monotonic()
    taken = timer.seconds(call)
    return entered, entered + taken


def _latest(times: list[list[float]], device: str) -> list[list[float]]:
    """Element by element, over the ranks."""
    import torch
    import torch.distributed as dist

    table = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    latest: list[list[float]] = table.tolist()
    return latest


def _call(point: Point, device: str) -> Callable[[], Any]:
    """One collective; sizes follow nccl-tests, outputs are new tensors as in TorchRec."""
    import torch
    import torch.distributed as dist

    ranks, rank = dist.get_world_size(), dist.get_rank()
    op = point.params["op"]
    elements = max(point.params["bytes"] // 4 // ranks, 1) * ranks
    full = torch.ones(elements, device=device)
    part = torch.ones(elements // ranks, device=device)

    def all_to_all() -> Any:
        dist.all_to_all_single(torch.empty_like(full), full)

    def reduce_scatter() -> Any:
        dist.reduce_scatter_tensor(torch.empty_like(part), full)

    def all_gather() -> Any:
        dist.all_gather_into_tensor(torch.empty_like(full), part)

    calls: dict[str, Callable[[], Any]] = {
        "all_to_all": all_to_all,
        "all_to_all_uneven": _uneven(elements, ranks, rank, device),
        "all_reduce": lambda: dist.all_reduce(full),
        "reduce_scatter": reduce_scatter,
        "all_gather": all_gather,
        ISSUE: lambda: pending.append(dist.all_reduce(part, async_op=True)),
    }
    pending: list[Any] = []
    if op == ISSUE:
        return _finish_before(calls[op], pending)
    return calls[op]


def _finish_before(call: Callable[[], Any], pending: list[Any]) -> Callable[[], Any]:
    """Issue one and do not wait: the one before has long ended when the next is issued."""

    def issue() -> None:
        while pending:
            pending.pop().wait()
        call()

    return issue


def _uneven(elements: int, ranks: int, rank: int, device: str) -> Callable[[], Any]:
    """An all-to-all in which rank 0 sends all its elements and the others a quarter of them."""
    import torch
    import torch.distributed as dist

    share = elements // ranks
    sizes = [share if sender == 0 else max(share // UNEVEN, 1) for sender in range(ranks)]
    send = torch.ones(sizes[rank] * ranks, device=device)

    def call() -> None:
        received = torch.empty(sum(sizes), device=device)
        dist.all_to_all_single(received, send, sizes, [sizes[rank]] * ranks)

    return call
