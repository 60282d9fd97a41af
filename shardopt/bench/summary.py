"""What the samples of a bench run say: medians, spread, ratios and how far to trust them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from shardopt.bench.rows import BenchRows
from shardopt.measure.sampling import Samples, quantile

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """A plan's time over the first plan's.

    Args:
        value: median of the rounds' ratios of medians; drift between rounds is in both parts.
        interval: of at least `CONFIDENCE` for that median, from the order of the rounds alone;
            None where there are too few rounds for any.
    """

    value: float
    interval: tuple[float, float] | None

    @property
    def significant(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]


@dataclass(frozen=True)
class PlanSummary:
    """One plan's samples in short, all in milliseconds.

    Args:
        samples_ms: of rank 0, in the order measured.
        ranks_median_ms: of each rank.
        rounds_ms: the median of each round.
        ratio: None for the first plan.
    """

    name: str
    samples_ms: list[float]
    ranks_median_ms: list[float]
    rounds_ms: list[float]
    ratio: Ratio | None

    @property
    def median_ms(self) -> float:
        """Of all samples of rank 0."""
        return statistics.median(self.samples_ms)

    @property
    def p10_p90_ms(self) -> tuple[float, float]:
        """Between which four samples of five lie."""
        return quantile(self.samples_ms, 0.1), quantile(self.samples_ms, 0.9)

    @property
    def round_spread(self) -> float:
        """Slowest round over fastest, less 1: what noise and drift between rounds do."""
        return max(self.rounds_ms) / min(self.rounds_ms) - 1

    @property
    def stable(self) -> bool | None:
        """Whether the samples agree, by pyperf's rules; None for a single one."""
        return Samples(tuple(self.samples_ms)).stable


def summaries(rows: BenchRows) -> list[PlanSummary]:
    """One a plan, in the order given; needs a finished round."""
    found: list[PlanSummary] = []
    for name in rows.names:
        blocks = rows.samples_ms(name)
        rounds = [statistics.median(block) for block in blocks]
        ratio = ratio_of(rounds, found[0].rounds_ms) if found else None
        ranks = range(rows.settings["world_size"])
        medians = [statistics.median(flat(rows.samples_ms(name, rank))) for rank in ranks]
        found.append(PlanSummary(name, flat(blocks), medians, rounds, ratio))
    return found


def ratio_of(
    rounds: Sequence[float], first: Sequence[float], confidence: float = CONFIDENCE
) -> Ratio:
    """Ratio by round, as both were measured within seconds of each other."""
    ratios = sorted(a / b for a, b in zip(rounds, first, strict=True))
    return Ratio(statistics.median(ratios), median_interval(ratios, confidence))


def median_interval(
    ordered: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float] | None:
    """The narrowest interval of order statistics that holds the median often enough.

    Args:
        ordered: ascending.

    Returns:
        None where even the whole range is not sure enough: below 6 values at 95 %.
    """
    n = len(ordered)
    tail, cut = 0.0, -1
    while cut + 1 < n // 2:
        tail += math.comb(n, cut + 1) / 2**n
        if 2 * tail > 1 - confidence:
            break
        cut += 1
    return None if cut < 0 else (ordered[cut], ordered[n - 1 - cut])


def reference_rounds(rows: BenchRows) -> dict[str, list[float]]:
    """Median of each reference kernel in each round, over repeats and ranks, ms."""
    kernels = rows.rounds[0]["reference_ms"] if rows.rounds else {}
    return {
        kernel: [statistics.median(flat(r["reference_ms"][kernel])) for r in rows.rounds]
        for kernel in kernels
    }


def flat(blocks: Sequence[Sequence[float]]) -> list[float]:
    """One list of all."""
    return [sample for block in blocks for sample in block]
