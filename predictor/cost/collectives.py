"""Time of collectives by message size, ranks and wiring.

`predictor.cost.link_curve` has the curve of one link, `predictor.cost.levels` how several links
join. Ranks nest: NVLink domain, host, world; the network between hosts may have levels of its own.

PCIe switches. Cards behind one switch reach the others through its uplink, each way at once. The
curve of cards on PCIe counts that load for switches with equally many cards that all send alike
(`lab.tools.derive`); `uplink_size` takes the cards and parts at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from predictor import units
from predictor.cost.levels import Array, Level, Op, Uplink, all_to_all, hierarchical, ring_or_tree
from predictor.cost.link_curve import latency_ms, transfer_ms
from predictor.errors import InputError
from predictor.hardware.schema import Curve, HardwareProfile, Inter, LinkCurves
from predictor.model.topology import Topology

Scope = str

SCOPES = ("world", "intra", "cross")
OPS: tuple[Op, ...] = ("all_to_all", "all_reduce", "reduce_scatter", "all_gather")

# Curves are tabulated once per scope, so that scoring many plans costs one interpolation. Sixteen
# points an octave keep the chord within 0.1 % of a curve that bends once an octave.
_FIRST_OCTAVE, _LAST_OCTAVE, _PER_OCTAVE = 8, 38, 16
_LARGE = 2.0**36
"""A message so large that only the bandwidth counts."""


class Collectives:
    """Times of the four collectives on given hardware and topology; see the module's text.

    Sizes follow nccl-tests: all-to-all: the whole send buffer of the busiest rank, its own part
    included; all-reduce: the buffer; reduce-scatter: the full input; all-gather: the full output.
    Scopes: ``world`` all ranks; ``intra`` the ranks of one intra group; ``cross`` one rank of each
    intra group. Among one rank everything is free.
    """

    def __init__(self, hw: HardwareProfile, topology: Topology) -> None:
        self.hardware = hw
        self.topology = topology
        self._tables: dict[tuple[Op, Scope], Array] = {}

    def all_to_all(self, size_bytes: ArrayLike, scope: Scope = "world") -> Array:
        """ms, in the shape of ``size_bytes``."""
        return self._time("all_to_all", size_bytes, scope)

    def all_reduce(self, size_bytes: ArrayLike, scope: Scope = "world") -> Array:
        """ms, in the shape of ``size_bytes``."""
        return self._time("all_reduce", size_bytes, scope)

    def reduce_scatter(self, size_bytes: ArrayLike, scope: Scope = "world") -> Array:
        """ms, in the shape of ``size_bytes``."""
        return self._time("reduce_scatter", size_bytes, scope)

    def all_gather(self, size_bytes: ArrayLike, scope: Scope = "world") -> Array:
        """ms, in the shape of ``size_bytes``."""
        return self._time("all_gather", size_bytes, scope)

    def direct(self, size_bytes: ArrayLike, scope: Scope = "intra") -> Array:
        """ms of a kernel that loads from or stores to the other ranks' memory, all pairs alike.

        It has neither NCCL's protocols nor its staging buffers: the all-to-all's latency and the
        bandwidth of its largest messages. Sizes as of an all-to-all.
        """
        size = np.asarray(size_bytes, dtype=np.float64)
        first, last = (
            self._time("all_to_all", _LARGE, scope),
            self._time("all_to_all", 2 * _LARGE, scope),
        )
        return np.asarray(self.floor_ms("all_to_all", scope) + size * (last - first) / _LARGE)

    def rail(self, size_bytes: ArrayLike) -> Array:
        """ms of an all-reduce among one rank of each intra group, added up by the switches (SHARP).

        Each NIC carries the buffer once, in both directions at a time, and nothing waits for a tree
        to come back down.
        """
        top, size = self.topology, np.asarray(size_bytes, dtype=np.float64)
        if top.groups == 1:
            return np.zeros_like(size)
        curve = self.hardware.collectives.inter.all_reduce
        return latency_ms(curve, top.groups) / 2 + transfer_ms(curve, size, top.groups)

    def floor_ms(self, op: Op, scope: Scope = "world") -> float:
        """Time of an empty message: a lower bound at every size."""
        return float(self._time(op, 0.0, scope))

    def ranks(self, scope: Scope) -> int:
        """Ranks that take part."""
        return self._levels(scope)[-1].outer if self._levels(scope) else 1

    def shares(self, op: Op, scope: Scope) -> list[tuple[str, float]]:
        """Group of the profile -> size of the message that its link sees, over the whole one.

        A message of that size among the ranks that the link alone joins moves the same bus bytes.
        """
        levels = self._levels(scope)
        if op == "all_to_all":
            return [(v.group, (v.outer - v.inner + 1) / levels[-1].outer) for v in levels]
        return [(level.group, 1 / level.inner) for level in levels]

    @cached_property
    def _sizes(self) -> Array:
        steps = (_LAST_OCTAVE - _FIRST_OCTAVE) * _PER_OCTAVE + 1
        return np.concatenate(([0.0], np.logspace(_FIRST_OCTAVE, _LAST_OCTAVE, steps, base=2.0)))

    def _time(self, op: Op, size_bytes: ArrayLike, scope: Scope) -> Array:
        sizes, table = self._sizes, self._table(op, scope)
        size = np.asarray(size_bytes, dtype=np.float64)
        slope = (table[-1] - table[-2]) / (sizes[-1] - sizes[-2])
        beyond = np.maximum(size - sizes[-1], 0.0)
        return np.asarray(np.interp(size, sizes, table) + slope * beyond)

    def _table(self, op: Op, scope: Scope) -> Array:
        if (op, scope) not in self._tables:
            if scope not in SCOPES:
                raise InputError(f"scope '{scope}' is unknown; allowed are {', '.join(SCOPES)}")
            levels = self._levels(scope)
            reduce = hierarchical if self.hardware.inline else ring_or_tree
            combine = all_to_all if op == "all_to_all" else reduce
            empty = np.zeros_like(self._sizes)
            self._tables[op, scope] = combine(op, self._sizes, levels) if levels else empty
        return self._tables[op, scope]

    def _levels(self, scope: Scope) -> list[Level]:
        """Levels with more than one party, the fastest link first."""
        top = self.topology
        domain = min(top.nvlink_domain, top.world_size)
        group = min(top.intra_group_size, top.world_size)
        links = self.hardware.collectives
        if scope == "cross":
            levels = [_nics(links.inter, 1, top.groups, top)]
        else:
            host_link = _host_link(self.hardware)
            levels = [
                Level(
                    "collectives.intra",
                    _curves(links.intra),
                    1,
                    domain,
                    switch=links.intra.in_switch,
                ),
                Level("memory", host_link, domain, group, "host"),
            ]
            if scope == "world":
                levels.append(_nics(links.inter, group, top.world_size, top))
        return [level for level in levels if level.outer > level.inner]


def _nics(link: Inter, inner: int, outer: int, topology: Topology) -> Level:
    """One NIC of every rank; of so many ranks out of each intra group there are ``inner``."""
    share = outer / topology.world_size
    uplinks = tuple(
        Uplink(
            _curves(link.at(level.rate(link.nic_gbit_s))),
            level.ranks * share,
            level.ring_ranks * share,
            level.crossings,
            level.parts,
            level.latency_us,
        )
        for level in topology.network
        if level.parts > 1
    )
    facts = (link.tree_cost, link.in_network)
    return Level("collectives.inter", _curves(link), inner, outer, "nic", *facts, uplinks=uplinks)


def _curves(link: LinkCurves) -> dict[str, Curve]:
    return {op: getattr(link, op) for op in OPS}


def _host_link(hw: HardwareProfile) -> dict[str, Curve]:
    """Between NVLink domains of one host, over its PCIe links: the bandwidth of bulk copies."""
    cost = units.MIB / hw.memory.host_link / units.us(1.0)
    flat = {"edge_mib": (0.0,), "us_per_mib": (cost,), "rank_cost": {}, "own_part": 0.0}
    return {
        op: curve.model_copy(update=flat) for op, curve in _curves(hw.collectives.intra).items()
    }


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
