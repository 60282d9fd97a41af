"""Public rows of collectives: the timed operation, and its profile and wiring."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from lab.statistics import grouped
from lab.validate.tables import joined_ranks, profile_of_row, read
from predictor.cost.collectives import OPS, Op
from predictor.csv_rows import MOST_RANKS, Row, count, number
from predictor.hardware.loader import load_hardware
from predictor.hardware.networks import Network
from predictor.units import mib
from shardopt.calibrate.collectives import CollectiveRows

T = TypeVar("T")

NCCL_FILE = "nccl_collectives_measured.csv"
NCCL_EXTRA_FILE = "nccl_rccl_extra_measured.csv"
MULTIHOST_FILE = "nccl_multihost_2026.csv"
NCCL_TESTS_FILE = "nccl_tests_measured.csv"
XLA_FILE = "xla_collectives_measured.csv"
VIDUR_FILE = "vidur_collectives_measured.csv"
VTRAIN_FILE = "vtrain_allreduce_measured.csv"


@dataclass(frozen=True)
class Layout:
    """Columns of a table by their content; None: it has no such column.

    Args:
        times: the first one that is not empty counts.
        setup: further columns that repeats of one measurement share.
        platform: name of a table of one platform, from the columns; empty where the form of the
            curve is not fitted to it.
    """

    ranks: str
    size: str = "size_bytes"
    times: tuple[str, ...] = ("time_us",)
    setup: tuple[str, ...] = ()
    hosts: str | None = None
    ranks_of_host: str | None = None
    collective: str | None = "collective"
    platform: str = ""


_NCCL = Layout(
    "n_gpus",
    times=("time_us_out_of_place", "time_us_in_place"),
    setup=("source",),
    hosts="nodes",
    platform="{gpu} ({log})",
)
LAYOUTS: Mapping[str, Layout] = {
    NCCL_FILE: _NCCL,
    NCCL_EXTRA_FILE: _NCCL,
    MULTIHOST_FILE: replace(_NCCL, setup=("source", "network", "note"), platform=""),
    NCCL_TESTS_FILE: Layout("ranks", setup=("system", "nccl")),
    XLA_FILE: Layout("ranks", setup=("method", "concurrent_groups", "dtype")),
    # the least over ranks and repeats, because kernels that start early wait for the others
    VIDUR_FILE: Layout(
        "num_workers",
        size="size",
        times=("us_min",),
        setup=("platform",),
        ranks_of_host="devices_per_node",
        platform="{platform} (vidur)",
    ),
    VTRAIN_FILE: Layout(
        "n_gpus", times=("time_us_out_of_place",), collective=None, platform="{gpu} (vtrain)"
    ),
}
NAMES = {op.replace("_", ""): op for op in OPS}
UNCLEAR: dict[str, Op] = {"allgatheroralltoall": "all_gather"}
"""dstack's rows do not say which; an all-to-all would move 214 GB/s over NICs of 100 GB/s."""
KINDS = {
    "TCPXO": "tcpxo",
    "TCPX": "tcpx",
    "SLINGSHOT": "slingshot",
    "ROCE": "roce",
    "EFA 4X100G": "efa-v1",
    "EFA 8X400G": "efa-v3",
    "EFA": "efa-v2",
    "INFINIBAND NDR": "ib-ndr",
}
"""Part of a network's name in a table -> its kind (`predictor.hardware.networks`)."""
NO_PEERS = "l40s-no-peers"
"""Profile of L40S hosts whose cards communicate through host memory."""
UNSTATED_GBIT_S = {"unspecified IB": 800.0}
"""Line rate of hosts whose table names none: the largest message moves 91.7 GB/s of bus bytes out
of a host, and the next NIC rate on sale is 100 GB/s."""
UNSTATED_GPU = "h100-sxm"
"""Profile of rows over EFA whose table names no instance type: the most common instance with EFA at
the date of those rows."""
PAIRS = "NVLINK PAIRS"


@dataclass(frozen=True)
class Timing:
    """Row of a table.

    Args:
        cells: the file's own columns.
        hosts: hosts of equally many ranks; 0 where the table does not say.
    """

    file: str
    cells: Row
    hosts: int
    ranks: int
    collective: str
    size_bytes: float
    time_us: float


def _timing(file: str, row: Row) -> Timing:
    layout = LAYOUTS[file]
    ranks = count(row, layout.ranks, MOST_RANKS)
    if ranks == 1:
        raise ValueError(f"{layout.ranks} is 1; a rank alone exchanges nothing")
    parts = layout.hosts or layout.ranks_of_host
    by = count(row, parts, MOST_RANKS) if parts else 1
    if ranks % by:
        raise ValueError(f"{layout.ranks}: {ranks} ranks do not divide by {parts}, {by}")
    hosts = ranks // by if layout.ranks_of_host else 0 if file == XLA_FILE else by
    timed = next((column for column in layout.times if row[column]), layout.times[-1])
    name = row[layout.collective].strip() if layout.collective else "all_reduce"
    op = NAMES.get(name.replace("_", ""), name)
    return Timing(file, row, hosts, ranks, op, number(row, layout.size), number(row, timed))


