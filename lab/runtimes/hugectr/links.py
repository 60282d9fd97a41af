"""Collectives that HugeCTR does without NCCL, and the uplinks of PCIe switches.

PCIe switches. Cards behind one switch reach the others through its uplink, each way at once. The
curve of cards on PCIe counts that load for switches with equally many cards that all send alike
(`lab.tools.derive`); `uplink_size` takes the cards and parts at hand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from predictor.cost.collectives import Array, Collectives, latency_ms, transfer_ms
from predictor.hardware.schema import Curve

_LARGE = 2.0**36
"""A message so large that only the bandwidth counts."""


def direct(links: Collectives, size_bytes: ArrayLike, scope: str = "intra") -> Array:
    """ms of a kernel that loads from or stores to the other ranks' memory, all pairs alike.

    It has neither NCCL's protocols nor its staging buffers: the all-to-all's latency and the
    bandwidth of its largest messages. Sizes as of an all-to-all.
    """
    size = np.asarray(size_bytes, dtype=np.float64)
    first, last = (
        links.all_to_all(_LARGE, scope),
        links.all_to_all(2 * _LARGE, scope),
    )
    return np.asarray(links.floor_ms("all_to_all", scope) + size * (last - first) / _LARGE)


def rail(links: Collectives, size_bytes: ArrayLike) -> Array:
    """ms of an all-reduce among one rank of each intra group, added up by the switches (SHARP).

    Each NIC carries the buffer once, in both directions at a time, and nothing waits for a tree
    to come back down.
    """
    top, size = links.topology, np.asarray(size_bytes, dtype=np.float64)
    if top.groups == 1:
        return np.zeros_like(size)
    curve = links.hardware.collectives.inter.all_reduce
    return latency_ms(curve, top.groups) / 2 + transfer_ms(curve, size, top.groups)


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
