"""Time of collectives by message size, ranks and wiring.

One link. A collective of ``n`` ranks moves ``w = size factor(n)`` bus bytes past the busiest link,
with the factors of nccl-tests (doc/PERFORMANCE.md): ``(n-1)/n`` for all-to-all, reduce-scatter and
all-gather, ``2 (n-1)/n`` for all-reduce. Its time is

    t(w, n) = latency + latency_per_doubling log2(n) + rank_cost(n) sum_j c_j band_j(w)

where ``band_j`` rises with slope one from edge ``e_j`` to edge ``e_(j+1)`` and ``c_j >= 0`` is the
marginal cost of a byte in that band: continuous, and never falling with size. The joints are
hyperbolas, ``band_j(w) = h(w, e_j) - h(w, e_(j+1))`` with ``h(w, e) = sqrt(w^2 + e^2) - e``. Lin et
al. 2024 fit three pieces that do not meet; the bands replace them. `predictor.fit.collectives` fits
``c_j``.

Several links. Ranks nest: NVLink domain, host, world. An all-to-all sends to each level the share
of its bytes whose receivers lie there, all levels at once, and ends with the slowest. The
reductions run level by level on what the level inside has already reduced or will still spread
(NCCL's hierarchical and tree algorithms), pipelined: latencies add, the slowest level sets the
bandwidth.

PCIe switches. Cards behind one switch reach the others through its uplink, each way at once. The
curve of cards on PCIe counts that load for switches with equally many cards that all send alike
(`tools.derive`); `uplink_size` takes the cards and parts at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from predictor import units
from predictor.errors import InputError
from predictor.hardware.schema import Curve, HardwareProfile, LinkCurves
from predictor.model.topology import Topology

Array = NDArray[np.float64]
Op = Literal["all_to_all", "all_reduce", "reduce_scatter", "all_gather"]
Scope = str

SCOPES = ("world", "intra", "cross")
OPS: tuple[Op, ...] = ("all_to_all", "all_reduce", "reduce_scatter", "all_gather")

# Curves are tabulated once per scope, so that scoring many plans costs one interpolation. Sixteen
# points an octave keep the chord within 0.1 % of a curve that bends once an octave.
_FIRST_OCTAVE, _LAST_OCTAVE, _PER_OCTAVE = 8, 38, 16
_LARGE = 2.0**36
"""A message so large that only the bandwidth counts."""


def bus_factor(op: str, ranks: int) -> float:
    """Bus bytes per byte of buffer (nccl-tests, doc/PERFORMANCE.md)."""
    return (2.0 if op == "all_reduce" else 1.0) * (ranks - 1) / ranks


def hyperbola(w: Array, edge: float) -> Array:
    """``sqrt(w^2 + edge^2) - edge``: flat below the edge, slope one above; free of cancellation."""
    return np.asarray(w * w / np.maximum(np.hypot(w, edge) + edge, np.finfo(np.float64).tiny))


def bands(w: Array, edges: Sequence[float]) -> Array:
    """``[..., edges]``: how many of the ``w`` bytes fall into each size band."""
    rises = [hyperbola(w, edge) for edge in edges] + [np.zeros_like(w)]
    return np.stack([a - b for a, b in pairwise(rises)], axis=-1)


def rank_cost(curve: Curve, ranks: int) -> float:
    """Factor on the marginal costs at this rank count, linear in log2 of the ranks between."""
    if not curve.rank_cost:
        return 1.0
    known = sorted(curve.rank_cost)
    values = [curve.rank_cost[n] for n in known]
    return float(np.interp(np.log2(ranks), np.log2(known), values))


def latency_ms(curve: Curve, ranks: int) -> float:
    """Time of an empty message."""
    return units.us(curve.latency_us + curve.latency_per_doubling_us * float(np.log2(ranks)))


def transfer_ms(curve: Curve, bus_bytes: Array, ranks: int) -> Array:
    """Time beyond the latency, same shape as ``bus_bytes``."""
    edges = [units.MIB * edge for edge in curve.edge_mib]
    costs = units.us(1.0) / units.MIB * np.asarray(curve.us_per_mib)
    return np.asarray(bands(bus_bytes, edges) @ costs) * rank_cost(curve, ranks)


@dataclass(frozen=True)
class _Level:
    """Ranks joined by one link: ``inner`` of them are already joined by faster ones.

    ``group`` of the profile is where the link's costs per byte come from.
    """

    group: str
    link: dict[str, Curve]
    inner: int
    outer: int

    @property
    def ranks(self) -> int:
        """Parties that this level joins."""
        return self.outer // self.inner


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
            combine = _all_to_all if op == "all_to_all" else _hierarchical
            empty = np.zeros_like(self._sizes)
            self._tables[op, scope] = combine(op, self._sizes, levels) if levels else empty
        return self._tables[op, scope]

    def _levels(self, scope: Scope) -> list[_Level]:
        """Levels with more than one party, the fastest link first."""
        top = self.topology
        domain = min(top.nvlink_domain, top.world_size)
        group = min(top.intra_group_size, top.world_size)
        links = self.hardware.collectives
        if scope == "cross":
            bounds = [("collectives.inter", _curves(links.inter), 1, top.groups)]
        else:
            bounds = [
                ("collectives.intra", _curves(links.intra), 1, domain),
                ("memory", _host_link(self.hardware), domain, group),
            ]
            if scope == "world":
                inter = _curves(links.inter)
                bounds.append(("collectives.inter", inter, group, top.world_size))
        levels = [_Level(*bound) for bound in bounds]
        return [level for level in levels if level.outer > level.inner]


def _curves(link: LinkCurves) -> dict[str, Curve]:
    return {op: getattr(link, op) for op in OPS}


def _host_link(hw: HardwareProfile) -> dict[str, Curve]:
    """Between NVLink domains of one host, over its PCIe links: the bandwidth of bulk copies."""
    cost = units.MIB / hw.memory.host_link / units.us(1.0)
    return {
        op: curve.model_copy(update={"edge_mib": (0.0,), "us_per_mib": (cost,), "rank_cost": {}})
        for op, curve in _curves(hw.collectives.intra).items()
    }


def _all_to_all(op: Op, size: Array, levels: Sequence[_Level]) -> Array:
    """Every level carries the bytes whose receivers it joins; all at once."""
    total = levels[-1].outer
    times = []
    for level in levels:
        curve = level.link[op]
        bus_bytes = size * ((level.outer - level.inner) / total)
        # every rank beyond the inner ones is a peer of its own
        parties = level.outer - level.inner + 1
        transfer = transfer_ms(curve, bus_bytes, parties)
        times.append(latency_ms(curve, parties) + transfer)
    return np.asarray(np.max(times, axis=0))


def _hierarchical(op: Op, size: Array, levels: Sequence[_Level]) -> Array:
    """A level sees ``1/inner`` of the buffer per rank; levels are pipelined."""
    latency = sum(latency_ms(level.link[op], level.ranks) for level in levels)
    transfers = [
        transfer_ms(level.link[op], size * (bus_factor(op, level.ranks) / level.inner), level.ranks)
        for level in levels
    ]
    return np.asarray(latency + np.max(transfers, axis=0))


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
