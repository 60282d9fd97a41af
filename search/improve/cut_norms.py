"""The cuts of a plan with norms over the ranks in place of maxima, and what a change adds to them.

A maximum over the ranks says nothing of a change that leaves the slowest rank as it is, and targets
for every maximum (`search.improve.packing`) allow no segment to become longer where others become
shorter by more. The norm of a high power over the ranks does both. Near a plan it changes as the
sum over ranks of these powers does, weighed by its slope, so that a change costs no more to score
than with targets.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from search.improve.cut_plan import Changes, CutPlan, Ints
from search.improve.shard_moves import Array

SQUARES = 5
"""Of the loads: the 32nd power, whose root is the norm."""
SMOOTHED = 30
"""Steps of a round that lower norms."""
MOST_FAILED = 30
"""Ranks of which nothing lowers a norm, after which that ends."""
STALLED_GAIN = 1e-4
"""Relative gain of as many steps as `STALLED` below which it does too."""
GAIN = 1e-6
"""Relative gain below which a change does not count."""
RELIEVED = 3
"""Ranks that are relieved in one step."""
STALLED = 8
"""Steps that must gain something, or a descent ends."""
TELLING = 3
"""Columns that are looked at before all are."""
NEAR_MS = 0.01
"""Cuts that are shorter than the longest by more than a few times this hardly count."""


class CutNorms(CutPlan):
    """A plan whose excess is over targets, or where `aim` was called, in norms."""

    squares = 0
    """The power of the norms is 2 to this; 0 for targets."""
    steps = 0
    """That were made."""

    def find_improvements(self, slowest: Ints, below: float) -> list[Changes]:
        """Changes of what lies on these ranks that cost less; best first, no two touch one rank."""
        raise NotImplementedError

    def smooth(self, budget: int, stop: Callable[[], bool]) -> None:
        """Lower the largest cut with norms in place of maxima."""
        self.squares, failed, then = SQUARES, 0, np.inf
        # what a plan has next to nothing of may overflow, and is then infinitely long
        with np.errstate(over="ignore", invalid="ignore"):
            for self.steps in range(1, budget + 1):
                if failed >= MOST_FAILED or stop():
                    break
                now = self.aim()
                if self.steps % STALLED == 1:
                    if now > then * (1 - STALLED_GAIN):
                        break
                    then = now
                failed = 0 if self._lower(now, failed) else failed + RELIEVED
        self.squares = 0

    def _lower(self, now: float, skipped: int) -> bool:
        """Change what lies on the ranks that the norms count most; whether they fell."""
        counted = self.excess(self.now.loads)
        busy = np.argsort(-counted, kind="stable")[skipped : skipped + RELIEVED]
        before = float(self.add_even(counted.sum(), self.even_ms))
        found = self.find_improvements(busy, before - GAIN * now)
        kept = self.keep()
        for some in (found, found[:1]):
            if some:
                self.apply(some)
                if self.aim() < now * (1 - GAIN):
                    return True
                self.go_back(kept)
                self.aim()
        return False

    def aim(self) -> float:
        """The largest cut in ms with norms in place of maxima; from here on changes are weighed by
        what they add to it."""
        power = float(2**self.squares)
        sums = np.maximum(self._powers(self.now.loads).sum(axis=0), 1e-300)
        norms = sums ** (1 / power) * self.scale
        cuts = self.member @ norms + self.constants + self.even_ms
        longest = float(cuts.max())
        shares = np.exp((cuts - longest) / NEAR_MS)
        self.shares = shares / shares.sum()
        self.weights = self.shares @ self.member * norms / (power * sums)
        return longest + NEAR_MS * float(np.log(shares.sum()))

    def _powers(self, loads: Array) -> Array:
        """Products are an order of magnitude faster than a power."""
        loads = loads * loads
        for _ in range(self.squares - 1):
            loads *= loads
        return loads

    def excess(self, loads: Array) -> Array:
        """As of `CutPlan`; with norms the weighed powers, in ms."""
        if not self.squares:
            return super().excess(loads)
        return np.asarray(self._powers(loads) @ self.weights)

    def telling(self) -> list[int]:
        """Columns that rule most changes out: that exceed their targets now; with norms those in
        which some rank counts most."""
        if not self.squares:
            return list(np.flatnonzero((self.now.loads > self.targets).any(axis=0)))
        most = (self._powers(self.now.loads) * self.weights).max(axis=0)
        return list(np.argsort(-most, kind="stable")[:TELLING])

    def excess_in(self, column: int, loads: Array) -> Array:
        """What loads of one column ``[...]`` add to `excess`."""
        if self.squares:
            return np.asarray(self._powers(loads) * self.weights[column])
        over = np.maximum(loads - self.targets[column], 0.0) * self.scale[column]
        over *= over
        return np.asarray(over)

    @property
    def even_excess(self) -> float:
        """By how much less the even parts may exceed their targets; with norms they may not."""
        return 0.0 if self.squares else float(self.add_even(np.zeros(()), self.even_ms))

    def add_even(self, total: Array, even_ms: Array) -> Array:
        """As of `CutPlan`; with norms in ms."""
        if not self.squares:
            return super().add_even(total, even_ms)
        return np.asarray(total + even_ms @ self.shares)
