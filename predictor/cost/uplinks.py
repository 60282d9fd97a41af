"""Uplinks of PCIe switches in an all-to-all of unequal parts.

Cards behind one switch reach the others through its uplink, each way at once. The curve of cards on
PCIe counts that load for switches with equally many cards that all send alike
(`tools.derive`); here it is that of the cards and parts at hand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from predictor.hardware.schema import Curve

Array = NDArray[np.float64]


def switches_of(curve: Curve, ranks: int) -> tuple[int, ...]:
    """Cards behind each switch of a host as the curve takes it, () where no uplink counts.

    Args:
        curve: of all-to-alls; up to the cards of one switch it costs no more than among two.
    """
    cards = max((n for n, cost in curve.rank_cost.items() if cost == 1.0), default=0)
    return (cards,) * (ranks // cards) if 0 < cards < ranks and ranks % cards == 0 else ()


def uplink_size(sent: Array, switches: Sequence[int], cards: int) -> Array:
    """What every rank would send for the busiest uplink to carry as much, ``[..., 1]``.

    Args:
        sent: bytes that each rank sends to all ranks alike, itself included, ``[..., ranks]``.
        switches: cards behind each switch, in the order of the ranks.
        cards: behind each switch in the machine of equal parts that the curve describes.
    """
    ranks = sent.shape[-1]
    total, busiest, first = sent.sum(axis=-1), np.zeros(sent.shape[:-1]), 0
    for count in switches:
        own = sent[..., first : first + count].sum(axis=-1)
        up, down = own * (ranks - count) / ranks, (total - own) * count / ranks
        busiest, first = np.maximum(busiest, np.maximum(up, down)), first + count
    return np.asarray(busiest * ranks / (cards * (ranks - cards)))[..., None]
