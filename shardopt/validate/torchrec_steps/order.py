"""Whether runs of one commit are predicted in the order in which they were measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

from predictor.cost.errors import SIGMA_OVER_MEAN
from shardopt.validate.report import ComparedRow, Scores, Summary
from shardopt.validate.torchrec_steps.runs import Run

SIGMAS = 2.0
"""Two runs differ if their ratio is this many standard deviations of a ratio of repeats."""
UNKNOWN_NOISE = 0.05
"""Mean error of repeats where the table has none."""

Pair = tuple[tuple[Run, ComparedRow], tuple[Run, ComparedRow]]


def order_scores(compared: Sequence[tuple[Run, ComparedRow]], noise: Summary) -> tuple[Scores, ...]:
    """Pairs of runs of one commit on one GPU, by whether their order was foretold.

    Args:
        noise: of repeats.
    """
    mean = UNKNOWN_NOISE if math.isnan(noise.mape) else noise.mape
    least = SIGMAS * math.sqrt(2.0) * SIGMA_OVER_MEAN * mean
    commits = defaultdict(list)
    for run, row in compared:
        commits[run.commit, run.gpu, run.steady].append((run, row))
    pairs = [pair for found in commits.values() for pair in combinations(found, 2)]
    told = [pair for pair in pairs if pair[0][0].key != pair[1][0].key]
    apart = [pair for pair in told if _distance(pair) > least]
    alike = [pair for pair in pairs if pair[0][0].key == pair[1][0].key]
    cells: list[tuple[str, int, int, float]] = [
        ("configurations differ, times differ by more than the noise", *_share(apart)),
        ("configurations differ", *_share(told)),
    ]
    unknown = sum(_distance(pair) > least for pair in alike)
    cells.append(
        ("no column tells them apart, times differ by more than the noise", unknown, 0, math.nan)
    )
    return (
        Scores(
            "order within a commit",
            (("pairs", "text"), ("n", "count"), ("right", "count"), ("share", "share")),
            tuple(cells),
            f"two times differ by more than the noise if they are {math.expm1(least):.0%} apart",
        ),
    )


def _distance(pair: Pair) -> float:
    (_, a), (_, b) = pair
    return abs(math.log(a.measured_ms / b.measured_ms))


def _share(pairs: Sequence[Pair]) -> tuple[int, int, float]:
    right = sum(
        (a.measured_ms - b.measured_ms) * (a.predicted_ms - b.predicted_ms) > 0
        for (_, a), (_, b) in pairs
    )
    return len(pairs), right, right / len(pairs) if pairs else math.nan
