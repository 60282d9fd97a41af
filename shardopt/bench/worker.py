"""One rank of a bench run: builds every plan in one process group and times them in turns.

Run as ``python -m shardopt.bench.worker FOLDER RANK`` by `shardopt.ranks.launch`, or called by a
process that torchrun started.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from predictor.errors import ShardoptError
from shardopt.bench.job import Job
from shardopt.measure.load import other_cores, usage
from shardopt.measure.warmup import MAX_ROUNDS, MIN_BLOCK, warmed_up
from shardopt.ranks.hosts import Host, enter
from shardopt.ranks.realtime import hasten_gloo, keep_freed_memory

Tell = Callable[[dict[str, Any]], None]

TEARDOWN_S = 0.3
"""gloo's threads may abort a process that ends right after its last collective."""


@dataclass(frozen=True)
class Place:
    """Which rank this process is.

    Args:
        local: its number on this machine, which chooses core or GPU.
        local_size: ranks on this machine.
        init_method: how the process group is found, as torch takes it.
        host: to enter first; None stays where the process is.
    """

    rank: int
    local: int
    local_size: int
    init_method: str = "env://"
    host: Host | None = None


def run_rank(job: Job, place: Place, tell: Tell) -> None:
    """Build, warm up and measure; collective over all ranks.

    Args:
        tell: called on rank 0 alone with what a rows file keeps: `kind` is ready, warmup (`ms`,
            `rounds`, `settled`) or round.
    """
    if place.host is not None:
        enter(place.host)
    _pin(job, place)
    if job.backend == "gloo":
        keep_freed_memory()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cpu")
    if job.backend == "nccl":
        device = torch.device("cuda", place.local)
        torch.cuda.set_device(device)
    dist.init_process_group(
        job.backend,
        init_method=place.init_method,
        rank=place.rank,
        world_size=job.world_size,
    )
    gc.disable()
    _Rank(job, place, device, tell if place.rank == 0 else _nobody).run()
    dist.barrier()


def _nobody(_: dict[str, Any]) -> None:
    pass


def _pin(job: Job, place: Place) -> None:
    """Before torch starts any thread, so that gloo's inherit it.

    A rank on CPU has a core; one with a GPU shares the cores evenly, as NCCL and the autograd
    thread run beside the main one.
    """
    cores = sorted(os.sched_getaffinity(0))
    own = {cores[place.local % len(cores)]}
    if job.backend == "nccl" and place.local_size <= len(cores):
        own = set(cores[place.local :: place.local_size])
    os.sched_setaffinity(0, own)


class _Rank:
    """What a rank holds while it measures."""

    def __init__(self, job: Job, place: Place, device: Any, tell: Tell) -> None:
        from shardopt.measure.reference import Reference
        from shardopt.torchrec.training.batch import batch_ring
        from shardopt.torchrec.training.loop import Training
        from shardopt.torchrec.training.optimizers import set_matmul_precision

        self.job, self.rank, self.device, self.tell = job, place.rank, device, tell
        self.local_size = place.local_size
        set_matmul_precision(job.workload)
        ring = batch_ring(job.workload, seed=job.seed, rank=place.rank)
        if device.type == "cuda":
            ring = [batch.pin_memory() for batch in ring]
        self.trainings = {
            name: Training(job.workload, plan, device, ring) for name, plan in job.plans.items()
        }
        self.reference = Reference(device, place.rank)
        gc.collect()
        gc.freeze()

    def run(self) -> None:
        """Warm-up, then every round that is left."""
        # under torchrun only the first rank has seen the rows file
        first = _agreed(self.job.first_round)
        self.tell({"kind": "ready"})
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
            # all ranks must stop together, so one decides
            settled = _agreed(job.warmup is None and warmed_up(blocks))
        self.tell(
            {
                "kind": "warmup",
                "rounds": rounds,
                "settled": settled if job.warmup is None else None,
                "ms": blocks,
            }
        )

    def _round(self, index: int) -> None:
        import torch.distributed as dist

        gc.collect()
        at, load = datetime.now(UTC).isoformat(timespec="seconds"), os.getloadavg()[0]
        order = self._order(f"round {index}")
        before = usage()
        blocks = {name: self._block(name, self.job.block) for name in order}
        mine = (blocks, self.reference.measure(), usage().own_s - before.own_s)
        ranks: list[Any] = [None] * self.job.world_size
        dist.gather_object(mine, ranks if self.rank == 0 else None, dst=0)
        if self.rank:
            return
        own_s = sum(of[2] for of in ranks[: self.local_size])
        self.tell(
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

    def _order(self, what: str) -> list[str]:
        """The same on every rank, and in a run that is taken up again."""
        names = list(self.trainings)
        random.Random(f"{self.job.seed} {what}").shuffle(names)
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
        if self.device.type == "cpu":
            hasten_gloo()
        marks = [self._mark()]
        for _ in range(1 + count):
            training.step()
            marks.append(self._mark())
        if self.device.type == "cuda":
            marks[-1].synchronize()
            spans = [a.elapsed_time(b) for a, b in pairwise(marks)]
        else:
            spans = [(b - a) / 1e6 for a, b in pairwise(marks)]
        return spans[0], spans[1:]

    def _mark(self) -> Any:
        """Now: on the clock, or in the GPU's stream."""
        if self.device.type != "cuda":
            return time.perf_counter_ns()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _agreed(value: Any) -> Any:
    """What rank 0 thinks."""
    import torch.distributed as dist

    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def main(folder: Path, rank: int, pipe: int | None) -> int:
    """A rank that `shardopt.ranks.launch` has started; what goes wrong is left in the folder."""
    try:
        # written by the parent process, into a folder that only its user can enter
        job: Job
        hosts: list[Host]
        job, hosts = pickle.loads((folder / "job.pickle").read_bytes())
        # a core each, also where ranks are hosts of their own
        host = hosts[rank] if hosts else None
        place = Place(rank, rank, job.world_size, f"file://{folder}/store", host)
        if pipe is None:
            run_rank(job, place, _nobody)
            return 0
        with open(pipe, "w", encoding="utf-8") as stream:
            run_rank(job, place, lambda told: print(json.dumps(told), file=stream, flush=True))
        return 0
    except Exception as error:
        (folder / f"error.{rank}").write_text(json.dumps(described(error)), encoding="utf-8")
        traceback.print_exc()
        return 1


def described(error: Exception) -> dict[str, Any]:
    """What another process has to know of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    where = f"{'/'.join(Path(last.filename).parts[-2:])}:{last.lineno}" if last else ""
    own = isinstance(error, ShardoptError)
    return {
        "type": type(error).__name__,
        "message": str(error),
        "where": where,
        "exit_code": error.exit_code if isinstance(error, ShardoptError) else None,
        "own": own,
        "at": time.time(),
    }


if __name__ == "__main__":
    words = sys.argv[1:]
    code = main(Path(words[0]), int(words[1]), int(words[2]) if words[2:] else None)
    time.sleep(TEARDOWN_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
