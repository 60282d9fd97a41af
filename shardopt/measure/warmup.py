"""When warming up is over: judged by the samples, not by a number of iterations guessed before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

MIN_BLOCK = 6
"""Samples a block: with fewer no difference between two blocks could be significant."""
MAX_ROUNDS = 12
"""After so many rounds measuring starts anyway, and the verdict says that nothing settled."""
SIGNIFICANCE = 0.01


def warmed_up(blocks: Mapping[str, Sequence[Sequence[float]]]) -> bool:
    """Whether no plan became significantly faster from its last but one block to its last.

    Args:
        blocks: milliseconds of every warm-up iteration, block by block, for each plan.
    """
    return all(len(b) > 1 and not fell(b[-2], b[-1]) for b in blocks.values())


def fell(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether `after` is significantly below `before` (Mann and Whitney 1947, one-sided)."""
    return fall_probability(before, after) < SIGNIFICANCE


def fall_probability(before: Sequence[float], after: Sequence[float]) -> float:
    """How probable so clear a fall is where both are drawn alike; ties count half.

    The exact distribution of U: the number of ways to reach each value satisfies
    f(m, n, u) = f(m - 1, n, u - n) + f(m, n - 1, u).
    """
    m, n = len(before), len(after)
    u = sum((b > a) + 0.5 * (b == a) for b in before for a in after)
    ways = _ways(m, n)
    return sum(ways[math.ceil(u) :]) / math.comb(m + n, n)


def _ways(m: int, n: int) -> list[int]:
    """Number of orders of m and n samples in which U is 0, 1, ..., m * n."""
    table = [[[0] * (m * n + 1) for _ in range(n + 1)] for _ in range(m + 1)]
    for i in range(m + 1):
        for j in range(n + 1):
            if i == 0 or j == 0:
                table[i][j][0] = 1
                continue
            for u in range(i * j + 1):
                table[i][j][u] = (table[i - 1][j][u - j] if u >= j else 0) + table[i][j - 1][u]
    return table[m][n]
