"""Runs a function of a test on every rank of a gloo job, each in a process of its own.

Importing TorchRec takes longest, so one process of the test session imports it, and the ranks of
all jobs are forked from there.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
SHOWN = 3000
"""Characters of a rank's log that a failure shows."""


def on_ranks(
    function: Callable[..., Any], *given: Any, ranks: int = 2, on_host: int | None = None
) -> list[Any]:
    """Return what ``function(*given)`` returns on every rank.

    Args:
        function: of a module, from which the ranks import it; it and what it returns are pickled.
        on_host: ranks of one host, for `LOCAL_RANK`; all of them unless given.
    """
    with TemporaryDirectory(prefix="ranks-") as place:
        job = Path(place)
        call = dict(os.environ), function, given
        (job / "call").write_bytes(pickle.dumps(call))
        try:
            failed = Server.get().run(job, ranks, on_host or ranks)
        except BaseException as error:  # of pytest-timeout, while it waits
            Server.end()
            hung = [rank for rank in range(ranks) if not (job / f"found.{rank}").exists()]
            error.add_note(f"ranks {hung} of {ranks} have not ended\n{_logs(job)}")
            raise
        assert failed == "0", f"{failed or 'all'} ranks failed\n{_logs(job)}"
        return [pickle.loads((job / f"found.{rank}").read_bytes()) for rank in range(ranks)]


def _logs(job: Path) -> str:
    """End of what each rank printed."""
    logs = sorted(job.glob("log.*"))
    return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-SHOWN:]}" for log in logs)


class Server:
    """The process that ranks are forked from, started when a job needs it first."""

    running: Server | None = None

    def __init__(self) -> None:
        self.interpreter = self.options()
        path = filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.distributed.ranks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=REPOSITORY,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,
        )

    @staticmethod
    def options() -> dict[str, str]:
        """Return the variables that Python reads when it starts."""
        return {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}

    @classmethod
    def get(cls) -> Server:
        """Return the running server, or a new one where Python is to start otherwise."""
        if cls.running is not None and cls.running.interpreter != cls.options():
            cls.end()
        if cls.running is None:
            cls.running = cls()
        return cls.running

    @classmethod
    def end(cls) -> None:
        """Kill the server and its ranks."""
        if cls.running is not None:
            with suppress(ProcessLookupError):
                os.killpg(cls.running.process.pid, signal.SIGKILL)
            cls.running.process.communicate()
            cls.running = None

    def run(self, job: Path, ranks: int, on_host: int) -> str:
        """Run a job to its end, and return how many ranks failed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{job} {ranks} {on_host}\n")
        failed = self.process.stdout.readline().strip()
        if not failed:
            self.end()
        return failed


atexit.register(Server.end)


def torchrun(ranks: int, *words: object) -> subprocess.CompletedProcess[str]:
    """Run words of a program under torchrun, on ranks of this host."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    }
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    return subprocess.run(
        [sys.executable, *map(str, (*start, *words))],
        env={**environment, **ENVIRONMENT, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )


def serve() -> None:
    """Fork the ranks of one job after the other; a line of input is a job."""
    import torchrec  # noqa: F401

    # what jobs print is no answer
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        place, ranks, on_host = line.rsplit(maxsplit=2)
        answers.write(f"{fork_ranks(Path(place), int(ranks), int(on_host))}\n")


def fork_ranks(job: Path, ranks: int, on_host: int) -> int:
    """Fork the ranks of a job, and return how many failed."""
    environment, *call = pickle.loads((job / "call").read_bytes())
    pids = []
    for rank in range(ranks):
        pids.append(os.fork())
        if not pids[-1]:
            places = {"RANK": rank, "WORLD_SIZE": ranks}
            places |= {"LOCAL_RANK": rank % on_host, "LOCAL_WORLD_SIZE": on_host}
            os.environ.clear()
            os.environ.update(environment | ENVIRONMENT)
            os.environ.update({name: str(value) for name, value in places.items()})
            run_rank(job, rank, ranks, *call)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return sum(map(bool, codes))


def run_rank(
    job: Path, rank: int, ranks: int, function: Any, arguments: tuple[Any, ...]
) -> NoReturn:
    """Run one rank, in a gloo group and with one thread, to the end of its process.

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
        store = dist.FileStore(f"{job}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        (job / f"found.{rank}").write_bytes(pickle.dumps(function(*arguments)))
        dist.barrier()
        # a rank that left the barrier early would close sockets that slower ones need
        store.set(f"ended.{rank}", "")
        store.wait([f"ended.{peer}" for peer in range(ranks)])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
