"""Collectives as TorchRec calls them, among ranks that arrive together.

On the cores of one host all ranks work on memory until an agreed instant and then enter, as they do
in an iteration; a rank that spins on the clock instead finds gloo several times slower at small
sizes. A sample lasts from the last rank's entry until the last has left.

GPUs, and hosts, have no clock in common. There ranks meet in a small all-reduce right before, and
the sample is the shortest time that a rank measures for itself: that of the last to enter. A GPU
goes through its flush, the meeting and the collective without its host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardopt.calibrate.design.points import Point
from shardopt.calibrate.rows import Measurement, row_of_samples
from shardopt.measure.sampling import WARM_UP, Timer
from shardopt.measure.timing import Samples

AHEAD_S = 4e-3
"""From agreeing to entering, spent computing: gloo's cost after work differs from its cost in a
loop of collectives."""
POINTS_PER_BLOCK = 8
"""Measured in turn, round by round, so that a busy moment disturbs all of them alike."""
UNEVEN = 4
"""How many times the bytes of the others the busiest rank sends."""
ISSUE = "issue"


@dataclass(frozen=True)
class Ranks:
    """Those that a collective joins.

    Args:
        group: as torch takes it; None: all.
        one_clock: whether they read the same one.
    """

    timer: Timer
    group: Any = None
    one_clock: bool = True


def measure_blocks(
    points: Sequence[Point], among: Ranks, rounds: int
) -> Iterator[tuple[Point, Measurement]]:
    """Rows block by block; every rank must run this, all get the same rows."""
    for first in range(0, len(points), POINTS_PER_BLOCK):
        block = points[first : first + POINTS_PER_BLOCK]
        calls = [_make_call(point, among) for point in block]
        entered: list[list[float]] = [[] for _ in block]
        left: list[list[float]] = [[] for _ in block]
        for round_ in range(WARM_UP + rounds):
            for i in range(len(calls)):
                at = (i + round_) % len(calls)
                times = _time_entry_and_exit(calls[at], among, block[at].params["op"])
                if round_ >= WARM_UP:
                    entered[at].append(times[0])
                    left[at].append(times[1])
        last_in = _reduce(entered, among, latest=True)
        last_out = _reduce(left, among, latest=among.one_clock)
        for point, begins, ends in zip(block, last_in, last_out, strict=True):
            taken = (end - begin for begin, end in zip(begins, ends, strict=True))
            yield point, row_of_samples(point, Samples(tuple(taken)))


def _time_entry_and_exit(call: Callable[[], object], among: Ranks, op: str) -> tuple[float, float]:
    """When this rank entered and when it left; of ranks without a common clock it enters at 0."""
    if not among.one_clock:
        return 0.0, _time_issue(call, among) if op == ISSUE else _time_after_meeting(call, among)
    times = _enter_together(call, among)
    # the host's own time, whoever else is where
    return (0.0, times[1] - times[0]) if op == ISSUE else times


def _enter_together(call: Callable[[], object], among: Ranks) -> tuple[float, float]:
    """At an agreed instant."""
    import torch
    import torch.distributed as dist

    # one clock for all processes of a host: CLOCK_MONOTONIC
    until = torch.tensor([time.monotonic() + AHEAD_S], dtype=torch.float64)
    dist.all_reduce(until, dist.ReduceOp.MAX, group=among.group)
    instant = float(until)
    while time.monotonic() < instant:
        among.timer.flush()
    entered = time.monotonic()
    taken = among.timer.seconds(call)
    return entered, entered + taken


def _time_after_meeting(call: Callable[[], object], among: Ranks) -> float:
    """Seconds of a call that follows a collective of all."""
    import torch
    import torch.distributed as dist

    meeting = torch.ones(1, device=among.timer.device)
    among.timer.flush()
    dist.all_reduce(meeting, group=among.group)
    return among.timer.seconds(call)


def _time_issue(call: Callable[[], object], among: Ranks) -> float:
    """Seconds of the host's part of a call; the device has nothing else to do."""
    among.timer.synchronize()
    start = time.perf_counter()
    call()
    taken = time.perf_counter() - start
    among.timer.synchronize()
    return taken


def _reduce(times: list[list[float]], among: Ranks, *, latest: bool) -> list[list[float]]:
    """The latest or the least of all ranks, element by element."""
    import torch
    import torch.distributed as dist

    table = torch.tensor(times, dtype=torch.float64, device=among.timer.device)
    reduce = dist.ReduceOp.MAX if latest else dist.ReduceOp.MIN
    dist.all_reduce(table, reduce, group=among.group)
    found: list[list[float]] = table.tolist()
    return found


def _make_call(point: Point, among: Ranks) -> Callable[[], Any]:
    """One collective; sizes follow nccl-tests, outputs are new tensors as in TorchRec."""
    import torch
    import torch.distributed as dist

    device, group = among.timer.device, among.group
    ranks = dist.get_world_size(group)
    op = point.params["op"]
    elements = max(point.params["bytes"] // 4 // ranks, 1) * ranks
    full = torch.ones(elements, device=device)
    part = torch.ones(elements // ranks, device=device)

    def all_to_all() -> Any:
        dist.all_to_all_single(torch.empty_like(full), full, group=group)

    def reduce_scatter() -> Any:
        dist.reduce_scatter_tensor(torch.empty_like(part), full, group=group)

    def all_gather() -> Any:
        dist.all_gather_into_tensor(torch.empty_like(full), part, group=group)

    calls: dict[str, Callable[[], Any]] = {
        "all_to_all": all_to_all,
        "all_to_all_uneven": _make_uneven(elements, among),
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "reduce_scatter": reduce_scatter,
        "all_gather": all_gather,
        ISSUE: lambda: pending.append(dist.all_reduce(part, group=group, async_op=True)),
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


def _make_uneven(elements: int, among: Ranks) -> Callable[[], Any]:
    """An all-to-all in which rank 0 sends all its elements and the others a quarter of them."""
    import torch
    import torch.distributed as dist

    device, group = among.timer.device, among.group
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    share = elements // ranks
    sizes = [share if sender == 0 else max(share // UNEVEN, 1) for sender in range(ranks)]
    send = torch.ones(sizes[rank] * ranks, device=device)

    def call() -> None:
        received = torch.empty(sum(sizes), device=device)
        dist.all_to_all_single(received, send, sizes, [sizes[rank]] * ranks, group=group)

    return call
