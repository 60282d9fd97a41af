"""The rank that the others wait for is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardopt.ranks.hung import hung_words

SLEEP = "import time; print(flush=True); time.sleep(600)"
SPIN = "print(flush=True)\nwhile True: pass"


@contextmanager
def started(*programs: str) -> Iterator[list[int]]:
    made = [subprocess.Popen([sys.executable, "-c", p], stdout=subprocess.PIPE) for p in programs]
    try:
        for process in made:
            assert process.stdout is not None
            process.stdout.readline()
        yield [process.pid for process in made]
    finally:
        for process in made:
            process.kill()
            process.communicate()


def test_a_stopped_rank_is_named() -> None:
    with started(SLEEP, SLEEP) as pids:
        os.kill(pids[1], signal.SIGSTOP)
        ends = time.monotonic() + 60
        while "rank 1" not in (words := hung_words(pids, 5)) and time.monotonic() < ends:
            time.sleep(0.05)
    assert words == "no rank reported anything for 5 s; rank 1 is stopped by a signal"


def test_a_rank_that_computes_while_the_others_wait_is_named() -> None:
    with started(SPIN, SLEEP) as pids:
        words = hung_words(pids, 0.5)
    assert words == "no rank reported anything for 0.5 s; rank 0 computes without an end"


def test_ranks_that_all_wait() -> None:
    with started(SLEEP, SLEEP) as pids:
        time.sleep(0.5)  # they have said that they began and fall asleep at once
        assert hung_words(pids, 5).endswith("; every rank waits for another")
