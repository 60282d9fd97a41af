"""Errors of a fit on rows that it has not seen."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from predictor.fit.scores import gmae, mape
from predictor.hardware.schema import KnownError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class HeldOut:
    """Relative errors ``predicted / measured - 1`` of rows that no fit has seen.

    Args:
        fitted: rows of the fit.
        times: of the rows, in any unit, as weights; None: equal weights.
    """

    errors: Array
    fitted: int
    times: Array | None = None

    @property
    def n(self) -> int:
        """Rows held out."""
        return len(self.errors)

    @property
    def mape(self) -> float:
        """Mean of absolute errors."""
        return mape(self.errors)

    @property
    def gmae(self) -> float:
        """Geometric mean of absolute errors."""
        return gmae(self.errors)

    @property
    def bias(self) -> float:
        """Median error, signed."""
        return float(np.median(self.errors)) if self.n else math.nan

    @property
    def known(self) -> KnownError | None:
        """The error as a profile states it for a group."""
        if not self.n:
            return None
        mean, geomean = round(self.mape, 4), round(self.gmae, 4)
        rows = "points left out of the fit"
        return KnownError(suite="calibrate", rows=rows, n=self.n, mean=mean, geomean=geomean)

    @property
    def rms(self) -> float:
        """Root of the mean square, by time: the 1-sigma error of a profile's group.

        Long kernels dominate the time of an iteration, so they dominate its error too.
        """
        if not self.n:
            return math.nan
        times = np.ones(self.n) if self.times is None else self.times
        return float(np.sqrt(np.sum(times * self.errors**2) / np.sum(times)))

    def __add__(self, other: HeldOut) -> HeldOut:
        """Both together."""
        errors = np.concatenate((self.errors, other.errors))
        parts = [h.times if h.times is not None else np.ones(h.n) for h in (self, other)]
        return HeldOut(errors, self.fitted + other.fitted, np.concatenate(parts))
