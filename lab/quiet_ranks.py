"""Ranks that are disturbed as little as this machine allows."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any

from shardopt.ranks.rank import Rank, available_cores, prepare
from shardopt.ranks.realtime import hasten_thread

MOST_FAVOURED = -20
"""Nice value whose share no normal process can exceed."""


def prepare_on_last_cores(rank: Rank) -> Any:
    """As `prepare`, on cores counted from the last one, which takes fewer interrupts."""
    cores = available_cores()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores[(rank.local - rank.local_size) % len(cores)]})
    return prepare(rank)


def hasten_main(ranks: int) -> None:
    """Put the calling thread before other processes, where that is permitted.

    Real-time where it is the only rank. Where gloo's threads are real-time it must stay below
    them, so it only gets the largest share among normal ones; threads it starts later as well.
    """
    if ranks > 1:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, MOST_FAVOURED)
    elif hasattr(os, "SCHED_FIFO"):
        hasten_thread(threading.get_native_id())
