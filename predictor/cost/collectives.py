"""Time of collectives by message size, ranks and wiring (docs/model.md, chapter 8).

Ranks nest: NVLink domain, host, world. The network between hosts may have levels of its own: the
ranks of a part (a rack, a pod) share its uplinks (`NetworkLevel`). NCCL's reductions and all-gather
run as rings or trees over all ranks (src/graph/tuning.cc), whichever is faster. Gloo has no such
rings: each level handles only the part of the buffer that the level inside has already reduced, or
will later broadcast. Transfers of the levels are pipelined, so the slowest counts; latencies add.

One link. A collective of ``n`` ranks moves ``w = size factor(n)`` bus bytes past the busiest link,
with the factors of nccl-tests (doc/PERFORMANCE.md). Its time is

    t(w, n) = latency + latency_per_doubling log2(n) + latency_per_rank (n - 1)
              + (1 + own_part / (n - 1)) rank_cost(n) sum_j c_j band_j(w)

where ``band_j`` rises with slope one from edge ``e_j`` to edge ``e_(j+1)`` and ``c_j >= 0`` is the
marginal cost of a byte in that band: continuous, and never falling with size.

Over a network whose ``fill`` is ``f``, a reduction or an all-gather of latency ``a`` whose bytes
take ``x`` past the NICs takes ``2 f sqrt(a x)`` longer. Messages are cut into chunks that follow
one another along the ranks: more chunks pay the latency more often, fewer leave the other ranks
waiting, and at the best chunk size ``a + x`` becomes ``(sqrt(a) + sqrt(x))^2`` (Johnsson and Ho
1989; NCCL's chunks shrink with the message, src/enqueue.cc). An all-to-all posts a message to every
peer, so its latency grows with the peers. The first `NET_CHUNK_MIB` of a message go through one
channel; the messages to all peers go in parallel.

A host thread serves each NIC and handles one message at a time. Where it is slow (`message_us`),
the number of messages sets the time, not their bytes. A message has `NET_CHUNK_MIB` in an
all-to-all. In a tree over racks whose switches reduce, it has `tree_chunk_mib`, and at most
`SWITCH_HEADS` ranks of a rack send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from predictor import units
from predictor.errors import InputError
from predictor.hardware.schema import Curve, HardwareProfile, Inter
from predictor.model.topology import Topology


def tree_chunk_mib(parts: int) -> float:
    """Return the chunk size, in MiB, of a tree over ``parts`` domains whose switches reduce.

    NCCL 2.26, src/enqueue.cc: NCCL_NVLS_CHUNKSIZE, and half of it from four parts on.
    """
    return NET_CHUNK_MIB / (2 if parts >= 4 else 1)


def bus_factor(op: str, ranks: int) -> float:
    """Return the bus bytes per byte of buffer (nccl-tests, doc/PERFORMANCE.md)."""
    return (2.0 if op == "all_reduce" else 1.0) * (ranks - 1) / ranks


def hyperbola(w: Array, edge: float) -> Array:
    """Return ``sqrt(w^2 + edge^2) - edge`` without cancellation.

    It is flat below the edge and has slope one above.
    """
    return np.asarray(w * w / np.maximum(np.hypot(w, edge) + edge, np.finfo(np.float64).tiny))


def bands(w: Array, edges: Sequence[float]) -> Array:
    """Count the bytes of ``w`` that fall into each size band, ``[..., edges]``."""
    rises = [hyperbola(w, edge) for edge in edges] + [np.zeros_like(w)]
    return np.stack([a - b for a, b in pairwise(rises)], axis=-1)


def rank_cost(curve: Curve, ranks: int) -> float:
    """Return the factor on the marginal costs at this rank count.

    It is the product of two factors: one for the part that a rank keeps, one for the wiring. The
    second is interpolated linearly in log2 of the ranks between measured counts.
    """
    own = 1.0 + curve.own_part / (ranks - 1)
    if not curve.rank_cost:
        return own
    counts = sorted(curve.rank_cost)
    values = [curve.rank_cost[n] for n in counts]
    return own * float(np.interp(np.log2(ranks), np.log2(counts), values))


def latency_ms(curve: Curve, ranks: int) -> float:
    """Return the time of an empty message."""
    doublings = curve.latency_per_doubling_us * float(np.log2(ranks))
    return units.us(curve.latency_us + doublings + curve.latency_per_rank_us * (ranks - 1))


def transfer_ms(curve: Curve, bus_bytes: Array, ranks: int) -> Array:
    """Return the time beyond the latency in ms, in the shape of ``bus_bytes``."""
    edges = [units.MIB * edge for edge in curve.edge_mib]
    costs = units.us(1.0) / units.MIB * np.asarray(curve.us_per_mib)
    return np.asarray(bands(bus_bytes, edges) @ costs) * rank_cost(curve, ranks)


NET_CHUNK_MIB = 0.125
"""Largest piece of a message between two ranks that a channel sends at a time over a network
(NCCL_P2P_NET_CHUNKSIZE, 128 KiB)."""
SWITCH_HEADS = 32
"""Most ranks of a domain whose NICs carry an all-reduce that the domain's switch reduces
(NCCL_MAX_NVLS_ARITY)."""
Array = NDArray[np.float64]
Op = Literal["all_to_all", "all_reduce", "reduce_scatter", "all_gather"]
OPS: tuple[Op, ...] = ("all_to_all", "all_reduce", "reduce_scatter", "all_gather")
Scope = str
SCOPES = ("world", "intra", "cross")


@dataclass(frozen=True)
class Uplink:
    """Links that the ranks of one part of a network share to reach the others.

    Args:
        curve: cost curve of a NIC at the rate of a rank's share.
        ranks, ring_ranks, crossings, parts, latency_us: as in `predictor.model.topology`.
    """

    curve: Curve
    ranks: float
    ring_ranks: float
    crossings: int
    parts: int
    latency_us: float


@dataclass(frozen=True)
class Level:
    """Ranks joined by one link: ``inner`` of them are already joined by faster ones.

    Args:
        group: profile group that holds the link's costs per byte.
        curve: cost curve of the collective on the link.
        kind: ``nvlink``; ``host``: PCIe between the domains of a host, which a ring crosses over
            one slot; ``nic``: one NIC for each inner rank.
        tree_cost: factor on the bytes of an all-reduce inside a domain while a tree joins the
            domains.
        in_network, fill, peer_us_per_mib, message_us: see `predictor.hardware.schema.Inter`.
        switch: cost curve of an all-reduce in the switch of a domain; None without such a switch.
        uplinks: uplinks of the levels of the network, where ``kind`` is ``nic``.
    """

    group: str
    curve: Curve
    inner: int
    outer: int
    kind: Literal["nvlink", "host", "nic"] = "nvlink"
    tree_cost: float = 1.0
    in_network: bool = False
    fill: float = 0.0
    peer_us_per_mib: float = 0.0
    message_us: float = 0.0
    switch: Curve | None = None
    uplinks: tuple[Uplink, ...] = ()

    @property
    def ranks(self) -> int:
        return self.outer // self.inner

    @property
    def latency_ms(self) -> float:
        return latency_ms(self.curve, self.ranks)

    @property
    def crossings_ms(self) -> float:
        """Latency between the parts of a network, up a tree or ring over them and down again."""
        hops = [2 * np.log2(uplink.parts) * uplink.latency_us for uplink in self.uplinks]
        return units.us(float(sum(hops)))

    def messages_ms(self, past_nic: Array, chunk_mib: float) -> Array:
        """Return the host's time to send these bytes past a NIC and to receive as many."""
        return np.asarray(past_nic * (2 * units.us(self.message_us) / units.mib(chunk_mib)))


