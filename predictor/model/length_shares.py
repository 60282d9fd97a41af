"""Growth of a dense part with the lengths of samples."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LengthShares:
    """Shares of a dense part's forward and backward that grow with the ids of a sample, and with
    their square, as attention does; in [0, 1] together."""

    linear: float = 0.0
    square: float = 0.0
