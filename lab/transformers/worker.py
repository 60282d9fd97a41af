"""One rank that times training steps of transformers, round by round, and ops inside some steps.

Rank 0 appends a line of JSON a round to the folder.
"""

from __future__ import annotations

import bisect
import gc
import random
import time
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab.quiet_ranks import hasten_main, prepare_on_last_cores
from lab.replay.transformers import Training
from lab.transformer import TransformerShape
from lab.transformers.files import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    calibrations,
    gradient_sum,
    is_disturbed,
    rounds_of,
    targets,
    training_step,
)
from predictor.cost.ops.cpu_ops import OpRow, kind_and_sizes, reuse_bytes
from predictor.iteration.op_graph import CollectiveStart, RankCalls
from shardopt.measure.machine import other_cores, usage
from shardopt.ranks.rank import Rank, Report, available_cores, join_group
from shardopt.ranks.realtime import hasten_gloo
from shardopt.torchrec.capture.recorder import OpClock, Recorder, Recording

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1024 * 1024, 25 * 1024 * 1024
"""DDP's defaults, where ``bucket_cap_mb`` is not given (torch/nn/parallel/distributed.py)."""


def record_step(shape: TransformerShape, *, real: bool = False) -> Recording:
    """The second step of a training, when the optimizer has its states.

    Args:
        real: run it, instead of passing fake tensors through it.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with nullcontext() if real else FakeTensorMode():
        training = Training(shape)
        recorder = Recorder()
        for parameter in training.model.parameters():
            parameter.register_post_accumulate_grad_hook(recorder.gradient)
        with recorder:
            training.step(recorder.mark)
    return recorder.recording


def step_calls(recording: Recording) -> RankCalls:
    """The calls of a step, as a rank runs them that sums its gradients with others.

    Calls of one part, kind and size become one row. A part of the backward ends where a bucket of
    gradients is complete.
    """
    calls = [recorded.call for recorded in recording.calls]
    ends, buckets = _buckets(recording)
    found: dict[str, dict[tuple[str, tuple[int, ...]], list[Any]]] = {}
    for at, (call, reuse) in enumerate(zip(calls, reuse_bytes(calls), strict=True)):
        rows = found.setdefault(_part(at, recording.marks, ends), {})
        rows.setdefault(kind_and_sizes(call), []).append(reuse)
    parts = {
        part: tuple(
            OpRow(kind, sizes, tuple(map(float, sum(reuses))), len(reuses))
            for (kind, sizes), reuses in rows.items()
        )
        for part, rows in found.items()
    }
    return training_step(parts, buckets)


def row_index(recording: Recording) -> list[int]:
    """The row of every call, counted through all parts of `step_calls`."""
    ends, _ = _buckets(recording)
    rows: dict[tuple[str, str, tuple[int, ...]], int] = {}
    keys = []
    for at, recorded in enumerate(recording.calls):
        part = _part(at, recording.marks, ends)
        keys.append((part, *kind_and_sizes(recorded.call)))
        rows.setdefault(keys[-1], len(rows))
    # parts follow each other, so rows are numbered part by part as they first appear
    return [rows[key] for key in keys]


def _buckets(recording: Recording) -> tuple[list[int], tuple[CollectiveStart, ...]]:
    """Number of the call that completes each bucket, and its sum.

    As DistributedDataParallel rebuilds its buckets after the first step: gradients in the order in
    which they arrive, the first bucket of 1 MiB, the others of 25 MiB, none split.
    """
    ends: list[int] = []
    buckets: list[CollectiveStart] = []
    count, size, cap = 0, 0, FIRST_BUCKET_BYTES
    for at, more in recording.gradients:
        count, size = count + 1, size + more
        if size >= cap:
            ends.append(at)
            buckets.append(gradient_sum(count, size))
            count, size, cap = 0, 0, BUCKET_BYTES
    if count:
        ends.append(recording.marks[OPTIMIZER])
        buckets.append(gradient_sum(count, size))
    return ends, tuple(buckets)


def _part(at: int, marks: dict[str, int], ends: list[int]) -> str:
    if at < marks[BACKWARD]:
        return FORWARD
    if at >= marks[OPTIMIZER]:
        return OPTIMIZER
    return f"{BACKWARD}.{min(bisect.bisect_right(ends, at), len(ends) - 1)}"


STEPS = 2
"""Of a block that count; the one before them finds caches full of another model."""
DIGITS = {"steps": 4, "alone": 4, "captured": 3}
"""Significant digits that are kept."""


class _Rank:
    """All models of a rank, each with its optimizer."""

    def __init__(self, rank: int, ranks: int) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self.rank, self.ranks = rank, ranks
        self.captured = calibrations(ranks)
        shapes = [*self.captured, *targets(ranks)]
        wrap: dict[str, Any] = {} if ranks == 1 else {"wrap": DistributedDataParallel}
        # fake tensors first: their memory is none
        self.rows = {shape.name: row_index(record_step(shape)) for shape in self.captured}
        self.trainings = {shape.name: Training(shape, rank, **wrap) for shape in shapes}
        for name in self.trainings:
            self.block(name)
        gc.collect()
        gc.freeze()

    def round(self, at: int) -> dict[str, Any]:
        """A block of every model in an order of this round, and what was timed inside steps."""
        order = list(self.trainings)
        random.Random(f"round {at}").shuffle(order)
        steps = {name: self.block(name) for name in order}
        alone: dict[str, list[float]] = {}
        captured: dict[str, list[float]] = {}
        for name in order:
            if name in self.rows:
                alone[name] = steps[name] if self.ranks == 1 else self.block(name, sync=False)
                captured[name] = self.capture(name)
        return {"steps": steps, "alone": alone, "captured": captured}

    def block(self, name: str, *, sync: bool = True) -> list[float]:
        """Milliseconds of some steps, without a barrier in between."""
        training = self.trainings[name]
        self._meet()
        with self._apart(training, sync):
            training.step()
            marks = [time.perf_counter_ns()]
            for _ in range(STEPS):
                training.step()
                marks.append(time.perf_counter_ns())
        return [(b - a) / 1e6 for a, b in pairwise(marks)]

    def capture(self, name: str) -> list[float]:
        """Milliseconds of each row of ops inside one step that exchanges nothing."""
        training, rows = self.trainings[name], self.rows[name]
        self._meet()
        with self._apart(training, sync=False), OpClock() as clock:
            training.step()
        spent = [0.0] * (1 + max(rows))
        for row, ms in zip(rows, clock.ms, strict=True):
            spent[row] += ms
        return spent

    def _apart(self, training: Any, sync: bool) -> AbstractContextManager[Any]:
        return nullcontext() if sync or self.ranks == 1 else training.model.no_sync()

    def _meet(self) -> None:
        if self.ranks > 1:
            import torch.distributed as dist

            dist.barrier()
            hasten_gloo()


def time_rounds(rank: Rank, report: Report, folder: Path, rounds: int) -> None:
    """Build everything and measure the rounds that are left; collective over all ranks."""
    cores = len(available_cores())
    prepare_on_last_cores(rank)
    gc.disable()
    import torch.distributed as dist

    index, ranks = rank.index, rank.world_size
    hasten_main(ranks)
    if ranks > 1:
        join_group(rank)
    mine = _Rank(index, ranks)
    done = rounds_of(folder, ranks)
    for at in range(len(done.rows), rounds):
        before = usage()
        found = mine.round(at)
        found["own_s"] = usage().own_s - before.own_s
        every: list[Any] = [found]
        if ranks > 1:
            every = [None] * ranks
            dist.gather_object(found, every if index == 0 else None, dst=0)
        if index == 0:
            own_s = sum(of["own_s"] for of in every)
            others = other_cores(before, usage(), own_s)
            line: dict[str, Any] = {"round": at, "other_cores": others}
            if not is_disturbed(others, cores - ranks):
                line |= {key: _by_name(every, key) for key in DIGITS}
            done.append(line)
    if ranks > 1:
        dist.barrier()


def _by_name(every: list[dict[str, Any]], key: str) -> dict[str, list[list[float]]]:
    """Name -> numbers of every rank."""
    return {
        name: [[float(f"{ms:.{DIGITS[key]}g}") for ms in of[key][name]] for of in every]
        for name in every[0][key]
    }