def all_to_all(size: Array, levels: Sequence[Level]) -> Array:
    """Price an all-to-all: each level carries the bytes for the ranks that it joins; all levels run
    at once."""
    total = levels[-1].outer
    times = []
    for level in levels:
        bus_bytes = size * ((level.outer - level.inner) / total)
        # every rank beyond the inner ones is a peer of its own
        parties = level.outer - level.inner + 1
        transfer = transfer_ms(level.curve, bus_bytes, parties)
        transfer = np.maximum(transfer, level.messages_ms(bus_bytes, NET_CHUNK_MIB))
        for uplink in level.uplinks:
            leaving = size * ((total - uplink.ranks) / total)
            transfer = np.maximum(transfer, transfer_ms(uplink.curve, leaving, parties))
        crossing = units.us(sum(uplink.latency_us for uplink in level.uplinks))
        chunk = np.minimum(size / total, units.mib(NET_CHUNK_MIB))
        first = units.us(level.peer_us_per_mib) / units.MIB * chunk
        times.append(latency_ms(level.curve, parties) + crossing + first + transfer)
    return np.asarray(np.max(times, axis=0))


def hierarchical(op: Op, size: Array, levels: Sequence[Level]) -> Array:
    """Price pipelined levels, each of which sees ``1/inner`` of the buffer per rank."""
    latency = sum(level.latency_ms for level in levels) + levels[-1].crossings_ms
    return np.asarray(latency + _hierarchical_transfer(op, size, levels))


