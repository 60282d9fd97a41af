"""Measurements that all ranks make together: reference kernels, collectives, and iterations.

On the cores of one host all ranks work on memory until an agreed instant and then enter a
collective, as they do in an iteration; a rank that spins on the clock instead finds gloo several
times slower at small sizes. A sample lasts from the last rank's entry until the last has left.

GPUs, and hosts, have no clock in common. There ranks meet in a small all-reduce right before, and
the sample is the shortest time that a rank measures for itself: that of the last to enter. A GPU
goes through its flush, the meeting and the collective without its host.

A sample of a near-empty iteration is one iteration of one rank: its period, and the compute time of
its main thread (on a CPU it includes the backward). Lookups and products of a real model displace
the content of the caches: framework code runs slower after a lookup than after more framework code.
On a CPU the caches are therefore flushed in between, and the flush is not counted.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from shardopt.calibrate.collectives import ISSUE
from shardopt.calibrate.fitting import Array
from shardopt.calibrate.host import near_empty
from shardopt.calibrate.points import CalibrationSettings, Point
from shardopt.calibrate.rows import Measurement, row_of_samples
from shardopt.extras import needs_torchrec
from shardopt.measure.reference import Reference
from shardopt.measure.sampling import (
    BRIEF_FLUSH_BYTES,
    WARM_UP,
    CpuTimer,
    Samples,
    Timer,
    timer_of,
)
from shardopt.ranks.rank import Talk
from shardopt.ranks.realtime import Runtime, hasten_gloo
from shardopt.training.batch import batch_ring
from shardopt.training.loop import Training

with needs_torchrec():
    import torch
    import torch.distributed as dist

COLLECTIVES_SHARE = 0.7
"""Share of the time of all ranks together after which near-empty iterations begin."""
PLAIN_ROUNDS = 2
"""Factor on the rounds of collectives among plain ranks, whose times have modes: decision 0021."""
AHEAD_S = 4e-3
"""Seconds of computing between agreement and entry: gloo's cost after work differs from its cost in
a loop of collectives."""
POINTS_PER_BLOCK = 8
"""Points measured in turn, round by round, so that a busy moment disturbs all of them alike."""
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
BLOCK = 6
"""Iterations a model in a round, after one that lines the ranks up."""
WARM_UP_ROUNDS = 3
FEWEST_ROUNDS = 3
"""Fewest measured rounds of every model, also where the time is over."""


def measure_together(
    points: Sequence[Point],
    device: torch.device,
    settings: CalibrationSettings,
    lasts: Callable[[float], bool],
    talk: Talk,
) -> Iterator[Measurement]:
    """Measure the points that need all ranks; every rank gets the rows.

    Args:
        lasts: tells if less than a share of the time is over; collective over all ranks.
    """
    rounds, hosts, calls = settings.size.rounds, settings.hosts, settings.size.reference_calls
    # iterations may be left for later only where other points are missing too
    later = any(point.family == "collective" for point in points)
    if device.type == "cpu" and settings.runtime is Runtime.TUNED:
        hasten_gloo()
    elif device.type == "cpu":
        rounds *= PLAIN_ROUNDS
    reference: Reference | None = None
    for family, run in groupby(points, key=lambda point: point.family):
        of_family = list(run)
        if family == "reference":
            if reference is None:
                reference = Reference(device, dist.get_rank())
                reference.measure()  # the first lookups of a process are slower than all later ones
            yield from _measure_references(of_family, reference, calls, talk)
        elif family == "iteration":
            in_time = partial(lasts, 1.0)
            yield from measure_iterations(of_family, device, settings, talk, in_time, later)
        else:
            more = partial(lasts, COLLECTIVES_SHARE)
            yield from measure_collectives(of_family, device, rounds, hosts, more)


@dataclass(frozen=True)
class Ranks:
    """Ranks that a collective joins.

    Args:
        group: torch's process group; None: all ranks.
        one_clock: True if all ranks read the same clock.
    """

    timer: Timer
    group: Any = None
    one_clock: bool = True


def measure_collectives(
    points: Sequence[Point], device: Any, rounds: int, hosts: int, go_on: Callable[[], bool]
) -> Iterator[Measurement]:
    """Measure collectives among all ranks, and within hosts of several ranks.

    Args:
        hosts: number of hosts; the ranks lie on them evenly and one after the other.
        go_on: True if there is time for more; called before each block, the same on every rank.
    """
    timer = timer_of(device.type, BRIEF_FLUSH_BYTES)
    cpu = device.type == "cpu"
    between = [point for point in points if point.params.get("hosts", 1) == hosts]
    within = [point for point in points if point not in between]
    yield from _measure_blocks(between, Ranks(timer, None, cpu and hosts == 1), rounds, go_on)
    if within:
        group, _ = dist.new_subgroups(dist.get_world_size() // hosts)
        yield from _measure_blocks(within, Ranks(timer, group, cpu), rounds, go_on)


def _measure_blocks(
    points: Sequence[Point], among: Ranks, rounds: int, go_on: Callable[[], bool]
) -> Iterator[Measurement]:
    """Measure rows block by block; collective over all ranks, which all get the same rows."""
    for first in range(0, len(points), POINTS_PER_BLOCK):
        if not go_on():
            return
        block = points[first : first + POINTS_PER_BLOCK]
        calls = [_make_call(point, among) for point in block]
        times: list[list[tuple[float, float]]] = [[] for _ in block]
        for round_ in range(WARM_UP + rounds):
            for i in range(len(calls)):
                at = (i + round_) % len(calls)
                entered_and_left = _time(calls[at], among, block[at].params["op"])
                if round_ >= WARM_UP:
                    times[at].append(entered_and_left)
        for point, seconds in zip(block, _of_all_ranks(times, among), strict=True):
            yield row_of_samples(point, Samples(tuple(seconds)))


def _time(call: Callable[[], object], among: Ranks, op: str) -> tuple[float, float]:
    """Return the times at which this rank entered and left a collective.

    It enters at 0 where ranks have no common clock, and for `ISSUE`, the host's own time.
    """
    timer, group = among.timer, among.group
    if op == ISSUE and not among.one_clock:
        # the host's part of a call; the device has nothing else to do
        timer.synchronize()
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
        timer.synchronize()
        return 0.0, elapsed
    if not among.one_clock:
        meeting = torch.ones(1, device=timer.device)
        timer.flush()
        dist.all_reduce(meeting, group=group)
        return 0.0, timer.seconds(call)
    # one clock for all processes of a host: CLOCK_MONOTONIC
    until = torch.tensor([time.monotonic() + AHEAD_S], dtype=torch.float64)
    dist.all_reduce(until, dist.ReduceOp.MAX, group=group)
    instant = float(until)
    while time.monotonic() < instant:
        timer.flush()
    entered = time.monotonic()
    elapsed = timer.seconds(call)
    return (0.0, elapsed) if op == ISSUE else (entered, entered + elapsed)


def _of_all_ranks(times: list[list[tuple[float, float]]], among: Ranks) -> list[list[float]]:
    """Return the seconds of each collective, ``[points, rounds]``.

    They last from the last rank's entry until the last rank leaves. Without a common clock they are
    the least time of a rank.
    """
    table = torch.tensor(times, dtype=torch.float64, device=among.timer.device)
    entered, exited = table[..., 0].contiguous(), table[..., 1].contiguous()
    latest, least = dist.ReduceOp.MAX, dist.ReduceOp.MIN
    dist.all_reduce(entered, latest, group=among.group)
    dist.all_reduce(exited, latest if among.one_clock else least, group=among.group)
    seconds: list[list[float]] = (exited - entered).tolist()
    return seconds


def _make_call(point: Point, among: Ranks) -> Callable[[], Any]:
    """Prepare a collective; sizes follow nccl-tests, outputs are new tensors as in TorchRec."""
    device, group = among.timer.device, among.group
    ranks = dist.get_world_size(group)
    share = max(point.params["bytes"] // 4 // ranks, 1)
    full, part = torch.ones(share * ranks, device=device), torch.ones(share, device=device)
    pending: list[Any] = []

    def issue() -> None:
        # does not wait: the one before has long ended when the next is issued
        while pending:
            pending.pop().wait()
        pending.append(dist.all_reduce(part, group=group, async_op=True))

    calls: dict[str, Callable[[], Any]] = {
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(full), full, group=group),
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(
            torch.empty_like(part), full, group=group
        ),
        "all_gather": lambda: dist.all_gather_into_tensor(
            torch.empty_like(full), part, group=group
        ),
        ISSUE: issue,
    }
    return calls[point.params["op"]]


def _measure_references(
    points: Sequence[Point], reference: Reference, calls: int, talk: Talk
) -> Iterator[Measurement]:
    """Measure a row for each reference kernel, of so many calls of all ranks."""
    for _, kernels in groupby(points, key=lambda point: point.params["at"]):
        ranks = talk.gather([reference.measure() for _ in range(calls)])
        for point in kernels:
            name = point.params["kernel"]
            repeats = (ms for rank in ranks for call in rank for ms in call[name])
            yield row_of_samples(point, Samples(tuple(ms * 1e-3 for ms in repeats)))


def measure_iterations(
    points: Sequence[Point],
    device: Any,
    settings: CalibrationSettings,
    talk: Talk,
    go_on: Callable[[], bool] = lambda: True,
    later: bool = False,
) -> Iterator[Measurement]:
    """Measure rows ``wall`` and ``cpu`` of every point; collective over all ranks.

    Models alternate in one process group.

    Args:
        go_on: True if there is time for another round; the same on every rank.
        later: without time for the fewest rounds give no rows; False: measure them anyway.
    """
    trainings = []
    for point in points:
        if later and not go_on():
            return
        workload, plan = near_empty(point.params)
        ring = batch_ring(workload, rank=dist.get_rank(), pin=device.type == "cuda")
        trainings.append(Training(workload, plan, device, ring))
    flush = _Flush(CpuTimer(BRIEF_FLUSH_BYTES))
    if device.type == "cpu":
        # the host of a GPU runs nothing but framework code
        for training in trainings:
            flush.between(training.model)
    if settings.runtime is Runtime.TUNED:
        hasten_gloo()
        gc.collect()
        gc.freeze()
    spent: list[list[Array]] = [[] for _ in points]
    for round_ in range(WARM_UP_ROUNDS + settings.size.iteration_rounds):
        enough = round_ >= WARM_UP_ROUNDS + FEWEST_ROUNDS
        if (enough or later) and not go_on():
            if not enough:
                return
            break
        gc.collect()
        order = list(range(len(points)))
        # the same on every rank
        random.Random(round_).shuffle(order)
        for i in order:
            times = _block(trainings[i], device, flush)
            if round_ >= WARM_UP_ROUNDS:
                spent[i].append(times)
    ranks = talk.gather(spent)
    for i, point in enumerate(points):
        facts = {"types": len(point.params["plan"].split("+")), "block": BLOCK}
        seconds = np.concatenate([block for rank in ranks for block in rank[i]])
        for clock, samples in zip(CLOCKS, seconds.T.tolist(), strict=True):
            yield row_of_samples(point, Samples(tuple(samples)), clock, **facts)


def _now() -> Array:
    return np.array([clock() for clock in CLOCKS.values()])


class _Flush:
    """Hook that empties the caches in the middle of an iteration and sums the time of this."""

    def __init__(self, timer: CpuTimer) -> None:
        self.timer = timer
        self.spent = np.zeros(len(CLOCKS))

    def between(self, model: Any) -> None:
        """Flush before and after the lookups, and between both backwards."""
        model.register_forward_pre_hook(self._run)
        model.top.register_forward_pre_hook(self._run)
        model.top.register_full_backward_hook(self._run)

    def _run(self, *_: object) -> None:
        before = _now()
        self.timer.flush()
        self.spent += _now() - before


def _block(training: Any, device: Any, flush: _Flush) -> Array:
    """Time a block of iterations without barriers, ``[iterations, clocks]``, less the flushes.

    The first iteration is left out: ranks enter it together, and later ones from the one before. A
    GPU runs behind the host, so that only a whole block can be timed.
    """
    dist.barrier()
    training.step()
    marks = [_now() - flush.spent]
    each = BLOCK if device.type == "cuda" else 1
    for i in range(BLOCK):
        training.step()
        if (i + 1) % each:
            continue
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks.append(_now() - flush.spent)
    return np.diff(marks, axis=0) / each
