"""The two runtimes of ranks on CPUs: as a training script starts them, or so that times repeat.

Plain ranks have a core and one thread each, as ``torchrun`` with a binding to cores gives them, and
nothing else. Tuned ones also keep freed memory, collect no garbage, and have real-time threads:
gloo's come before everything else on their core, as NCCL's kernels do not wait for a host.

A kernel that does not preempt (PREEMPT_NONE, or the lazy model) lets a thread that wakes up on a
busy core wait for the scheduler's tick: 3 to 4 ms, against 0.3 ms for a small collective. A message
then takes either time, by chance. Threads of a real-time class run as soon as they are woken.

Why: docs/decisions/0021-cpu-ranks.md.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from enum import StrEnum


class Runtime(StrEnum):
    """Runtime of the ranks; times of one hold for that one alone."""

    PLAIN = "plain"
    TUNED = "tuned"


TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
"""Options of glibc's mallopt (malloc.h)."""
FIRST_IN_FIRST_OUT = 1
"""Lowest real-time priority; every normal thread gives way to it."""


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, as PyTorch's allocator keeps a GPU's memory.

    Left alone it gives large buffers back to the system and takes them again page by page, or does
    not, as other buffers happen to lie. Elsewhere than with glibc nothing changes.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        sizes = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 2**31 - 1, TOP_PAD: 64 << 20}
        for option, size in sizes.items():
            libc.mallopt(option, size)


def may_be_realtime() -> bool:
    """Tell if this process may have real-time threads: root, CAP_SYS_NICE, or an rtprio limit."""
    allowed: list[bool] = []
    thread = threading.Thread(
        target=lambda: allowed.append(hasten_thread(threading.get_native_id())), daemon=True
    )
    thread.start()
    thread.join()
    return allowed == [True]


def hasten_gloo() -> None:
    """Make every thread of this process but the main one real-time, where that is permitted.

    With one intra-op thread and the backward on the main one, all others are gloo's. Groups start
    theirs when they are made, so call this again after the last.
    """
    if not hasattr(os, "SCHED_FIFO"):
        return
    for name in os.listdir("/proc/self/task"):
        if int(name) != os.getpid():
            hasten_thread(int(name))


def hasten_thread(thread: int) -> bool:
    """Give a thread a real-time class; whether that is permitted."""
    try:
        os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(FIRST_IN_FIRST_OUT))
    except (OSError, AttributeError):
        return False
    return True