def _hierarchical_transfer(op: Op, size: Array, levels: Sequence[Level]) -> Array:
    transfers = []
    for level in levels:
        links = [(level.curve, level.ranks, float(level.inner))]
        links += [(up.curve, up.parts, up.ranks) for up in level.uplinks]
        for curve, parts, inner in links:
            transfers.append(
                transfer_ms(curve, size * (bus_factor(op, parts) / inner), level.ranks)
            )
    return np.asarray(np.max(transfers, axis=0))


def ring_or_tree(op: Op, size: Array, levels: Sequence[Level], rings: Array | None = None) -> Array:
    """Price a ring or a tree, whichever is faster.

    An all-reduce may also use the reduction of a switch within a domain.

    Args:
        rings: times of an all-reduce over NICs as a reduce-scatter followed by an all-gather.
    """
    if op != "all_reduce":
        return _ring(op, size, levels)
    first, *outer = levels
    over_nics = levels[-1].kind == "nic"
    reduce = _tree if over_nics else partial(_ring, op)
    times = [reduce(size, levels)] if rings is None else [reduce(size, levels), rings]
    fastest = np.asarray(np.min(times, axis=0))
    if first.switch is None:
        return fastest
    added_up = reduce(size, [replace(first, curve=first.switch), *outer])
    # NCCL chooses by bytes alone; the time to handle messages comes on top of its choice
    handled = _messages_of_heads(size, levels[-1]) if over_nics and outer else 0.0
    return np.where(added_up < fastest, np.maximum(added_up, handled), fastest)


def _messages_of_heads(size: Array, top: Level) -> Array:
    """Price the hosts' messages in a tree over domains whose switches reduce."""
    past_nic = size * (_sends(top) / min(top.inner, SWITCH_HEADS))
    return top.messages_ms(past_nic, tree_chunk_mib(top.ranks))


def _sends(top: Level) -> float:
    """Count how often a tree sends a byte past the NICs of a domain.

    A double binary tree sends it twice: to two children, or to one child and the parent. With one
    other domain, or with a reduction in the switches, it is sent once.
    """
    return 1.0 if top.in_network or top.ranks == 2 else 2.0


def _pipelined(latency: float, over_hosts: Array, transfer: Array, fill: float) -> Array:
    """Add latency, transfer and the wait until the pipeline over the hosts is full.

    Args:
        over_hosts: transfer time past the NICs; a domain's own curve already contains its fill.
        transfer: transfer time of the busiest link.
    """
    return np.asarray(latency + transfer + 2 * fill * np.sqrt(latency * over_hosts))


