"""One rank that times training steps of transformers, round by round, and ops inside some steps.

Rank 0 appends a line of JSON a round to the folder.
"""

from __future__ import annotations

import gc
import random
import time
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab.quiet_ranks import hasten_main, prepare_on_last_cores
from lab.transformers.design import calibrations, targets
from lab.transformers.files import is_disturbed, rounds_of
from shardopt.measure.machine import other_cores, usage
from shardopt.ranks.rank import Rank, Report, available_cores, join_group
from shardopt.ranks.realtime import hasten_gloo

STEPS = 2
"""Of a block that count; the one before them finds caches full of another model."""
DIGITS = {"steps": 4, "alone": 4, "captured": 3}
"""Significant digits that are kept."""


class _Rank:
    """All models of a rank, each with its optimizer."""

    def __init__(self, rank: int, ranks: int) -> None:
        from torch.nn.parallel import DistributedDataParallel

        from lab.replay.transformers import Training
        from lab.transformers.ops import record_step, row_index

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
        from shardopt.torchrec.capture.recorder import OpClock

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
