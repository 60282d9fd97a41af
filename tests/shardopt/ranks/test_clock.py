"""The clock around steps: on the CPU, and on a stand-in for a GPU."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from shardopt.ranks.clock import steps_ms

torch = pytest.importorskip("torch")


def test_steps_on_a_cpu_are_timed_one_by_one() -> None:
    times = steps_ms(lambda: time.sleep(0.002), 3, SimpleNamespace(type="cpu"))
    assert len(times) == 3
    assert all(ms >= 2 for ms in times)


def test_steps_on_a_gpu_are_timed_by_events_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launching a step takes no time; the stream is 5 ms further after each."""
    stream = {"ms": 0.0, "waited": 0}

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = stream["ms"]

        def synchronize(self) -> None:
            stream["waited"] += 1

        def elapsed_time(self, end: Any) -> float:
            assert stream["waited"], "read before the stream got there"
            return float(end.at - self.at)

    def step() -> None:
        stream["ms"] += 5.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert steps_ms(step, 4, SimpleNamespace(type="cuda")) == [5.0] * 4
    assert stream["waited"] == 1  # a step waits for nothing
