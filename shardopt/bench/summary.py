"""Summary of a bench run's samples: medians, spread, ratios and how far to trust them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardopt.bench.rows import BenchRows
from shardopt.measure.sampling import Samples
from shardopt.race import Ratio, ratio_of


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
        """Median of all samples of rank 0, in ms."""
        return statistics.median(self.samples_ms)

    @property
    def p10_p90_ms(self) -> tuple[float, float]:
        """Between which four samples of five lie."""
        low, high = np.quantile(self.samples_ms, (0.1, 0.9)).tolist()
        return low, high

    @property
    def round_spread(self) -> float:
        """Slowest round over fastest, less 1: what noise and drift between rounds do."""
        return max(self.rounds_ms) / min(self.rounds_ms) - 1

    @property
    def stable(self) -> bool | None:
        """Tell if the samples agree, by pyperf's rules; None for a single one."""
        return Samples(tuple(self.samples_ms)).stable


def summaries(rows: BenchRows) -> list[PlanSummary]:
    """Summarise every plan, in the order given; needs a finished round."""
    plans: list[PlanSummary] = []
    for name in rows.names:
        blocks = rows.samples_ms(name)
        rounds = [statistics.median(block) for block in blocks]
        ratio = ratio_of(rounds, plans[0].rounds_ms) if plans else None
        ranks = range(rows.settings["world_size"])
        medians = [statistics.median(flat(rows.samples_ms(name, rank))) for rank in ranks]
        plans.append(PlanSummary(name, flat(blocks), medians, rounds, ratio))
    return plans


def reference_rounds(rows: BenchRows) -> dict[str, list[float]]:
    """Median of each reference kernel in each round, over repeats and ranks, ms."""
    kernels = rows.rounds[0]["reference_ms"] if rows.rounds else {}
    return {
        kernel: [statistics.median(flat(r["reference_ms"][kernel])) for r in rows.rounds]
        for kernel in kernels
    }


def flat(blocks: Sequence[Sequence[float]]) -> list[float]:
    """Join lists into one."""
    return [sample for block in blocks for sample in block]
