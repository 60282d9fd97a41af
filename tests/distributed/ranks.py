"""Starts a worker of this folder as the ranks of a job; how every worker begins and ends."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240
SHOWN = 3000
"""Characters of a rank's log that a failure shows."""


def run_ranks(
    worker: str, job: Path, *words: object, world_size: int = 2, local_world_size: int | None = None
) -> None:
    """Run the ``main`` of ``tests.distributed.WORKER`` as ``WORKER JOB WORDS`` on every rank until
    all end.

    What a rank says goes to ``JOB/log.RANK``, and is shown if one fails.
    """
    given = (worker, world_size, local_world_size or world_size, job, *words)
    module = "tests.distributed.ranks"
    path = filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
    one = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", module, *map(str, given)],
        cwd=REPOSITORY,
        env={**os.environ, **one, "PYTHONPATH": os.pathsep.join(path)},
        start_new_session=True,
    )
    try:
        code = started.wait(timeout=TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
    logs = "".join((job / f"log.{rank}").read_text()[-SHOWN:] for rank in range(world_size))
    assert code == 0, logs


def fork_ranks(worker: str, world_size: int, local: int, words: list[str]) -> int:
    """Ranks forked from here, once TorchRec is imported, which takes longest; 0 if none fails."""
    import torchrec  # noqa: F401

    pids = [_fork(worker, rank, world_size, local, words) for rank in range(world_size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return int(any(codes))


def _fork(worker: str, rank: int, world_size: int, local: int, words: list[str]) -> int:
    """The process id of a rank, which never returns from here."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(Path(words[0]) / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        places = {"RANK": rank, "WORLD_SIZE": world_size}
        places |= {"LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
        os.environ.update({name: str(value) for name, value in places.items()})
        sys.argv = [worker, *words]
        runpy.run_module(f"tests.distributed.{worker}", run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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


if __name__ == "__main__":
    asked, ranks, on_host, *rest = sys.argv[1:]
    raise SystemExit(fork_ranks(asked, int(ranks), int(on_host), rest))