Key: TypeAlias = tuple[str, str, str]
"""Platform, wiring (hosts x ranks, or a rank range), collective."""


def read_collectives(folder: Path) -> tuple[dict[Key, CollectiveRows], list[str]]:
    """Read tables by platform, wiring and collective, with or without a profile.

    Returns:
        The tables, and a message for every row that cannot be read; missing files are left out.
    """
    rows, problems = _read(folder, _timing)
    rows = [row for row in rows if LAYOUTS[row.file].platform]
    return {
        key: CollectiveRows.of([(r.size_bytes, float(r.ranks), r.time_us) for r in table_rows])
        for key, table_rows in sorted(grouped(rows, _key).items())
    }, [text for text in problems if LAYOUTS[text.partition(":")[0]].platform]


def _key(row: Timing) -> Key:
    log = row.cells.get("source", "").split(",")[0]
    platform = LAYOUTS[row.file].platform.format_map({**row.cells, "log": log})
    wires = "1x2..8" if row.file == VTRAIN_FILE else f"{row.hosts}x{row.ranks // row.hosts}"
    return platform, wires, row.collective


def _read(folder: Path, parse: Callable[[str, Row], T]) -> tuple[list[T], list[str]]:
    """Parse each row of every table in a folder; return results, and messages on left-out rows."""
    tables = [read(folder, name, partial(parse, name)) for name in LAYOUTS]
    return [row for t in tables for row in t.rows], [text for t in tables for text in t.problems]


@dataclass(frozen=True)
class Wiring:
    """Hosts and links of a row's ranks.

    Args:
        profile: shipped profile of its GPU.
        hosts: hosts of equally many ranks.
        domain: ranks joined by NVLink.
        nic_gbit_s: line rate of the hosts' NICs over the ranks of a host, where the table gives
            it; None: the profile's.
        network: the table's name of the network.
    """

    profile: str
    hosts: int
    ranks: int
    domain: int
    nic_gbit_s: float | None = None
    network: str = ""

    @property
    def kind(self) -> str | None:
        """Kind of the network between hosts; None: the profile's."""
        name = self.network.upper()
        return next((kind for part, kind in KINDS.items() if part in name), None)

    @property
    def across(self) -> bool:
        """True if NICs join some of the ranks."""
        return self.ranks > self.domain and self.hosts > 1

    @property
    def pairs(self) -> bool:
        """True if bridges join the cards in pairs."""
        return PAIRS in self.network.upper()

    @property
    def rate_known(self) -> bool:
        """True if the NICs are stated, or those sold with the profile's platform."""
        return self.nic_gbit_s is not None or self.domain > self.ranks // self.hosts


@dataclass(frozen=True)
class LinkRow:
    """Measured collective that can be predicted.

    Args:
        op, size_bytes: as `predictor.cost.collectives` calls and counts them.
    """

    file: str
    cells: Row
    wiring: Wiring
    op: Op
    size_bytes: float
    time_us: float

    @property
    def key(self) -> tuple[str | float, ...]:
        """Key that repeats of one measurement share."""
        setup = (self.cells.get(column, "") for column in LAYOUTS[self.file].setup)
        at = self.wiring
        return *setup, at.profile, at.hosts, at.ranks, self.op, self.size_bytes

    @property
    def timer_of_a_program(self) -> bool:
        """True if the time is that of a program around the collective, not of nccl-tests."""
        return self.cells.get("method", "").startswith("XLA")

    @property
    def skewed(self) -> bool:
        """True if the time includes the skew of hosts: 20 to 40 us in XLA's program, 10 to 70 us in
        one process that launches on eight GPUs (superbenchmark)."""
        return self.timer_of_a_program or "superbenchmark" in self.cells.get("source", "")

    @property
    def copied_bytes(self) -> float:
        """Bytes that the timed program copies beside the collective.

        XLA reduces in place, so its program first copies the buffer: its all-reduce among one rank
        takes as long as reading and writing it (822 us for 1 GiB on an H100).
        """
        return self.size_bytes if self.timer_of_a_program and self.op == "all_reduce" else 0.0


def read_links(folder: Path) -> tuple[list[LinkRow], list[str]]:
    """Read the rows of every table in ``folder``, and a message for each left out."""
    return _read(folder, link_of)


