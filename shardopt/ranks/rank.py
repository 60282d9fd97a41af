"""One rank: which one it is, how its process is prepared, what it reports, and how it ends.

Processes are started by `shardopt.ranks.launch`, or by torchrun: see `rank_of_torchrun`.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from predictor.errors import InputError, ShardoptError
from shardopt.ranks.realtime import Runtime, keep_freed_memory

TEARDOWN_S = 0.3
"""gloo's threads may abort a process that exits right after its last collective."""

PATIENCE = timedelta(hours=1)
"""Time that ranks wait for the first, which searches in between."""

Report = Callable[[Any], None]
"""Sends something that can be pickled to the process that started the ranks."""


class RankDiedError(ShardoptError):
    """A rank failed, and with it the whole run.

    Args:
        rank: the one that failed first.
        signal: that ended its process; None if it exited.
        log: the last lines that it wrote.
    """

    def __init__(
        self,
        message: str,
        exit_code: int = 2,
        inputs: Iterable[str] = (),
        *,
        rank: int | None = None,
        signal: int | None = None,
        log: str = "",
    ) -> None:
        super().__init__(message, inputs)
        self.exit_code = exit_code
        self.rank = rank
        self.signal = signal
        self.log = log


@dataclass(frozen=True)
class Rank:
    """Which rank this process is.

    Args:
        index: among all ranks, from 0.
        local: among the ranks on this machine; chooses its core or GPU.
        local_size: ranks on this machine.
        init_method: how the process group is found, as torch takes it.
    """

    index: int
    world_size: int
    local: int
    local_size: int
    init_method: str = "env://"


def rank_of_torchrun(environment: Mapping[str, str] = os.environ) -> Rank | None:
    """The rank that torchrun started this process as; None without torchrun."""
    variables = [environment.get(name, "") for name in ("RANK", "WORLD_SIZE")]
    if not all(value.isdigit() for value in variables):
        return None
    index, world_size = map(int, variables)
    local = int(environment.get("LOCAL_RANK", index))
    local_size = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    return Rank(index, world_size, local, local_size)


def host_count(rank: Rank) -> int:
    """Hosts that torchrun's ranks lie on.

    Raises:
        InputError: they do not have equally many ranks.
    """
    if rank.world_size % rank.local_size:
        raise InputError(
            f"WORLD_SIZE {rank.world_size} is no multiple of LOCAL_WORLD_SIZE {rank.local_size}; "
            "give every host as many ranks"
        )
    return rank.world_size // rank.local_size


def available_cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def check_gpus(ranks: int, inputs: Iterable[str] = ("backend",)) -> None:
    """Refuse ranks of nccl for which this host has no GPUs.

    Raises:
        InputError: there are fewer.
    """
    import torch

    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible < ranks:
        raise InputError(
            f"nccl with {ranks} ranks on this host needs CUDA and as many GPUs, but torch "
            f"{torch.__version__} sees {visible}; choose fewer ranks, gloo to run on CPU cores, or "
            "join ranks of several hosts with torchrun",
            inputs,
        )


def prepare(rank: Rank, backend: str = "gloo", runtime: Runtime = Runtime.TUNED) -> Any:
    """Make this process one that measures: pinned, with one thread.

    Call it before anything imports torch, so that the threads that torch starts inherit the cores.

    Args:
        runtime: a tuned one collects no garbage, and on CPUs keeps freed memory.

    Returns:
        The torch device of the rank; a GPU is the current device from now on.
    """
    gloo = backend == "gloo"
    _pin(rank, gpu=not gloo)
    os.environ["OMP_NUM_THREADS"] = "1"
    if runtime is Runtime.TUNED:
        gc.disable()
        if gloo:
            keep_freed_memory()
    import torch

    torch.set_num_threads(1)
    if gloo:
        return torch.device("cpu")
    device = torch.device("cuda", rank.local)
    torch.cuda.set_device(device)
    return device


def _pin(rank: Rank, *, gpu: bool) -> None:
    """Pin a rank on CPUs to one core, and one with a GPU to an even share of the cores.

    NCCL's threads and the autograd thread run while the main one does.
    """
    cores = available_cores()
    own = {cores[rank.local % len(cores)]}
    if gpu and rank.local_size <= len(cores):
        own = set(cores[rank.local :: rank.local_size])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, own)


def join_group(rank: Rank, backend: str = "gloo") -> None:
    """Join the default process group of torch; collective over all ranks."""
    import torch.distributed as dist

    dist.init_process_group(
        backend, init_method=rank.init_method, rank=rank.index, world_size=rank.world_size
    )


class Talk:
    """Messages between ranks over a gloo group of their own, which waits without working, and
    as long as ``patience`` allows.

    Args:
        patience: that a rank waits for another.
    """

    def __init__(self, patience: timedelta = PATIENCE) -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, dist.new_group(backend="gloo", timeout=patience)

    def share(self, value: Any) -> Any:
        """Return the first rank's value on every rank."""
        box = [value]
        self._dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def follow(self, act: Callable[[Any], object]) -> None:
        """Call ``act`` with every value that the first rank shares, until it shares None."""
        while (value := self.share(None)) is not None:
            act(value)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value on every rank."""
        values: list[Any] = [None] * self._dist.get_world_size()
        self._dist.all_gather_object(values, value, group=self._group)
        return values

    def close(self) -> None:
        """Leave the group."""
        self._dist.destroy_process_group(self._group)


@contextmanager
def joined_ranks(
    rank: Rank, backend: str, runtime: Runtime, patience: timedelta = PATIENCE
) -> Iterator[tuple[Any, Talk]]:
    """Prepare this process and join the other ranks; yields the rank's device and `Talk`.

    All leave together, as gloo's threads may abort a process that ends before the others.
    """
    device = prepare(rank, backend, runtime)
    join_group(rank, backend)
    talk = Talk(patience)
    yield device, talk
    talk.gather(None)
    talk.close()


@contextmanager
def errors_of(rank: Rank) -> Iterator[None]:
    """Errors of a rank that torchrun started read like those of ranks that we start.

    Raises:
        RankDiedError: in place of any error that is not shardopt's.
    """
    try:
        yield
    except ShardoptError:
        raise
    except Exception as error:
        raise RankDiedError(death_line(rank.index, error_facts(error)), rank=rank.index) from error


def error_facts(error: Exception) -> dict[str, Any]:
    """Return the facts on an error, as JSON for the process that started this one."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    where = f"{'/'.join(Path(last.filename).parts[-2:])}:{last.lineno}" if last else ""
    return {
        "type": type(error).__name__,
        "message": str(error),
        "where": where,
        "exit_code": error.exit_code if isinstance(error, ShardoptError) else None,
        "inputs": error.inputs if isinstance(error, ShardoptError) else (),
        "at": time.time(),
    }


def death_line(rank: int, error: Mapping[str, Any]) -> str:
    """`error_facts` in a line."""
    lines = error["message"].strip().splitlines() or [""]
    return f"rank {rank} died of {error['type']} at {error['where']}: {lines[0]}"


def end_process(code: int = 0) -> NoReturn:
    """Exit without the orderly end, which gloo's threads may abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(TEARDOWN_S)
    os._exit(code)
