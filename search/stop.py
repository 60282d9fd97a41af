"""Stopping rule of a search: a deterministic amount of work, a gap, or a time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from predictor.errors import InputError

MOST_EFFORT = 1e6
"""A year of search."""
MOST_SECONDS = 1e9
"""Thirty years; what counts in milliseconds or in 32 bits of seconds still holds it."""

Late = Callable[..., bool]
"""Function that tells if the time of a stage is up, whatever it is given."""

LATE, LATE_S = 1.05, 1.0
"""Share of the ceiling, and seconds more, after which a search without any plan gives up."""

CLOSED = 1e-6
"""A gap of this share is none: solvers and sums of floating-point times differ by as much."""

INTERRUPTED = "interrupted"


@dataclass
class Stop:
    """Stopping rule of one search.

    Args:
        effort: multiple of the default work budget, > 0. The same seed and effort give the same
            plan on any machine unless the time limit cut the search short.
        time_limit_s: ceiling on wall time in seconds, > 0; None for no ceiling.
        gap: end as soon as the gap is at most this fraction, >= 0; one of `CLOSED` always ends it.
        interruptible: the first Ctrl-C ends the search with the best plan found so far, if there
            is one; otherwise, and at the second, it raises as everywhere.
        reserve: share of the ceiling, in [0, 1), that is left to what follows the search.
        clock: seconds that only grow.
        started: what the clock showed when the ceiling began to count; now if None.
    """

    effort: float = 1.0
    time_limit_s: float | None = None
    gap: float = 0.0
    interruptible: bool = False
    reserve: float = 0.0
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    started: float | None = field(default=None, repr=False)
    reason: str = "work"

    def __post_init__(self) -> None:
        self._start = self.clock() if self.started is None else self.started
        self._cut_short = False
        if not 0 < self.effort <= MOST_EFFORT:
            raise InputError(
                f"effort is {self.effort:g}; it must be above 0 and at most {MOST_EFFORT:g} "
                "(1 is the default)",
                inputs=("effort",),
            )
        if self.time_limit_s is not None and not 0 < self.time_limit_s <= MOST_SECONDS:
            raise InputError(
                f"time_limit is {self.time_limit_s:g}; give seconds, above 0 and at most "
                f"{MOST_SECONDS:g}",
                inputs=("time_limit",),
            )
        if not self.gap >= 0:
            raise InputError(f"gap is {self.gap}; it must be a fraction of at least 0")

    def interrupt(self) -> None:
        """Ctrl-C came: the search ends and remembers why.

        Raises:
            KeyboardInterrupt: it was not to be kept from anybody, or came before.
        """
        if not self.interruptible or self.is_interrupted:
            raise KeyboardInterrupt
        self.reason = INTERRUPTED

    @property
    def is_interrupted(self) -> bool:
        """Ctrl-C ended the search."""
        return self.reason == INTERRUPTED

    def resume(self) -> None:
        """Another search follows: a gap that one has closed does not end it."""
        if self.reason == "gap":
            self.reason = "work"

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return self.clock() - self._start

    @property
    def remaining_s(self) -> float:
        """Seconds left under the ceiling, infinite without one."""
        if self.is_interrupted:
            return 0.0
        if self.time_limit_s is None:
            return math.inf
        return max(0.0, self.time_limit_s * (1 - self.reserve) - self.elapsed_s)

    @property
    def left_s(self) -> float:
        """Seconds left under the ceiling for what follows the search, infinite without one."""
        return math.inf if self.time_limit_s is None else self.time_limit_s - self.elapsed_s

    def part(self, share: float) -> Late:
        """Return a test that is true once a share of the time left now is spent; never without a
        time limit. Later steps have the rest."""
        end = self.elapsed_s + share * self.remaining_s

        def late(*_: object) -> bool:
            over = self.elapsed_s >= end
            self._cut_short = self._cut_short or over
            return over or self.is_interrupted

        return late

    def stopped_by(self, best_ms: float, bound_ms: float) -> str:
        """``interrupted``; ``time`` where the clock cut any stage short, so that the result depends
        on the machine; ``gap`` where that is closed; else ``work``."""
        if self.is_interrupted:
            return INTERRUPTED
        if self._cut_short or self.reason == "time" or self.remaining_s <= 0:
            return "time"
        return "gap" if self._is_closed(best_ms, bound_ms) else self.reason

    def _is_closed(self, best_ms: float, bound_ms: float) -> bool:
        return best_ms - bound_ms <= max(self.gap, CLOSED) * bound_ms

    def check_start(self) -> None:
        """To be called while no plan is known yet.

        Raises:
            InputError: the ceiling is well past, so that there will be no plan in time.
        """
        if self.time_limit_s is None or self.elapsed_s <= LATE * self.time_limit_s + LATE_S:
            return
        raise InputError(
            f"time_limit is {self.time_limit_s:g} s, which passed before a first plan was found; "
            "give it more time, or plan for fewer ranks",
            inputs=("time_limit", "gpus"),
        )

    def reached(self, best_ms: float | None = None, bound_ms: float | None = None) -> bool:
        """Return True if the search must end, and record why. ``time`` stays the reason once it is
        up: the result then depends on the machine."""
        if self.reason == "time" or self.is_interrupted:
            return True
        if best_ms is not None and bound_ms is not None and self._is_closed(best_ms, bound_ms):
            self.reason = "gap"
            return True
        if self.remaining_s <= 0:
            self.reason = "time"
            return True
        return False