def link_of(file: str, cells: Row) -> LinkRow:
    """Parse a row of a table.

    Raises:
        ValueError: it cannot be predicted, with the reason.
    """
    row = _timing(file, cells)
    op = {**NAMES, **UNCLEAR}.get(row.collective.replace("_", ""))
    if op is None:
        raise ValueError(f"collective is '{row.collective}', which no predicted iteration runs")
    return LinkRow(row.file, row.cells, _wiring(row), op, row.size_bytes, row.time_us)


def _wiring(row: Timing) -> Wiring:
    unnamed = row.file == VIDUR_FILE and not row.cells.get("gpu")
    if row.cells.get("gpu") == "unstated":
        hardware = load_hardware(UNSTATED_GPU)
    else:
        hardware = profile_of_row(row.cells, "platform" if unnamed else "gpu")
    ranks, network = row.ranks, row.cells.get("network", "")
    hosts = row.hosts or -(-ranks // hardware.gpus_per_host)
    if row.file == XLA_FILE and ranks <= hardware.nvlink_domain:
        return Wiring(hardware.name, hosts, ranks, ranks)
    if ranks % hosts:
        raise ValueError(f"{ranks} ranks do not fill {hosts} equal hosts")
    local = ranks // hosts
    domain = joined_ranks(hardware, hosts, local)
    if PAIRS in network.upper():
        domain = min(2, local)
    if hosts == 1:
        no_peers = row.file == NCCL_TESTS_FILE and hardware.name == "l40s"
        name = NO_PEERS if no_peers else hardware.name
        return Wiring(name, hosts, ranks, domain, None, network)
    wiring = Wiring(hardware.name, hosts, ranks, domain, line_rate(network, local), network)
    if wiring.nic_gbit_s is None and wiring.kind is not None:
        usual = Network(wiring.kind).joins(hardware).collectives.inter.nic_gbit_s
        return replace(wiring, nic_gbit_s=usual)
    return wiring


def line_rate(network: str, local: int) -> float | None:
    """Return the NIC Gbit/s per rank that the name of a host's network states, None without one.

    Args:
        network: e.g. ``RoCE 8x400G + NVSwitch`` or ``IB 100G x1 per node``.
        local: ranks of a host.
    """
    if network in UNSTATED_GBIT_S:
        return UNSTATED_GBIT_S[network] / local
    for pattern, rate, nics in ((r"(\d+)x(\d+)G", 2, 1), (r"(\d+)G x(\d+) per node", 1, 2)):
        if match := re.search(pattern, network):
            return float(match[rate]) * float(match[nics]) / local
    return None


SLINGSHOT = "gh200"
SEVERAL_HOSTS = 8
"""Ranks from which a rack has only one table; for fewer ranks, two tables disagree below some MiB,
and one ends before 1 GiB."""
TREE_BYTES = 2.0**33


def gave_constants(row: LinkRow) -> bool:
    """Return true if a constant of the row's profile comes from this row."""
    at, size = row.wiring, row.size_bytes
    if row.file == VTRAIN_FILE:
        return at.profile == "v100-32gb"
    tree = at.across and size == TREE_BYTES
    return (
        times_nccl(row)
        # an all-reduce over two hosts of H100, whose NICs are not the limit
        or (tree and (at.profile, row.op, at.hosts) == ("h100-sxm", "all_reduce", 2))
        # an all-to-all over two racks of GB300
        or (tree and (at.profile, row.op) == ("gb300", "all_to_all"))
        or tcpx(row)
        or slingshot(row)
        # the largest message of a table that does not state its network
        or ("unspecified" in at.network and size == 2**34)
        # RCCL on eight MI355X, which also gave the bytes past a NIC, and large messages on MI300X
        or at.profile == "mi355x"
        or (at.profile == "mi300x" and size >= mib(64))
    )


def times_nccl(row: LinkRow) -> bool:
    """Return true for nccl-tests within one domain, by a process a GPU."""
    if row.file == XLA_FILE and row.wiring.profile == "gb200":
        other_table = row.wiring.ranks < SEVERAL_HOSTS and row.size_bytes < mib(1024)
        return not row.timer_of_a_program and not other_table
    return row.file == NCCL_TESTS_FILE


def tcpx(row: LinkRow) -> bool:
    """Return true for 16 MiB and the largest size of either GPUDirect-TCPX table."""
    largest = mib(512) if "Google" in row.cells.get("source", "") else 2**33
    return row.wiring.kind == "tcpx" and row.size_bytes in (mib(16), largest)


def slingshot(row: LinkRow) -> bool:
    """Return true for every second size of all-reduces on two hosts of GH200."""
    at = row.wiring
    same_setup = (at.profile, row.op, at.hosts) == (SLINGSHOT, "all_reduce", 2)
    return same_setup and math.log2(row.size_bytes) % 2 == 0
