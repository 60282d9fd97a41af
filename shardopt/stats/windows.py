"""Windows of time: samples of one hour, day or week are counted by themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from predictor.errors import InputError
from shardopt.stats.counts import Bags
from shardopt.stats.source import Chunk

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
MOST_WINDOWS = 1000
"""Each has counts of its own, with up to `collect.MAX_IDS` ids a feature."""
_WORDS = re.compile(r"(?P<column>.+)=(?P<count>[1-9]\d{0,5})(?P<unit>[smhdw])", re.ASCII)


@dataclass(frozen=True)
class TimeWindow:
    """How samples are divided by time.

    Args:
        column: says when a sample was.
        seconds: length of a window; windows are counted from 1970-01-01, 00:00 UTC.
    """

    column: str
    seconds: int

    @classmethod
    def parse(cls, text: str) -> TimeWindow:
        """A window written as ``COLUMN=1d``.

        Raises:
            InputError: it is not written so.
        """
        found = _WORDS.fullmatch(text)
        if found is None:
            raise InputError(
                f"got the window '{text}'; allowed: COLUMN=LENGTH, where LENGTH is a whole number "
                f"and one of {', '.join(UNITS)}, such as timestamp=1d",
                inputs=("window",),
            )
        return cls(found["column"], int(found["count"]) * UNITS[found["unit"]])

    def split(self, chunk: Chunk) -> Iterator[tuple[int, Chunk]]:
        """The samples of each window that has some, with the window's start in Unix seconds.

        Raises:
            InputError: a time lies outside the years 1 to 9999.
        """
        assert chunk.times is not None
        starts = np.floor(chunk.times / self.seconds) * self.seconds
        for start in np.unique(starts):
            inside = starts == start
            bags = {name: _part(of, inside) for name, of in chunk.bags.items()}
            yield self._checked(float(start)), Chunk(chunk.first, chunk.unit, bags)

    def _checked(self, start: float) -> int:
        try:
            datetime.fromtimestamp(start, UTC)
        except (ValueError, OverflowError, OSError):
            raise InputError(
                f"column '{self.column}': got the time {start:g}; allowed: seconds, or milli-, "
                "micro- or nanoseconds, since 1970",
                inputs=("window",),
            ) from None
        return int(start)

    def name(self, start: int) -> str:
        """A window's name in files: its day, with the time where windows are shorter."""
        at = datetime.fromtimestamp(start, UTC)
        whole_days = self.seconds % UNITS["d"] == 0
        return at.strftime("%Y-%m-%d" if whole_days else "%Y-%m-%dT%H-%M-%S")


def _part(bags: Bags, inside: np.ndarray) -> Bags:
    """The bags of some samples, ``inside [samples]``."""
    if bags.lengths is None:
        return Bags(bags.ids[inside])
    return Bags(bags.ids[np.repeat(inside, bags.lengths)], bags.lengths[inside])
