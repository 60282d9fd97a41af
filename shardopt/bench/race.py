"""Which of several plans is the fastest, measured in rounds: successive elimination.

Every round times all plans that are left within seconds of each other, so that drift of the machine
is in all of them. A plan is out once the interval of its ratio to the leader, paired by round, lies
above 1 (Even-Dar, Mannor and Mansour 2006). The error that is allowed in all is shared among plans
and looks, so that looking often drops no good plan.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from shardopt.bench.summary import Ratio, ratio_of

ERROR = 0.05
"""How probable it may be that the fastest plan is dropped at all."""


class Race:
    """Plans with their times, round by round.

    Args:
        names: of the plans.
        looks: how often `eliminate` will be called at most.
    """

    def __init__(self, names: Sequence[str], looks: int) -> None:
        self.times: dict[str, list[float]] = {name: [] for name in names}
        self.confidence = 1 - ERROR / max(1, (len(names) - 1) * looks)
        self.dropped: dict[str, int] = {}
        """Plan that is out -> the rounds that it ran."""

    @property
    def left(self) -> list[str]:
        """Plans that are not out."""
        return [name for name in self.times if name not in self.dropped]

    @property
    def leader(self) -> str | None:
        """The fastest plan by its median; of those that are out only where no other was timed."""
        timed = [name for name in self.left if self.times[name]]
        timed = timed or [name for name, times in self.times.items() if times]
        return min(timed, key=lambda n: statistics.median(self.times[n]), default=None)

    def add(self, times: Mapping[str, float]) -> None:
        """A round: plan -> its time, of plans that are left."""
        for name, time in times.items():
            self.times[name].append(time)

    def drop(self, name: str) -> None:
        """Take a plan out."""
        self.dropped[name] = len(self.times[name])

    def ratio(self, name: str, to: str) -> Ratio | None:
        """One plan's time over another's, over the rounds that both ran; None without any."""
        return self._ratio(name, to, 1 - ERROR)

    def _ratio(self, name: str, to: str, confidence: float) -> Ratio | None:
        both = min(len(self.times[name]), len(self.times[to]))
        if not both:
            return None
        return ratio_of(self.times[name][:both], self.times[to][:both], confidence)

    def eliminate(self) -> list[str]:
        """Take out what is clearly slower than the leader, and say what that was."""
        leader = self.leader
        found = []
        for name in self.left:
            ratio = None if leader in (None, name) else self._ratio(name, leader, self.confidence)
            if ratio is not None and ratio.interval is not None and ratio.interval[0] > 1:
                found.append(name)
        for name in found:
            self.drop(name)
        return found
