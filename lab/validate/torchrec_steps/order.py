"""Whether runs of one commit are predicted in the order in which they were measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

from lab.validate.report import ComparedRow, Scores, Summary, noise_of
from lab.validate.torchrec_steps.runs import Run
from predictor.cost.errors import SIGMA_OVER_MEAN

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
    commits = defaultdict(list)
    for run, row in compared:
        commits[run.commit, run.gpu, run.steady].append((run, row))
    pairs = [pair for found in commits.values() for pair in combinations(found, 2)]
    told = [pair for pair in pairs if pair[0][0].key != pair[1][0].key]
    alike = [pair for pair in pairs if pair[0][0].key == pair[1][0].key]
    of_kind = _noise_by_kind(compared, noise)
    every = _least(noise)
    rows = (
        ("apart by more than the noise of all repeats", [p for p in told if _distance(p) > every]),
        (
            "apart by more than the noise of their own configurations",
            [p for p in told if _distance(p) > max(of_kind[run.workload.name] for run, _ in p)],
        ),
        ("all of unlike configuration", told),
    )
    unknown = sum(_distance(pair) > every for pair in alike)
    cells = [(name, *_share(found)) for name, found in rows]
    cells.append(("no column tells them apart, but their times do", unknown, 0, math.nan))
    return (
        Scores(
            "order within a commit",
            (("pairs", "text"), ("n", "count"), ("right", "count"), ("share", "share")),
            tuple(cells),
            f"by the noise of all repeats, times differ if they are {math.expm1(every):.0%} apart",
        ),
    )


def _least(noise: Summary) -> float:
    """Log ratio above which two times differ."""
    mean = UNKNOWN_NOISE if math.isnan(noise.mape) else noise.mape
    return SIGMAS * math.sqrt(2.0) * SIGMA_OVER_MEAN * mean


def _noise_by_kind(compared: Sequence[tuple[Run, ComparedRow]], noise: Summary) -> dict[str, float]:
    """Model -> log ratio above which its runs differ; that of all where it was not repeated."""
    kinds = defaultdict(list)
    for run, row in compared:
        kinds[run.workload.name].append((run.key, row.measured_ms))
    found = {name: noise_of(times) for name, times in kinds.items()}
    return {name: _least(own if own.n else noise) for name, own in found.items()}


def _distance(pair: Pair) -> float:
    (_, a), (_, b) = pair
    return abs(math.log(a.measured_ms / b.measured_ms))


def _share(pairs: Sequence[Pair]) -> tuple[int, int, float]:
    right = sum(
        (a.measured_ms - b.measured_ms) * (a.predicted_ms - b.predicted_ms) > 0
        for (_, a), (_, b) in pairs
    )
    return len(pairs), right, right / len(pairs) if pairs else math.nan
