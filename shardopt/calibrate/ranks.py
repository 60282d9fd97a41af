"""The processes that measure: one a rank, started here, reporting every row over a pipe."""

from __future__ import annotations

import logging
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
from predictor.model.workload import Workload
from shardopt.calibrate.design.phases import TOGETHER
from shardopt.calibrate.design.points import Point, Size
from shardopt.calibrate.rows import Measured
from shardopt.ranks.hosts import Host, Link, enter, hosts_of
from shardopt.ranks.realtime import keep_freed_memory

QUIET_SECONDS = 600.0
"""Without a row for so long, the ranks have hung."""


class MeasurementError(ShardoptError):
    """A rank failed; what was measured before is in the rows file."""


@dataclass(frozen=True)
class Job:
    """What the ranks do.

    Args:
        points: of kernels for one rank alone, or of `TOGETHER` for several.
        cores: that ranks are pinned to, in turn.
        link: between the ranks, each of which is then a host of its own on this machine.
        model: whose lookups some of the points are.
    """

    points: Sequence[Point]
    size: Size
    ranks: int
    backend: str
    cores: tuple[int, ...]
    link: Link | None = None
    model: Workload | None = None


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
    with hosts_of(job.link) as hosts, tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        pipes, processes = [], []
        for rank in range(job.ranks):
            receive, send = context.Pipe(duplex=False)
            host = hosts[rank] if hosts else None
            given = (job, rank, meeting, send, host)
            process = context.Process(target=_rank, args=given, daemon=True)
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


def _rank(job: Job, rank: int, meeting: str, pipe: Connection, host: Host | None) -> None:
    """Body of one process."""
    try:
        if host is not None:
            enter(host)
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
    prepare(job.backend, job.cores, rank, job.ranks)
    from shardopt.calibrate.kernels.registry import measure_alone, measure_together

    device = device_of(job.backend, rank)
    if job.points and job.points[0].family not in TOGETHER:
        yield from measure_alone(job.points, device, job.size, job.model)
        return
    import torch.distributed as dist

    dist.init_process_group(
        job.backend, init_method=f"file://{meeting}", rank=rank, world_size=job.ranks
    )
    yield from (row for row in measure_together(job.points, device, job.size) if rank == 0)
    dist.barrier()


def prepare(backend: str, cores: tuple[int, ...], local: int, local_ranks: int) -> None:
    """Make this process one that measures: pinned, quiet, and keeping its memory.

    Args:
        cores: that ranks may use; one with a GPU has a share of them, else one core.
        local: its number among the ranks of this machine.
    """
    from shardopt.measure.sampling import settle

    gloo = backend == "gloo"
    settle(local, cores, None if gloo else local_ranks)
    if gloo:
        keep_freed_memory()
    # newer PyTorch deprecates names that TorchRec still calls, and both log what is no news
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def device_of(backend: str, local: int) -> Any:
    """The device of a rank, which is the current one from now on."""
    import torch

    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device
