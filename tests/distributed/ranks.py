"""Runs a function of a test on every rank of a gloo job, each in a process of its own."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
SHOWN = 3000
"""Characters of a rank's log that a failure shows."""


def on_ranks(
    function: Callable[..., Any], *given: Any, ranks: int = 2, on_host: int | None = None
) -> list[Any]:
    """What ``function(*given)`` returns on every rank.

    Args:
        function: of a module, from which the ranks import it; it and what it returns are pickled.
        on_host: ranks of one host, for `LOCAL_RANK`; all of them unless given.
    """
    path = filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
    with TemporaryDirectory(prefix="ranks-") as place:
        job = Path(place)
        (job / "call").write_bytes(pickle.dumps((function, given)))
        words = ("-W", "ignore", "-m", "tests.distributed.ranks", job, ranks, on_host or ranks)
        started = subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=REPOSITORY,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,
        )
        try:
            code = started.wait(timeout=TIMEOUT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()
        logs = (log.read_text(errors="replace")[-SHOWN:] for log in sorted(job.glob("log.*")))
        assert code == 0, "".join(logs)
        return [pickle.loads((job / f"found.{rank}").read_bytes()) for rank in range(ranks)]


def torchrun(ranks: int, *words: object) -> subprocess.CompletedProcess[str]:
    """Words of a program under torchrun, on ranks of this host."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    return subprocess.run(
        [sys.executable, *map(str, (*start, *words))],
        env={**kept, **ENVIRONMENT, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def fork_ranks(job: Path, ranks: int, on_host: int) -> int:
    """Ranks forked from here, once TorchRec is imported, which takes longest; 0 if none fails."""
    import torchrec  # noqa: F401

    call = pickle.loads((job / "call").read_bytes())
    pids = []
    for rank in range(ranks):
        pids.append(os.fork())
        if not pids[-1]:
            places = {"RANK": rank, "WORLD_SIZE": ranks}
            places |= {"LOCAL_RANK": rank % on_host, "LOCAL_WORLD_SIZE": on_host}
            os.environ.update({name: str(value) for name, value in places.items()})
            run_rank(job, rank, ranks, *call)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return int(any(codes))


def run_rank(job: Path, rank: int, ranks: int, function: Any, given: tuple[Any, ...]) -> NoReturn:
    """One rank, in a gloo group and with one thread, to the end of its process.

    It ends without Python's end: gloo's threads may abort a process while Python tears down
    ("terminate called without an active exception").
    """
    code = 1
    try:
        log = os.open(job / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = f"file://{job}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
        (job / f"found.{rank}").write_bytes(pickle.dumps(function(*given)))
        dist.barrier()
        time.sleep(0.3)  # a slower rank may still be in the barrier, which needs this one's sockets
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    raise SystemExit(fork_ranks(Path(sys.argv[1]), *map(int, sys.argv[2:])))
