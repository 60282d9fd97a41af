"""Repeated measurements side by side: samples, medians, whether they are stable."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

REFERENCE_VERSION = 1
"""Of the fixed kernels in `shardopt.measure.reference`; here, as reading it needs no torch."""
UNSTABLE_DEVIATION = 0.1
UNSTABLE_EXTREME = 0.5
"""As pyperf: a standard deviation of 10 % of the mean, or a sample 50 % off the mean."""


@dataclass(frozen=True)
class Samples:
    """Seconds of one thing, in the order measured; at least one."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The middle sample, or the mean of the two middle ones."""
        return statistics.median(self.seconds)

    @property
    def stable(self) -> bool | None:
        """Whether the samples agree with each other; None for a single one."""
        if len(self.seconds) < 2:
            return None
        mean = statistics.fmean(self.seconds)
        extreme = max(max(self.seconds) - mean, mean - min(self.seconds))
        deviation = statistics.stdev(self.seconds)
        return deviation < UNSTABLE_DEVIATION * mean and extreme < UNSTABLE_EXTREME * mean

    def overlaps(self, other: Samples) -> bool:
        """Whether some sample of each lies in the range of the other: no ratio to speak of."""
        return min(self.seconds) <= max(other.seconds) and min(other.seconds) <= max(self.seconds)


def interleave(
    what: Mapping[str, Callable[[], float]],
    repeat: int,
    on_start: Callable[[str, int], None] = lambda name, round_: None,
) -> dict[str, Samples]:
    """Measure everything once a round, so that a busy machine disturbs all of it alike.

    Args:
        what: name -> a call that returns its seconds.
        repeat: rounds, >= 1. Each starts with another one, so that none is always first.
        on_start: called with the name and the round, from 0, before each call.
    """
    names = list(what)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(repeat):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            on_start(name, round_)
            samples[name].append(what[name]())
    return {name: Samples(tuple(seconds)) for name, seconds in samples.items()}
