"""Collectives whose ranks are joined by several links: NVLink domain, host, world.

All-to-all. Every level carries the share of the bytes whose receivers it joins, all levels at
once, and the slowest decides.

The reductions and all-gather of NCCL (src/graph/tuning.cc) run as rings or trees over all ranks:

- *Ring.* Each of the rings passes every rank, so the bus bytes of ``n`` ranks flow within a domain,
  and out of a domain of ``g`` ranks over its ``g`` NICs: ``(n-1)/n size / g`` past each, twice that
  for an all-reduce, which is a reduce-scatter and an all-gather. A hop per rank, those between
  hosts longer.
- *Tree* (all-reduce alone). Domains reduce within, exchange over two binary trees, each with half
  of the data, and spread within. A domain is a leaf of one tree and an inner node of the other:
  ``2 size / g`` past each NIC in each direction, ``size / g`` where there are two domains, or where
  the switches between hosts reduce (SHARP). Two hops per doubling of the domains.

Within a domain an all-reduce is a ring, or the switch adds up (NVLS): then its time does not depend
on the ranks.

The transfers of the levels are pipelined, so the slowest counts; latencies add. NCCL takes the
algorithm that it expects to be faster, here the faster one.

The network between hosts may have levels of its own (`NetworkLevel`). Bytes that leave a part of
such a level share its links to the others. Of an all-to-all those are all bytes for ranks
outside, of a ring its bus bytes once for each time that it leaves the part, of a tree what a NIC
carries. The fullest link decides, and every crossing adds the level's latency.

Gloo has no such rings: there level ``i`` works on what the level inside has already reduced or will
still spread.

Why: docs/decisions/0043 and docs/decisions/0068.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from predictor import units
from predictor.cost.link_curve import bus_factor, latency_ms, transfer_ms
from predictor.hardware.schema import Curve

Array = NDArray[np.float64]
Op = Literal["all_to_all", "all_reduce", "reduce_scatter", "all_gather"]


@dataclass(frozen=True)
class Uplink:
    """What the ranks of one part of a network share to reach the others.

    Args:
        link: curves of a NIC at the rate of a rank's share.
        ranks, ring_ranks, crossings, parts, latency_us: as in `predictor.model.topology`.
    """

    link: Mapping[str, Curve]
    ranks: float
    ring_ranks: float
    crossings: int
    parts: int
    latency_us: float


@dataclass(frozen=True)
class Level:
    """Ranks joined by one link: ``inner`` of them are already joined by faster ones.

    Args:
        group: of the profile that the link's costs per byte come from.
        kind: ``nvlink``; ``host``: PCIe between the domains of a host, which a ring crosses over
            one slot; ``nic``: every inner rank has one of its own.
        tree_cost: factor on the bytes of an all-reduce within while a tree joins the domains.
        in_network: the switches reduce.
        switch: an all-reduce that the switch within a domain does.
        uplinks: of the levels of the network, where ``kind`` is ``nic``.
    """

    group: str
    link: Mapping[str, Curve]
    inner: int
    outer: int
    kind: Literal["nvlink", "host", "nic"] = "nvlink"
    tree_cost: float = 1.0
    in_network: bool = False
    switch: Curve | None = None
    uplinks: tuple[Uplink, ...] = ()

    @property
    def ranks(self) -> int:
        """Parties that this level joins."""
        return self.outer // self.inner


def all_to_all(op: Op, size: Array, levels: Sequence[Level]) -> Array:
    """Every level carries the bytes whose receivers it joins; all at once."""
    total = levels[-1].outer
    times = []
    for level in levels:
        curve = level.link[op]
        bus_bytes = size * ((level.outer - level.inner) / total)
        # every rank beyond the inner ones is a peer of its own
        parties = level.outer - level.inner + 1
        transfer = transfer_ms(curve, bus_bytes, parties)
        for uplink in level.uplinks:
            leaving = size * ((total - uplink.ranks) / total)
            transfer = np.maximum(transfer, transfer_ms(uplink.link[op], leaving, parties))
        crossing = units.us(sum(uplink.latency_us for uplink in level.uplinks))
        times.append(latency_ms(curve, parties) + crossing + transfer)
    return np.asarray(np.max(times, axis=0))


def hierarchical(op: Op, size: Array, levels: Sequence[Level]) -> Array:
    """A level sees ``1/inner`` of the buffer per rank; levels are pipelined."""
    latency = sum(latency_ms(level.link[op], level.ranks) for level in levels)
    latency += _tree_crossings_ms(levels[-1])
    return np.asarray(latency + _hierarchical_transfer(op, size, levels))


def _tree_crossings_ms(level: Level) -> float:
    """Waits between the parts of a network, up a tree or ring over them and down again."""
    hops = [2 * np.log2(uplink.parts) * uplink.latency_us for uplink in level.uplinks]
    return units.us(float(sum(hops)))


def _hierarchical_transfer(op: Op, size: Array, levels: Sequence[Level]) -> Array:
    transfers = [
        transfer_ms(level.link[op], size * (bus_factor(op, level.ranks) / level.inner), level.ranks)
        for level in levels
    ]
    transfers += [
        transfer_ms(up.link[op], size * (bus_factor(op, up.parts) / up.ranks), level.ranks)
        for level in levels
        for up in level.uplinks
    ]
    return np.asarray(np.max(transfers, axis=0))


def ring_or_tree(op: Op, size: Array, levels: Sequence[Level]) -> Array:
    """What NCCL runs: the faster algorithm."""
    if op != "all_reduce":
        return _ring(op, size, levels)
    first, *outer = levels
    times = _all_reduces(size, levels)
    if first.switch is not None:
        link = {**first.link, op: first.switch}
        times += _all_reduces(size, [replace(first, link=link), *outer])
    return np.asarray(np.min(times, axis=0))


def _all_reduces(size: Array, levels: Sequence[Level]) -> list[Array]:
    if levels[-1].kind != "nic":
        return [_ring("all_reduce", size, levels)]
    # the reduction of a switch is for one domain alone
    both = _ring("reduce_scatter", size, levels) + _ring("all_gather", size, levels)
    return [both, _tree(size, levels)]


def _ring(op: Op, size: Array, levels: Sequence[Level]) -> Array:
    """The bus bytes of all ranks flow past each link."""
    ranks, first = levels[-1].outer, levels[0]
    bus_bytes = size * bus_factor(op, ranks)
    transfers, latency = [], 0.0
    for level in levels:
        links = level.inner if level.kind == "nic" else 1
        among = ranks if level.kind == "nvlink" else level.ranks
        transfers.append(transfer_ms(level.link[op], bus_bytes / links, among))
        # a hop to a further domain brings those inside it
        inside = (level.ranks - 1) * (level.inner - 1) * first.link[op].latency_per_rank_us
        latency += latency_ms(level.link[op], level.ranks) + units.us(inside)
        for uplink in level.uplinks:
            leaving = bus_bytes / uplink.ring_ranks
            transfers.append(transfer_ms(uplink.link[op], leaving, among))
            latency += units.us(max(0, uplink.crossings - 1) * uplink.latency_us)
    return np.asarray(latency + np.max(transfers, axis=0))


def _tree(size: Array, levels: Sequence[Level]) -> Array:
    """An all-reduce over domains that reduce and spread within."""
    *inner, top = levels
    op: Op = "all_reduce"
    ways = 1.0 if top.in_network or top.ranks == 2 else 2.0
    transfer = transfer_ms(top.link[op], size * (ways / top.inner), top.ranks)
    for up in top.uplinks:
        shared = transfer_ms(up.link[op], size * (ways / up.ranks), top.ranks)
        transfer = np.maximum(transfer, shared)
    if inner:
        within = top.tree_cost * _hierarchical_transfer(op, size, inner)
        transfer = np.maximum(transfer, within)
    latency = sum(latency_ms(level.link[op], level.ranks) for level in levels)
    return np.asarray(latency + _tree_crossings_ms(top) + transfer)
