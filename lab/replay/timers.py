"""Times each call of a benchmark's program inside its iterations."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from predictor.errors import ShardoptError

IDLE_CALLS = 1000
"""Of nothing, to find out what a timer takes itself."""


class CallTimers:
    """Times each call of a replay where it happens, in steps that are not timed otherwise.

    Args:
        replay: not yet tried; it is tried here.

    Raises:
        ShardoptError: calls of the program are not calls of ops one by one.
    """

    def __init__(self, replay: Any) -> None:
        op = importlib.import_module("runtime.ops").Op
        self.replay = replay
        names = replay.parts[0][0][1].__globals__
        own = [name for name, value in names.items() if isinstance(value, op)]
        replay.try_ops()
        self.names = names
        self.plain = {name: names[name] for name in own}
        self.ns: list[int] = []
        self.found: list[list[int]] = []
        self.timed = {name: self._time_call(function) for name, function in self.plain.items()}

    def _time_call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        keep, now = self.ns.append, time.perf_counter_ns

        def run(*arguments: Any, **keywords: Any) -> Any:
            start = now()
            result = function(*arguments, **keywords)
            keep(now() - start)
            return result

        return run

    def steps(self, count: int) -> None:
        """Run steps with timers, of which the first does not count."""
        self.names.update(self.timed)
        for at in range(count):
            self.ns.clear()
            self.replay.step()
            if at:
                self.found.append(list(self.ns))
        self.names.update(self.plain)

    def medians_us(self) -> list[float]:
        """Of each call of the program, without what a timer takes."""
        if any(len(step) != len(self.replay.ran) for step in self.found):
            raise ShardoptError("the program makes other calls than it lists; generate it again")
        idle = self._time_call(lambda *_, **__: None)
        self.ns.clear()
        for _ in range(IDLE_CALLS):
            idle(None, None)
        cost = statistics.median(self.ns)
        calls = zip(*self.found, strict=True)
        return [round(max(statistics.median(call) - cost, 0) / 1e3, 3) for call in calls]