def _ring(op: Op, size: Array, levels: Sequence[Level]) -> Array:
    """Price a ring: the bus bytes of all ranks flow past each link."""
    ranks, first = levels[-1].outer, levels[0]
    bus_bytes = size * bus_factor(op, ranks)
    transfers, latency, over_hosts = [], 0.0, np.zeros_like(size)
    for level in levels:
        links = level.inner if level.kind == "nic" else 1
        among = ranks if level.kind == "nvlink" else level.ranks
        over_hosts = transfer_ms(level.curve, bus_bytes / links, among)
        transfers.append(over_hosts)
        # a hop to another domain adds the hops inside that domain
        inside = (level.ranks - 1) * (level.inner - 1) * first.curve.latency_per_rank_us
        latency += level.latency_ms + units.us(inside)
        for uplink in level.uplinks:
            transfers.append(transfer_ms(uplink.curve, bus_bytes / uplink.ring_ranks, among))
            latency += units.us(max(0, uplink.crossings - 1) * uplink.latency_us)
    slowest = np.asarray(np.max(transfers, axis=0))
    return _pipelined(latency, over_hosts, slowest, levels[-1].fill)


def _tree(size: Array, levels: Sequence[Level]) -> Array:
    """Price a tree all-reduce over domains that reduce and broadcast inside."""
    *inner, top = levels
    ways = _sends(top)
    transfer = transfer_ms(top.curve, size * (ways / top.inner), top.ranks)
    for up in top.uplinks:
        shared = transfer_ms(up.curve, size * (ways / up.ranks), top.ranks)
        transfer = np.maximum(transfer, shared)
    over_hosts = transfer
    if inner:
        within = top.tree_cost * _hierarchical_transfer("all_reduce", size, inner)
        transfer = np.maximum(transfer, within)
    latency = sum(level.latency_ms for level in levels) + top.crossings_ms
    return _pipelined(latency, over_hosts, transfer, top.fill)


# Curves are tabulated once per scope, so that scoring many plans costs one interpolation. Sixteen
# points an octave keep the chord within 0.1 % of a curve that bends once an octave.
_FIRST_OCTAVE, _LAST_OCTAVE, _PER_OCTAVE = 8, 38, 16
_STEPS = (_LAST_OCTAVE - _FIRST_OCTAVE) * _PER_OCTAVE + 1
_SIZES = np.concatenate(([0.0], np.logspace(_FIRST_OCTAVE, _LAST_OCTAVE, _STEPS, base=2.0)))


