"""Which rows of a calibration a fit may use, and which points are measured once more.

A row is steady where its mean and its median agree. A point with an unsteady row is measured once
more, at the end of the run; so is a collective that takes longer than its neighbours by size let
it. Of the attempts the shortest steady one counts, as a disturbance only adds. Where none is steady
but all took as long, the cost itself has modes, such as gloo's waits, and counts. All else is
refused: it stays in the file, and no fit uses it. The rows alone say all this, so that a run that
is resumed knows what was repeated.

Why: docs/decisions/0038.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardopt.calibrate.design.points import COLLECTIVE_OPS, Point
from shardopt.calibrate.rows import UNSTEADY, Measurement, key_of

ATTEMPTS = 2
"""At a point, at most."""
SAME_MODES = 0.3
"""Share by which two unsteady attempts may differ: a few dozen samples of a cost that has modes,
such as that of a message among plain ranks, tell its mean within half of that."""
MOST_ABOVE = 0.2
"""By how much a message may take longer than its neighbours by size let it."""
Attempts = Mapping[str, Sequence[Measurement]]
"""Rows of each point and part, in the order measured."""


@dataclass(frozen=True)
class Accepted:
    """One row of each point and part.

    Args:
        rows: that fits use.
        refused: that they do not.
        repeated: how many points and parts were measured more than once.
    """

    rows: list[Measurement]
    refused: list[Measurement]
    repeated: int

    @property
    def refused_share(self) -> float:
        """Of all points and parts."""
        found = len(self.rows) + len(self.refused)
        return len(self.refused) / found if found else 0.0


def accept(rows: Iterable[Measurement]) -> Accepted:
    """Sort the rows of one calibration; both lists in the order of first attempts."""
    attempts = _attempts(rows)
    bumps = _bumps(attempts)
    chosen = {key: _choose(tries) for key, tries in attempts.items()}
    good = [row for key, row in chosen.items() if row is not None and key not in bumps]
    refused = [
        min(tries, key=lambda row: row.unevenness)
        for key, tries in attempts.items()
        if chosen[key] is None or key in bumps
    ]
    return Accepted(good, refused, sum(len(tries) > 1 for tries in attempts.values()))


def points_again(rows: Iterable[Measurement]) -> list[Point]:
    """Points to be measured once more, in the order of their first attempts."""
    attempts = _attempts(rows)
    bumps = _bumps(attempts)
    doubtful = {
        key_of(tries[0].point): tries[0].point
        for key, tries in attempts.items()
        if len(tries) < ATTEMPTS and (_choose(tries) is None or key in bumps)
    }
    return list(doubtful.values())


def _attempts(rows: Iterable[Measurement]) -> Attempts:
    found = defaultdict(list)
    for row in rows:
        found[row.key].append(row)
    return found


def _choose(tries: Sequence[Measurement]) -> Measurement | None:
    """The row that counts of the attempts at one point and part; None: none does."""
    if _varies(tries[0].point):
        return tries[-1]
    steady = [row for row in tries if row.unevenness <= UNSTEADY]
    if steady:
        return min(steady, key=lambda row: row.trimmed_us)
    times = [row.trimmed_us for row in tries]
    if len(tries) > 1 and max(times) <= (1 + SAME_MODES) * min(times):
        return min(tries, key=lambda row: row.unevenness)
    return None


def _varies(point: Point) -> bool:
    """Whether times differ by nature: reference kernels show how the machine changes, and over an
    emulated link a message takes once or twice its time, as acknowledgements wait or do not."""
    return point.family == "reference" or "link_gbit_s" in point.params


def _bumps(attempts: Attempts) -> set[str]:
    """Keys of fitted collectives, measured once, that stand out of those of other sizes.

    Latency and bandwidth make a curve that bends upwards over the logarithm of the size: no message
    takes longer than the straight line between its neighbours says. What does so twice is real.
    """
    curves = defaultdict(list)
    for tries in attempts.values():
        row = _choose(tries)
        point = tries[0].point
        if row is None or point.test or _varies(point):
            continue
        if point.params.get("op") in COLLECTIVE_OPS:
            among = {name: value for name, value in point.params.items() if name != "bytes"}
            curves[key_of(Point(point.family, among))].append(row)
    once = {key for key, tries in attempts.items() if len(tries) == 1}
    return {row.key for curve in curves.values() for row in _above(curve)} & once


def _above(rows: Iterable[Measurement]) -> list[Measurement]:
    """Rows of one curve above the line between their neighbours; the first above the second."""
    curve = sorted(rows, key=_bytes_of)
    found = [a for a, b in list(pairwise(curve))[:1] if a.trimmed_us > _more(b.trimmed_us)]
    for before, row, after in zip(curve, curve[1:], curve[2:], strict=False):
        sizes = [math.log(_bytes_of(of)) for of in (before, row, after)]
        share = (sizes[1] - sizes[0]) / (sizes[2] - sizes[0])
        line = before.trimmed_us ** (1 - share) * after.trimmed_us**share
        found += [row] if row.trimmed_us > _more(line) else []
    return found


def _more(time_us: float) -> float:
    return (1 + MOST_ABOVE) * time_us


def _bytes_of(row: Measurement) -> float:
    return float(row.point.params["bytes"])
