"""The program of a rank that runs a Python function, started by `shardopt.ranks.launch`.

Run as ``python -m shardopt.ranks.worker FOLDER INDEX PIPE``.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from shardopt.ranks.hosts import enter
from shardopt.ranks.rank import Rank, end_process, error_facts

JOB = "job.pickle"
"""File in the folder of a launch: the function to run, its arguments, the ranks and their hosts."""


def main(folder: Path, index: int, pipe: int) -> int:
    """Run the body of a rank; an error of it is left in the folder."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        # written by the process that started this one, into a folder that only its user can enter
        body, arguments, world_size, hosts = pickle.loads((folder / JOB).read_bytes())
        if hosts:
            enter(hosts[index])
        # on this machine even if it counts as several hosts: each rank has a core
        rank = Rank(index, world_size, index, world_size, f"file://{folder}/store")
        with Connection(pipe, readable=False) as reports:
            body(rank, reports.send, *arguments)
        return 0
    except Exception as error:
        (folder / f"error.{index}").write_text(json.dumps(error_facts(error)), encoding="utf-8")
        traceback.print_exc()
        return 1


def _end_with_parent() -> None:
    """The process that started this one keeps our standard input open as long as it lives."""
    with suppress(OSError):
        while os.read(0, 1):
            pass
    os._exit(1)


if __name__ == "__main__":
    end_process(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
