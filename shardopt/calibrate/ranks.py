"""The processes that measure: one a rank, started here, reporting every row over a pipe."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from predictor.errors import ShardoptError
from shardopt.calibrate.design import Point, Size
from shardopt.calibrate.rows import Measured

QUIET_SECONDS = 600.0
"""Without a row for so long, the ranks have hung."""


class MeasurementError(ShardoptError):
    """A rank failed; what was measured before is in the rows file."""


@dataclass(frozen=True)
class Job:
    """What the ranks do.

    Args:
        points: of kernels for one rank alone, of collectives for several.
        cores: that ranks are pinned to, in turn.
    """

    points: Sequence[Point]
    size: Size
    ranks: int
    backend: str
    cores: tuple[int, ...]


def available_cores() -> tuple[int, ...]:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def run_ranks(job: Job, on_row: Callable[[Measured], None]) -> None:
    """Measure all points of a job; ``on_row`` gets each row as soon as it is there.

    Raises:
        MeasurementError: a rank failed or died, with its own error.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        pipes, processes = [], []
        for rank in range(job.ranks):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(job, rank, meeting, send), daemon=True)
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        try:
            _collect(pipes, processes, on_row)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(
    pipes: Sequence[Connection],
    processes: Sequence[BaseProcess],
    on_row: Callable[[Measured], None],
) -> None:
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    while open_pipes:
        ready = wait(list(open_pipes), timeout=QUIET_SECONDS)
        if not ready:
            raise MeasurementError(f"no rank reported anything for {QUIET_SECONDS:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes[pipe]
            try:
                kind, content = pipe.recv()
            except EOFError:
                processes[rank].join()
                code = processes[rank].exitcode
                raise MeasurementError(
                    f"rank {rank} died with exit code {code}; what was measured is kept, "
                    "run the same command again to continue"
                ) from None
            if kind == "row":
                on_row(content)
            elif kind == "done":
                del open_pipes[pipe]
            else:
                raise MeasurementError(f"rank {rank} failed:\n{content}")


def _rank(job: Job, rank: int, meeting: str, pipe: Connection) -> None:
    """Body of one process."""
    try:
        for row in _rows(job, rank, meeting):
            pipe.send(("row", row))
        pipe.send(("done", None))
    except KeyboardInterrupt:
        pass
    except Exception:
        with suppress(OSError):
            pipe.send(("error", traceback.format_exc()))
    # gloo's threads sometimes abort while they are torn down, long after all results are out
    time.sleep(0.2)
    os._exit(0)


def _rows(job: Job, rank: int, meeting: str) -> Iterator[Measured]:
    from shardopt.calibrate.sampling import Timer, settle

    settle(rank, job.cores)
    # newer PyTorch deprecates names that TorchRec still calls
    warnings.simplefilter("ignore")
    import torch

    device = "cuda" if job.backend == "nccl" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    if job.points and job.points[0].family != "collective":
        yield from _kernels(job, Timer(device))
        return
    import torch.distributed as dist

    from shardopt.calibrate.measure_collectives import measure_blocks

    dist.init_process_group(
        job.backend, init_method=f"file://{meeting}", rank=rank, world_size=job.ranks
    )
    rows = measure_blocks(job.points, Timer(device), job.size.rounds)
    yield from (row for _, row in rows if rank == 0)
    dist.barrier()


def _kernels(job: Job, timer: Any) -> Iterator[Measured]:
    from shardopt.calibrate.measure_dense import (
        measure_elementwise,
        measure_gemm,
        measure_host,
    )
    from shardopt.calibrate.measure_embedding import measure_lookup

    measures = {
        "lookup": measure_lookup,
        "reference": measure_lookup,
        "gemm": measure_gemm,
        "elementwise": measure_elementwise,
        "host": measure_host,
    }
    short = {"lookup": 1.0, "reference": 3.0}
    # the first lookups of a process take twice as long as all later ones: none of them counts
    measure_lookup(Point("reference", {"at": "nowhere"}), timer, job.size.seconds)
    for point in job.points:
        # small kernels need less than a lookup, whose every sample is long
        seconds = job.size.seconds * short.get(point.family, 0.25)
        yield from measures[point.family](point, timer, seconds)