class Collectives:
    """Times of the four collectives on given hardware and topology; see the module's text.

    Each takes sizes in bytes and a scope, and gives ms in the shape of the sizes. Sizes follow
    nccl-tests: all-to-all: the whole send buffer of the busiest rank, its own part included;
    all-reduce: the buffer; reduce-scatter: the full input; all-gather: the full output. Scopes:
    ``world`` all ranks; ``intra`` the ranks of one intra group; ``cross`` one rank of each intra
    group. Among one rank everything is free.

    `largest` has the largest message priced so far, by collective and scope.
    """

    def __init__(self, hw: HardwareProfile, topology: Topology) -> None:
        self.hardware = hw
        self.topology = topology
        self.largest: dict[tuple[Op, Scope], float] = {}
        self._tables: dict[tuple[Op, Scope], Array] = {}

    def _time(self, op: Op, size_bytes: ArrayLike, scope: Scope = "world") -> Array:
        size, table = np.asarray(size_bytes, dtype=np.float64), self._table(op, scope)
        most = float(size.max(initial=0.0))
        self.largest[op, scope] = max(most, self.largest.get((op, scope), 0.0))
        slope = (table[-1] - table[-2]) / (_SIZES[-1] - _SIZES[-2])
        beyond = np.maximum(size - _SIZES[-1], 0.0)
        return np.asarray(np.interp(size, _SIZES, table) + slope * beyond)

    all_to_all = partialmethod(_time, "all_to_all")
    all_reduce = partialmethod(_time, "all_reduce")
    reduce_scatter = partialmethod(_time, "reduce_scatter")
    all_gather = partialmethod(_time, "all_gather")

    def floor_ms(self, op: Op, scope: Scope = "world") -> float:
        """Return the time of an empty message: a lower bound at every size."""
        return float(self._time(op, 0.0, scope))

    def ranks(self, scope: Scope) -> int:
        levels = self._levels("all_to_all", scope)
        return levels[-1].outer if levels else 1

    def shares(self, op: Op, scope: Scope) -> list[tuple[str, float]]:
        """Pair each profile group with the share of a message that its link sees.

        Among only the ranks that the link joins, a message of that share moves the same bus bytes.
        """
        levels = self._levels(op, scope)
        if op == "all_to_all":
            return [(v.group, (v.outer - v.inner + 1) / levels[-1].outer) for v in levels]
        return [(level.group, 1 / level.inner) for level in levels]

    def _table(self, op: Op, scope: Scope) -> Array:
        if (op, scope) not in self._tables:
            if scope not in SCOPES:
                raise InputError(f"scope '{scope}' is unknown; allowed are {', '.join(SCOPES)}")
            levels = self._levels(op, scope)
            if not levels:
                times = np.zeros_like(_SIZES)
            elif op == "all_to_all":
                times = all_to_all(_SIZES, levels)
            elif self.hardware.inline:
                times = hierarchical(op, _SIZES, levels)
            else:
                rings = None
                if op == "all_reduce" and levels[-1].kind == "nic":
                    rings = self._table("reduce_scatter", scope) + self._table("all_gather", scope)
                times = ring_or_tree(op, _SIZES, levels, rings)
            if self.hardware.learned is not None:
                latency, beyond = self.hardware.learned.of_messages()
                times = latency * times[0] + beyond * (times - times[0])
            self._tables[op, scope] = times
        return self._tables[op, scope]

    def _levels(self, op: Op, scope: Scope) -> list[Level]:
        """Return the levels with more than one party, the fastest link first."""
        top, links = self.topology, self.hardware.collectives
        if scope == "cross":
            levels = [_nics(op, links.inter, 1, top.groups, top)]
        else:
            domain = min(top.nvlink_domain, top.world_size)
            group = min(top.intra_group_size, top.world_size)
            within, switch = getattr(links.intra, op), links.intra.in_switch
            # between the domains of a host: the bandwidth of bulk copies over its PCIe links
            cost = units.MIB / self.hardware.memory.host_link / units.us(1.0)
            flat = {"edge_mib": (0.0,), "us_per_mib": (cost,), "rank_cost": {}, "own_part": 0.0}
            levels = [
                Level("collectives.intra", within, 1, domain, switch=switch),
                Level("memory", within.model_copy(update=flat), domain, group, "host"),
            ]
            if scope == "world":
                levels.append(_nics(op, links.inter, group, top.world_size, top))
        return [level for level in levels if level.outer > level.inner]


def _nics(op: Op, link: Inter, inner: int, outer: int, topology: Topology) -> Level:
    """Return the level of the NICs, one a rank.

    Args:
        inner: ranks of each intra group that take part.
        outer: all ranks that take part.
    """
    share = outer / topology.world_size
    uplinks = tuple(
        Uplink(
            getattr(link.at(level.rate(link.nic_gbit_s)), op),
            level.ranks * share,
            level.ring_ranks * share,
            level.crossings,
            level.parts,
            level.latency_us,
        )
        for level in topology.network
        if level.parts > 1
    )
    return Level(
        "collectives.inter",
        getattr(link, op),
        inner,
        outer,
        "nic",
        link.tree_cost,
        link.in_network,
        link.fill or 0.0,
        link.peer_us_per_mib or 0.0,
        link.message_us or 0.0,
        uplinks=uplinks,
    )
