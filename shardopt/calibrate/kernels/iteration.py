"""Near-empty iterations of real TorchRec, alternating between models in one process group.

A sample is one iteration of one rank: its period, what its main thread computed (on a CPU that
includes the backward) and what all its threads did, gloo's among them. Where a real model looks up
rows and multiplies matrices, these displace what the caches hold, and are not charged for it:
framework code runs slower after a lookup than after more framework code.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from shardopt.calibrate.design.near_empty import near_empty
from shardopt.calibrate.design.points import Point, Size
from shardopt.calibrate.rows import Measurement, row_of_samples
from shardopt.measure.sampling import BRIEF_FLUSH_BYTES, CpuTimer
from shardopt.measure.timing import Samples
from shardopt.ranks.realtime import Runtime, hasten_gloo

CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time, "process": time.process_time}
BLOCK = 6
"""Iterations a model in a round, after one that lines the ranks up."""
WARM_UP_ROUNDS = 3

Marks = dict[str, list[float]]


def measure_iterations(
    points: Sequence[Point], device: Any, size: Size, runtime: Runtime
) -> Iterator[Measurement]:
    """Rows ``wall``, ``cpu`` and ``process`` of every point; all ranks have to call it."""
    import torch.distributed as dist

    trainings = [_training(point, device) for point in points]
    flush = _Flush(CpuTimer(BRIEF_FLUSH_BYTES))
    if device.type == "cpu":
        # the host of a GPU runs nothing but framework code
        for training in trainings:
            flush.between(training.model)
    if runtime is Runtime.TUNED:
        hasten_gloo()
        gc.collect()
        gc.freeze()
    spent: list[Marks] = [{clock: [] for clock in CLOCKS} for _ in points]
    for round_ in range(WARM_UP_ROUNDS + size.iteration_rounds):
        gc.collect()
        order = list(range(len(points)))
        # the same on every rank
        random.Random(round_).shuffle(order)
        for i in order:
            found = _block(trainings[i], device, flush)
            if round_ >= WARM_UP_ROUNDS:
                for clock, samples in found.items():
                    spent[i][clock] += samples
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, spent)
    for i, point in enumerate(points):
        facts = {"types": len(point.params["plan"].split("+")), "block": BLOCK}
        for clock in CLOCKS:
            seconds = [s for rank in ranks for s in rank[i][clock]]
            yield row_of_samples(point, Samples(tuple(seconds)), clock, **facts)


def _training(point: Point, device: Any) -> Any:
    import torch.distributed as dist

    from shardopt.training.batch import batch_ring
    from shardopt.training.loop import Training

    workload, plan = near_empty(point.params)
    ring = batch_ring(workload, rank=dist.get_rank())
    if device.type == "cuda":
        ring = [batch.pin_memory() for batch in ring]
    return Training(workload, plan, device, ring)


class _Flush:
    """Empties the caches in the middle of an iteration, and counts the time that this takes."""

    def __init__(self, timer: CpuTimer) -> None:
        self.timer = timer
        self.spent = dict.fromkeys(CLOCKS, 0.0)

    def between(self, model: Any) -> None:
        """Before the lookups, after them, and between the backwards of dense part and lookups."""
        model.register_forward_pre_hook(self._run)
        model.top.register_forward_pre_hook(self._run)
        model.top.register_full_backward_hook(self._run)

    def _run(self, *_: object) -> None:
        before = self.now()
        self.timer.flush()
        for clock, at in self.now().items():
            self.spent[clock] += at - before[clock]

    def now(self) -> dict[str, float]:
        """Every clock."""
        return {name: clock() for name, clock in CLOCKS.items()}

    def mark(self) -> list[float]:
        """Every clock, less what was spent here."""
        return [at - self.spent[name] for name, at in self.now().items()]


def _block(training: Any, device: Any, flush: _Flush) -> Marks:
    """Seconds of every iteration on every clock, without a barrier in between.

    The first is left out: ranks enter it together, all later ones wait for the one before.
    """
    import torch
    import torch.distributed as dist

    dist.barrier()
    training.step()
    cuda = device.type == "cuda"
    marks = [flush.mark()]
    for i in range(BLOCK):
        training.step()
        # a GPU works on behind the host, so only the whole block has a length
        if cuda and i < BLOCK - 1:
            continue
        if cuda:
            torch.cuda.synchronize(device)
        marks.append(flush.mark())
    share = BLOCK if cuda else 1
    columns = zip(CLOCKS, zip(*marks, strict=True), strict=True)
    return {clock: [(b - a) / share for a, b in pairwise(times)] for clock, times in columns}
