"""Which threads become real-time, where that is may_be_realtime; none really does here."""

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

    def __init__(self, refuses: Exception | None = None) -> None:
        self.refuses = refuses
        self.ended: set[int] = set()
        self.asked: list[int] = []
        self.changed: list[int] = []
        self.classes: set[tuple[int, int]] = set()

    def __call__(self, thread: int, policy: int, param: os.sched_param) -> None:
        self.asked.append(thread)
        if self.refuses is not None:
            raise self.refuses
        if thread in self.ended:
            raise ProcessLookupError(3, "No such process")
        self.changed.append(thread)
        self.classes.add((policy, param.sched_priority))


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    made = Scheduler()
    monkeypatch.setattr(os, "sched_setscheduler", made)
    return made


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    made = Scheduler(PermissionError(1, "Operation not may_be_realtime"))
    monkeypatch.setattr(os, "sched_setscheduler", made)
    return made


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


def test_all_threads_but_the_main_one_are_changed(allowed: Scheduler, others: set[int]) -> None:
    hasten_gloo()
    assert len(others) == 3
    assert others <= set(allowed.asked)
    assert os.getpid() not in allowed.asked
    assert set(allowed.asked) <= {int(name) for name in os.listdir("/proc/self/task")}
    assert allowed.classes == {(os.SCHED_FIFO, realtime.FIRST_IN_FIRST_OUT)}


def test_a_thread_that_ends_meanwhile_keeps_no_other_back(
    allowed: Scheduler, others: set[int]
) -> None:
    allowed.ended = {min(others)}
    hasten_gloo()
    assert others - allowed.ended <= set(allowed.changed)


def test_without_permission_nothing_changes(refused: Scheduler, others: set[int]) -> None:
    before = {thread: os.sched_getscheduler(thread) for thread in others}
    hasten_gloo()
    assert refused.asked, "it was tried"
    assert os.getpid() not in refused.asked
    assert not refused.changed
    assert {thread: os.sched_getscheduler(thread) for thread in others} == before


def test_permission_is_tried_on_a_thread_made_for_it(allowed: Scheduler) -> None:
    before = {int(name) for name in os.listdir("/proc/self/task")}
    assert may_be_realtime() is True
    assert len(allowed.asked) == 1
    assert not before & set(allowed.asked)


def test_a_refusal_is_no_permission(refused: Scheduler) -> None:
    assert may_be_realtime() is False
    assert len(refused.asked) == 1


def test_systems_without_real_time_classes_are_left_alone(
    allowed: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "SCHED_FIFO")
    hasten_gloo()
    assert may_be_realtime() is False
    assert allowed.asked == []


def test_freed_memory_is_kept_where_there_is_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, int] = {}
    libc = SimpleNamespace(mallopt=told.__setitem__)
    monkeypatch.setattr(realtime.ctypes, "CDLL", lambda name: libc)
    keep_freed_memory()
    # malloc.h: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, which glibc takes up to 32 MiB
    assert set(told) == {-1, -2, -3}
    assert told[-3] <= 32 * 2**20 < told[-1] < 2**31


def test_other_systems_keep_their_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []

    def no_library(name: None) -> object:
        asked.append(name)
        raise OSError("no such library")

    for library in (no_library, lambda name: asked.append(name) or SimpleNamespace()):
        monkeypatch.setattr(realtime.ctypes, "CDLL", library)
        keep_freed_memory()
    assert asked == [None, None]
