"""How many rows occur how often in a sample, whole tables and id ranges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ids = NDArray[np.int64]

RANGES = 1024
"""Most id ranges of a table."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """What a sample says of one feature.

    Args:
        rows: of the table, those that never occurred included.
        draws: ids in the sample.
        counts, weights: how often each known row occurred, and how many rows of the table it
            stands for, ``[known]``; weights are 1 unless only a sample of the rows is known.
        ranges: id range of each known row, ``[known]``.
        range_draws: ids in each range, ``[ranges]``; all ranges have ``range_width`` rows but the
            last, which ends with the table.
        range_width: rows.
    """

    rows: int
    draws: int
    counts: Ids
    weights: Array
    ranges: Ids
    range_draws: Array
    range_width: int

    @property
    def distinct(self) -> float:
        """Rows of the table that occur in the sample; estimated if not all are known."""
        return min(float(self.weights.sum()), float(self.rows), float(self.draws))

    @property
    def exact(self) -> bool:
        """Every row that occurred is known."""
        return bool((self.weights == 1).all())

    @property
    def range_rows(self) -> Array:
        """Rows of the table in each id range, ``[ranges]``."""
        first = np.arange(len(self.range_draws), dtype=np.float64) * self.range_width
        return np.clip(self.rows - first, 0.0, self.range_width)

    def frequencies(self) -> tuple[Ids, Array]:
        """How often rows occur, ascending, and how many rows of the table occur so often."""
        values, inverse = np.unique(self.counts, return_inverse=True)
        rows: Array = np.bincount(inverse, weights=self.weights).astype(np.float64)
        return values, rows

    def curve(self) -> tuple[Array, Array]:
        """Draws, powers of two up to those of the sample, and the distinct rows in so many.

        Expected of so many ids picked from the sample without replacement (rarefaction, Hurlbert
        1971): a row that occurs k times is missed with chance ``C(N - k, n) / C(N, n)``, a product
        of ``min(k, n)`` factors, all of which are taken as the one in their middle.
        """
        total = float(self.draws)
        draws: Array = np.exp2(np.arange(int(np.log2(total)) + 1, dtype=np.float64))
        if draws[-1] < total:
            draws = np.append(draws, total)
        often, rows = self.frequencies()
        few = np.minimum(draws[:, None], often)
        many = np.maximum(draws[:, None], often)
        part = np.minimum(many / (total - (few - 1) / 2), 1.0)
        with np.errstate(divide="ignore"):
            seen = np.where(many + few > total, 1.0, -np.expm1(few * np.log1p(-part)))
        distinct: Array = np.minimum(seen @ rows, draws)
        return draws, distinct
