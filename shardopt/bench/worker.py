"""One rank of a bench run: builds every plan in one process group, and times one after another.

Why: docs/decisions/0023-measuring-plans.md.
"""

from __future__ import annotations

import gc
import math
import os
import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from shardopt.bench.job import Job
from shardopt.measure.machine import other_cores, usage
from shardopt.ranks.clock import steps_ms
from shardopt.ranks.rank import Rank, Report, Talk, joined_ranks
from shardopt.ranks.realtime import Runtime, hasten_gloo

MIN_BLOCK = 6
"""Samples a block: with fewer no difference between two blocks could be significant."""
MAX_ROUNDS = 12
"""Rounds of warm-up after which measuring starts even if times have not settled."""
SIGNIFICANCE = 0.01


def run_rank(rank: Rank, report: Report, job: Job) -> None:
    """Build, warm up and measure; collective over all ranks.

    Args:
        report: called on rank 0 alone with what a rows file keeps: `kind` is warmup (`ms`,
            `rounds`, `settled`) or round; or with signs of life: ready, warming, and plan.
    """
    with joined_ranks(rank, job.backend, job.runtime) as (device, talk):
        heard = report if rank.index == 0 else lambda message: None
        _Rank(job, rank, device, talk, heard).run()


class _Rank:
    """State of a rank that measures."""

    def __init__(self, job: Job, rank: Rank, device: Any, talk: Talk, report: Report) -> None:
        from shardopt.measure.reference import Reference
        from shardopt.training.batch import batch_ring
        from shardopt.training.loop import Training, set_matmul_precision
        from shardopt.training.model import build_model

        self.job, self.rank, self.device, self.report = job, rank.index, device, report
        self.local_size, self.talk = rank.local_size, talk
        set_matmul_precision(job.workload)
        rings: dict[int, Any] = {}
        self.trainings: dict[str, Training] = {}
        for name, plan in job.plans.items():
            self.report({"kind": "plan"})
            data = job.data.get(name, job.workload)
            if id(data) not in rings:
                pin = device.type == "cuda"
                rings[id(data)] = batch_ring(data, seed=job.seed, rank=rank.index, pin=pin)
            ring = rings[id(data)]
            # the same plan on other data is built once
            built = next(
                (t for other, t in self.trainings.items() if job.plans[other] == plan), None
            )
            self.trainings[name] = (
                Training(job.workload, plan, device, ring, job.build or build_model)
                if built is None
                else built.on(ring)
            )
        self.reference = Reference(device, rank.index)
        gc.collect()
        if job.runtime is Runtime.TUNED:
            gc.freeze()

    def run(self) -> None:
        """Warm-up, then every round that is left."""
        # under torchrun only the first rank has seen the rows file
        first = self.talk.share(self.job.first_round)
        self.report({"kind": "ready"})
        self._warm_up()
        for index in range(first, self.job.rounds):
            self._round(index)

    def _warm_up(self) -> None:
        job = self.job
        blocks: dict[str, list[list[float]]] = {name: [] for name in self.trainings}
        limit = MAX_ROUNDS if job.warmup is None else job.warmup
        settled = False
        rounds = 0
        while rounds < limit and not settled:
            for name in self._order(f"warm-up {rounds}"):
                blocks[name].append(self._block(name, max(job.block, MIN_BLOCK))[1])
            self.reference.measure()
            rounds += 1
            self.report({"kind": "warming"})
            # all ranks must stop together, so one decides
            settled = self.talk.share(job.warmup is None and is_warm(blocks))
        self.report(
            {
                "kind": "warmup",
                "rounds": rounds,
                "settled": settled if job.warmup is None else None,
                "ms": blocks,
            }
        )

    def _round(self, index: int) -> None:
        gc.collect()
        at, load = datetime.now(UTC).isoformat(timespec="seconds"), os.getloadavg()[0]
        order = self._order(f"round {index}")
        before = usage()
        blocks = {name: self._block(name, self.job.block) for name in order}
        mine = (blocks, self.reference.measure(), usage().own_s - before.own_s)
        ranks = self.talk.gather(mine)
        own_s = sum(measured[2] for measured in ranks[: self.local_size])
        self.report(
            {
                "kind": "round",
                "round": index,
                "at": at,
                "load": load,
                "other_cores": other_cores(before, usage(), own_s),
                "order": order,
                "lead_ms": {name: [r[0][name][0] for r in ranks] for name in self.trainings},
                "ranks_ms": {name: [r[0][name][1] for r in ranks] for name in self.trainings},
                "reference_ms": {kernel: [r[1][kernel] for r in ranks] for kernel in mine[1]},
            }
        )

    def _order(self, purpose: str) -> list[str]:
        """Shuffle the plans, alike on every rank and in a run that continues another."""
        names = list(self.trainings)
        random.Random(f"{self.job.seed} {purpose}").shuffle(names)
        return names

    def _block(self, name: str, count: int) -> tuple[float, list[float]]:
        """Milliseconds of the lead-in and of `count` iterations, without a barrier in between.

        The lead-in is apart: it starts on ranks that the barrier has lined up, and on caches full
        of another plan's tables, and the iteration after it is the first to wait for the one
        before, as all do in training.
        """
        import torch.distributed as dist

        training = self.trainings[name]
        dist.barrier()
        if self.device.type == "cpu" and self.job.runtime is Runtime.TUNED:
            hasten_gloo()
        self.report({"kind": "plan"})
        spans = steps_ms(training.step, 1 + count, self.device)
        return spans[0], spans[1:]


def is_warm(blocks: Mapping[str, Sequence[Sequence[float]]]) -> bool:
    """Tell if no plan became significantly faster from its last but one block to its last.

    Args:
        blocks: milliseconds of every warm-up iteration, block by block, for each plan.
    """
    return all(
        len(b) > 1 and fall_probability(b[-2], b[-1]) >= SIGNIFICANCE for b in blocks.values()
    )


def fall_probability(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the probability of so clear a fall where both are drawn alike (Mann and Whitney
    1947, one-sided); ties count half."""
    m, n = len(before), len(after)
    u = sum((b > a) + 0.5 * (b == a) for b in before for a in after)
    return sum(_ways(m, n)[math.ceil(u) :]) / math.comb(m + n, n)


def _ways(m: int, n: int) -> list[int]:
    """Number of orders of m and n samples in which U is 0, 1, ..., m * n.

    The coefficients of the Gaussian binomial, the product over i from 1 to m of
    (1 - q^(n + i)) / (1 - q^i).
    """
    ways = [1] + [0] * (m * n)
    for i in range(1, m + 1):
        for u in range(m * n, n + i - 1, -1):
            ways[u] -= ways[u - n - i]
        for u in range(i, m * n + 1):
            ways[u] += ways[u - i]
    return ways
