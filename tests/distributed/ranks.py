"""Starts a worker of this folder as the ranks of a job; how every worker begins and ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240
SHOWN = 3000
"""Characters of a rank's log that a failure shows."""


def run_ranks(
    worker: str, job: Path, *words: object, world_size: int = 2, local_world_size: int | None = None
) -> None:
    """Run ``python -m tests.distributed.WORKER JOB WORDS`` on every rank until all end.

    What a rank says goes to ``JOB/log.RANK``, and is shown if one fails.
    """
    local = local_world_size or world_size
    module = f"tests.distributed.{worker}"
    command = [sys.executable, "-W", "ignore", "-m", module, str(job), *map(str, words)]
    ranks = []
    for rank in range(world_size):
        with (job / f"log.{rank}").open("w") as log:
            ranks.append(
                subprocess.Popen(
                    command,
                    cwd=REPOSITORY,
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(
                            [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
                        ),
                        "RANK": str(rank),
                        "WORLD_SIZE": str(world_size),
                        "LOCAL_RANK": str(rank % local),
                        "LOCAL_WORLD_SIZE": str(local),
                        "OMP_NUM_THREADS": "1",
                        "GLOO_SOCKET_IFNAME": "lo",
                    },
                    stdout=log,
                    stderr=log,
                )
            )
    try:
        codes = [process.wait(timeout=TIMEOUT_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    logs = "".join((job / f"log.{rank}").read_text()[-SHOWN:] for rank in range(world_size))
    assert codes == [0] * world_size, logs


def join_group(job: Path) -> int:
    """The rank of this worker, in a gloo group over ``JOB/store``; with one thread."""
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{job}/store", rank=rank, world_size=world_size
    )
    return rank


def leave_group() -> NoReturn:
    """Wait for all ranks and end the process, without Python's end.

    gloo's threads may abort a process while Python tears down ("terminate called without an active
    exception"); by now the results are on disk.
    """
    import torch.distributed as dist

    dist.barrier()
    time.sleep(0.3)  # a slower rank may still be in the barrier, which needs this one's sockets
    sys.stdout.flush()
    os._exit(0)
