"""Which threads become real-time, where that is permitted; none really does here."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from shardopt.ranks import realtime
from shardopt.ranks.realtime import hasten_gloo, keep_freed_memory, may_be_realtime

pytestmark = pytest.mark.skipif(
    not hasattr(os, "SCHED_FIFO"), reason="this system has no real-time classes"
)


class Scheduler:
    """Stands for the system call; remembers who asked for what."""

    def __init__(self) -> None:
        self.refuses = False
        self.ended: set[int] = set()
        self.asked: list[int] = []
        self.changed: list[int] = []

    def __call__(self, thread: int, policy: int, param: os.sched_param) -> None:
        self.asked.append(thread)
        assert (policy, param.sched_priority) == (os.SCHED_FIFO, realtime.FIRST_IN_FIRST_OUT)
        if self.refuses:
            raise PermissionError(1, "Operation not permitted")
        if thread in self.ended:
            raise ProcessLookupError(3, "No such process")
        self.changed.append(thread)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    recorder = Scheduler()
    monkeypatch.setattr(os, "sched_setscheduler", recorder)
    return recorder


@pytest.fixture
def others() -> Iterator[set[int]]:
    """Three threads that wait, as gloo's do."""
    done = threading.Event()
    threads = [threading.Thread(target=done.wait, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    yield {thread.native_id for thread in threads if thread.native_id is not None}
    done.set()
    for thread in threads:
        thread.join()


def test_all_threads_but_the_main_one_are_changed_also_where_one_ends_meanwhile(
    scheduler: Scheduler, others: set[int]
) -> None:
    scheduler.ended = {min(others)}
    hasten_gloo()
    assert others <= set(scheduler.asked) <= {int(name) for name in os.listdir("/proc/self/task")}
    assert os.getpid() not in scheduler.asked
    assert others - scheduler.ended <= set(scheduler.changed)


@pytest.mark.parametrize("refuses", [False, True])
def test_permission_is_tried_on_a_thread_made_for_it(scheduler: Scheduler, refuses: bool) -> None:
    before = {int(name) for name in os.listdir("/proc/self/task")}
    scheduler.refuses = refuses
    assert may_be_realtime() is not refuses
    assert len(scheduler.asked) == 1
    assert not before & set(scheduler.asked)
    hasten_gloo()  # which a refusal does not keep from going on


def test_a_system_without_real_time_classes_is_left_alone(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "SCHED_FIFO")
    hasten_gloo()
    assert may_be_realtime() is False
    assert scheduler.asked == []


def test_freed_memory_is_kept_where_there_is_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[int, int] = {}
    libc = SimpleNamespace(mallopt=options.__setitem__)
    monkeypatch.setattr(realtime.ctypes, "CDLL", lambda name: libc)
    keep_freed_memory()
    # malloc.h: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, which glibc takes up to 32 MiB
    assert set(options) == {-1, -2, -3}
    assert options[-3] <= 32 * 2**20 < options[-1] < 2**31
    monkeypatch.setattr(realtime.ctypes, "CDLL", lambda name: SimpleNamespace())
    keep_freed_memory()  # a library without it
