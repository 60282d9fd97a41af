"""How the curves between hosts of the shipped GPU profiles follow from the public tables.

A NIC carries what `predictor.cost.collectives` says passes it. Rows of cards without a profile of
their own tell what a byte past a NIC costs; tests hold the shipped files against these rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.fit.collectives import ROBUST
from lab.fit.public_tables import read_collectives
from lab.validate.links import SLINGSHOT, LinkRow, read_links
from lab.validate.links import slingshot as slingshot_row
from lab.validate.links import tcpx as tcpx_row
from predictor.cost.collectives import bus_factor
from predictor.hardware.schema import Curve
from predictor.units import mib
from shardopt.calibrate.collectives import CollectiveRows, fit_curve

RDMA_PLATFORM = "MI350-class"
RDMA_GBIT_S = 400.0
RDMA_EDGES_MIB = (0.0, 0.25, 1.0, 4.0, 16.0)
"""Of bytes past one NIC."""
RDMA_PROFILES = ("h100-sxm", "h200-sxm", "b200", "a100-40gb", "a100-80gb", "v100-32gb")
FEWEST_BYTES = 2**20
SLINGSHOT_EDGES_MIB = (0.0, 0.0625, 0.5, 4.0, 16.0)
SEND_RECV_US = {"h100": 9.1, "a100": 15.3}
"""Shortest message between two hosts (vidur: DGX H100, DGX A100)."""
EXCHANGE_US = 15.0
"""Of an all-to-all per doubling of the ranks: the middle of that and the empty all-to-alls of 2x2
H20 (20 us) and 2x8 RTX 6000D (51 us)."""


def rdma(folder: Path) -> Curve:
    """A byte past a NIC of 400 Gbit/s, from a ring over two hosts of eight.

    Rows: all-reduces from 1 MiB on 2x8 MI350-class cards (rccl-tests), whose two rings-over-all
    halves each send ``15/16`` of the buffer past eight NICs.
    """
    large = _ring_rows(folder)
    past = large.size_bytes * bus_factor("all_gather", 16) / 8
    each = CollectiveRows(past, np.full_like(past, 2.0), large.time_us)
    return fit_curve(each, "past a NIC", RDMA_EDGES_MIB, latency_us=0.0, reweightings=ROBUST)


def _ring_rows(folder: Path) -> CollectiveRows:
    """From 1 MiB, with the time beyond an empty one of either half."""
    found = [
        rows
        for (platform, wiring, op), rows in read_collectives(folder).tables.items()
        if platform.startswith(RDMA_PLATFORM) and (wiring, op) == ("2x8", "all_reduce")
    ]
    if len(found) != 1:
        raise LookupError(f"{len(found)} all-reduces on 2x8 {RDMA_PLATFORM}; one is needed")
    rows = found[0]
    empty = float(rows.time_us.min())
    large = rows.where(rows.size_bytes >= FEWEST_BYTES)
    return CollectiveRows(large.size_bytes, large.ranks, (large.time_us - empty) / 2)


def rows_behind(folder: Path) -> dict[str, int]:
    """Profile -> rows that tell what a byte past its NICs costs."""
    of_ring = len(_ring_rows(folder).ranks)
    rows = [row for row in read_links(folder)[0] if slingshot_row(row)]
    return dict.fromkeys(RDMA_PROFILES, of_ring) | {SLINGSHOT: len(rows)}


@dataclass(frozen=True)
class Hops:
    """Latencies between hosts: of a hop, and of an all-to-all per doubling of the ranks."""

    hop_us: float
    exchange_us: float = EXCHANGE_US


def tcpx(rows: Sequence[LinkRow]) -> Curve:
    """A byte past a NIC that is reached over TCP: nothing until the latency is used up.

    Two tables of all-gathers on 2x8 H100 disagree by 1.4 in bandwidth. The latency is the geometric
    mean of their 16 MiB, the cost of a byte that of their largest sizes. Steps of many chunks are
    under way at once, so that transfers hide behind the latency: ``sqrt(latency^2 + (cost w)^2)``.
    """
    found = [row for row in rows if tcpx_row(row)]
    small = [row.time_us for row in found if row.size_bytes == mib(16)]
    large = [
        row.time_us / (row.size_bytes * bus_factor("all_gather", row.wiring.ranks) / 8 / mib(1))
        for row in found
        if row.size_bytes > mib(16)
    ]
    latency, cost = (float(np.exp(np.mean(np.log(times)))) for times in (small, large))
    return Curve(latency_us=latency, edge_mib=(0.0, latency / cost), us_per_mib=(0.0, cost))


def slingshot(rows: Sequence[LinkRow], within_us: float) -> Curve:
    """A byte past a NIC of Slingshot, from trees over two hosts of four GH200.

    Args:
        within_us: of an empty all-reduce on one of the hosts.
    """
    found = [row for row in rows if slingshot_row(row)]
    empty = min(row.time_us for row in found)
    past = [(row.size_bytes / 4, 2.0, row.time_us - empty) for row in found if row.time_us > empty]
    curve = fit_curve(
        CollectiveRows.of(past),
        "past a NIC",
        SLINGSHOT_EDGES_MIB,
        latency_us=0.0,
        reweightings=ROBUST,
    )
    return curve.model_copy(update={"latency_us": max(0.0, empty - within_us) / 2})


def inter_curves(past_nic: Curve, hops: Hops) -> Mapping[str, Curve]:
    """Curves between hosts whose bytes cost alike.

    A ring hops from host to host; a tree goes up and down, one hop a doubling each way.
    """
    ring = past_nic.model_copy(update={"latency_us": 0.0, "latency_per_rank_us": hops.hop_us})
    doubling = {"latency_us": 0.0, "latency_per_doubling_us": 2 * hops.hop_us}
    exchange = {"latency_us": 0.0, "latency_per_doubling_us": hops.exchange_us}
    return {
        "all_to_all": past_nic.model_copy(update=exchange),
        "all_reduce": past_nic.model_copy(update=doubling),
        "reduce_scatter": ring,
        "all_gather": ring,
    }
