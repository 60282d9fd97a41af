"""Public rows of collectives, each with the profile and the wiring that it was measured on."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lab.validate.public_tables import (
    NCCL_EXTRA_FILE,
    NCCL_FILE,
    OPS,
    VIDUR_FILE,
    VTRAIN_FILE,
    rank_count,
)
from lab.validate.report import no_profile
from predictor.cost.collectives import Op
from predictor.csv_rows import MOST_RANKS, Row, count, number, read_table
from predictor.hardware.device_names import profile_of_device
from predictor.hardware.loader import load_hardware
from predictor.hardware.networks import Network
from predictor.units import mib

NCCL_TESTS_FILE = "nccl_tests_measured.csv"
XLA_FILE = "xla_collectives_measured.csv"

NAMES: Mapping[str, Op] = {
    **OPS,  # type: ignore[dict-item]
    "all_to_all": "all_to_all",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    # dstack's rows do not say which; an all-to-all would put 214 GB/s through NICs of 100 GB/s
    "allgather_or_alltoall": "all_gather",
}
KINDS = {"TCPXO": "tcpxo", "TCPX": "tcpx", "SLINGSHOT": "slingshot", "ROCE": "roce"}
"""Part of a network's name in a table -> its kind (`predictor.hardware.networks`)."""
NO_PEERS = "l40s-no-peers"
"""Profile of L40S hosts whose cards reach each other through the memory of the host."""
UNSTATED_GBIT_S = {"unspecified IB": 800.0}
"""Of a host whose table names no line rate: its largest message moves 91.7 GB/s of bus bytes out of
a host, and the next rate that NICs of hosts are sold with is 100 GB/s."""
PAIRS = "NVLINK PAIRS"


@dataclass(frozen=True)
class Wiring:
    """Where the ranks of a row sat.

    Args:
        profile: shipped one of its GPU.
        hosts: of equally many ranks.
        domain: ranks joined by NVLink.
        nic_gbit_s: line rate of the hosts' NICs over the ranks of a host, where the table gives
            it; None: the profile's.
        network: as the table names it.
    """

    profile: str
    hosts: int
    ranks: int
    domain: int
    nic_gbit_s: float | None = None
    network: str = ""

    @property
    def kind(self) -> str | None:
        """Of the network between hosts; None: as the profile has it."""
        name = self.network.upper()
        return next((kind for part, kind in KINDS.items() if part in name), None)

    @property
    def across(self) -> bool:
        """Whether NICs join some of the ranks."""
        return self.ranks > self.domain and self.hosts > 1

    @property
    def pairs(self) -> bool:
        """Whether bridges join the cards two by two."""
        return PAIRS in self.network.upper()

    @property
    def rate_known(self) -> bool:
        """Whether the NICs are those that the profile's platform is sold with, or stated."""
        return self.nic_gbit_s is not None or self.domain > self.ranks // self.hosts


@dataclass(frozen=True)
class LinkRow:
    """One measured collective.

    Args:
        cells: the file's own columns.
        size_bytes: as `predictor.cost.collectives` counts it.
        key: rows with equal keys measured the same thing.
    """

    file: str
    cells: Mapping[str, str]
    wiring: Wiring
    op: Op
    size_bytes: float
    time_us: float
    key: tuple[str | float, ...] = ()

    @property
    def timer_of_a_program(self) -> bool:
        """Whether the time is of a whole program around the collective, not of nccl-tests."""
        return self.cells.get("method", "").startswith("XLA")

    @property
    def skewed(self) -> bool:
        """Whether the time holds the skew of hosts beside the collective: 20 to 40 us of XLA's
        program, 10 to 70 us of one process that launches on eight GPUs (superbenchmark)."""
        return self.timer_of_a_program or "superbenchmark" in self.cells.get("source", "")

    @property
    def copied_bytes(self) -> float:
        """Bytes that the timed program copies beside the collective.

        XLA reduces in place, so its program first copies the buffer: its all-reduce among one rank
        takes as long as reading and writing it (822 us for 1 GiB on an H100).
        """
        return self.size_bytes if self.timer_of_a_program and self.op == "all_reduce" else 0.0

    @property
    def note(self) -> str:
        """What the table says of the row."""
        return self.cells.get("note", "")


def read_links(folder: Path) -> tuple[list[LinkRow], list[str]]:
    """Rows of every table in ``folder``, and a line of text for each that is left out."""
    rows: list[LinkRow] = []
    problems: list[str] = []
    for name, (columns, parse) in READERS.items():
        if (folder / name).is_file():
            table = read_table(folder / name, columns, parse)
            problems += table.problems
            rows += [replace(row, file=name) for row in table.rows]
    return rows, problems


def _nccl(row: Row) -> LinkRow:
    op = _op(row)
    hosts, ranks = count(row, "nodes", MOST_RANKS), rank_count(row, "n_gpus")
    wiring = _wiring(row, "gpu", hosts, ranks)
    timed = "time_us_out_of_place" if row["time_us_out_of_place"] else "time_us_in_place"
    size = number(row, "size_bytes")
    key = (row["source"], wiring.profile, hosts, ranks, op, size)
    return LinkRow(NCCL_FILE, row, wiring, op, size, number(row, timed), key)


def _nccl_tests(row: Row) -> LinkRow:
    op, ranks, size = _op(row), rank_count(row, "ranks"), number(row, "size_bytes")
    wiring = _wiring(row, "gpu", 1, ranks)
    if wiring.profile == "l40s":
        wiring = replace(wiring, profile=NO_PEERS)
    key = (row["system"], row["nccl"], ranks, op, size)
    return LinkRow(NCCL_TESTS_FILE, row, wiring, op, size, number(row, "time_us"), key)


def _xla(row: Row) -> LinkRow:
    op = _op(row)
    ranks = rank_count(row, "ranks")
    profile = _profile(row, "gpu")
    hardware = load_hardware(profile)
    hosts = -(-ranks // hardware.gpus_per_host)
    if ranks <= hardware.nvlink_domain:
        wiring = Wiring(profile, hosts, ranks, ranks)
    else:
        wiring = _wiring(row, "gpu", hosts, ranks)
    size = number(row, "size_bytes")
    groups = row.get("concurrent_groups", "")
    key = (row["method"], wiring.profile, ranks, groups, row.get("dtype", ""), op, size)
    return LinkRow(XLA_FILE, row, wiring, op, size, number(row, "time_us"), key)


def _vidur(row: Row) -> LinkRow:
    op = _op(row)
    ranks, local = rank_count(row, "num_workers"), count(row, "devices_per_node", MOST_RANKS)
    if ranks % local:
        raise ValueError(f"num_workers: {ranks} ranks do not divide by devices_per_node, {local}")
    column = "gpu" if row.get("gpu") else "platform"
    wiring = _wiring(row, column, ranks // local, ranks)
    size = number(row, "size")
    key = (row["platform"], wiring.profile, local, ranks, op, size)
    # the shortest over ranks and repeats, because kernels that start early wait for the others
    return LinkRow(VIDUR_FILE, row, wiring, op, size, number(row, "us_min"), key)


def _vtrain(row: Row) -> LinkRow:
    ranks, size = rank_count(row, "n_gpus"), number(row, "size_bytes")
    wiring = _wiring(row, "gpu", 1, ranks)
    time = number(row, "time_us_out_of_place")
    return LinkRow(VTRAIN_FILE, row, wiring, "all_reduce", size, time, (row["gpu"], ranks, size))


def _op(row: Row) -> Op:
    name = row["collective"].strip()
    if name not in NAMES:
        raise ValueError(f"collective is '{name}', which no predicted iteration runs")
    return NAMES[name]


def _profile(row: Row, column: str) -> str:
    name = profile_of_device(row[column])
    if name is None:
        raise ValueError(no_profile(row[column], column))
    return name


def _wiring(row: Row, column: str, hosts: int, ranks: int) -> Wiring:
    if ranks % hosts:
        raise ValueError(f"{ranks} ranks do not fill {hosts} equal hosts")
    local = ranks // hosts
    network = row.get("network", "")
    profile = _profile(row, column)
    hardware = load_hardware(profile)
    rack = hardware.nvlink_domain > hardware.gpus_per_host
    domain = joined_ranks(hardware.nvlink_domain, hosts if rack else 1, local)
    if PAIRS in network.upper():
        domain = min(2, local)
    if hosts == 1:
        return Wiring(profile, hosts, ranks, domain, None, network)
    wiring = Wiring(profile, hosts, ranks, domain, line_rate(network, local), network)
    if wiring.nic_gbit_s is None and wiring.kind is not None:
        usual = Network(wiring.kind).joins(hardware).collectives.inter.nic_gbit_s
        return replace(wiring, nic_gbit_s=usual)
    return wiring


def joined_ranks(most: int, hosts: int, local: int) -> int:
    """Ranks of an NVLink domain of up to ``most``: whole hosts in equal domains, or part of one.

    Args:
        hosts: that one domain may span; 1 but for racks.
    """
    if local >= most:
        return max(n for n in range(1, most + 1) if local % n == 0)
    return local * max(k for k in range(1, hosts + 1) if hosts % k == 0 and k * local <= most)


def line_rate(network: str, local: int) -> float | None:
    """Gbit/s of NIC per rank that the name of a host's network states, None where it states none.

    Args:
        network: e.g. ``RoCE 8x400G + NVSwitch`` or ``IB 100G x1 per node``.
        local: ranks of a host.
    """
    if network in UNSTATED_GBIT_S:
        return UNSTATED_GBIT_S[network] / local
    for pattern, rate, nics in ((r"(\d+)x(\d+)G", 2, 1), (r"(\d+)G x(\d+) per node", 1, 2)):
        if found := re.search(pattern, network):
            return float(found[rate]) * float(found[nics]) / local
    return None


_NCCL = (
    (
        *("source", "gpu", "nodes", "n_gpus", "collective", "size_bytes"),
        *("time_us_out_of_place", "time_us_in_place"),
    ),
    _nccl,
)
READERS: Mapping[str, tuple[tuple[str, ...], Callable[[Row], LinkRow]]] = {
    NCCL_FILE: _NCCL,
    NCCL_EXTRA_FILE: _NCCL,
    NCCL_TESTS_FILE: (
        ("system", "gpu", "nccl", "ranks", "collective", "size_bytes", "time_us"),
        _nccl_tests,
    ),
    XLA_FILE: (("gpu", "collective", "ranks", "size_bytes", "time_us", "method"), _xla),
    VIDUR_FILE: (
        ("platform", "collective", "num_workers", "devices_per_node", "size", "us_min"),
        _vidur,
    ),
    VTRAIN_FILE: (("gpu", "n_gpus", "size_bytes", "time_us_out_of_place"), _vtrain),
}
LINK_FILES = tuple(READERS)


SLINGSHOT = "gh200"
SEVERAL_HOSTS = 8
"""Ranks of a rack of which there is but one table; of fewer, two disagree below some MiB, and one
ends before 1 GiB."""
TREE_BYTES = 2.0**33


def gave_constants(row: LinkRow) -> bool:
    """Whether a constant of the row's profile comes from this row."""
    if row.file == VTRAIN_FILE:
        return row.wiring.profile == "v100-32gb"
    rules = (times_nccl, tree_of_hosts, racks, tcpx, slingshot, gave_line_rate, xgmi)
    return any(rule(row) for rule in rules)


def _octave(row: LinkRow) -> float:
    return math.log2(row.size_bytes)


def times_nccl(row: LinkRow) -> bool:
    """nccl-tests within one domain, by a process a GPU: 2 to 8 ranks, and more of a rack."""
    if row.file == XLA_FILE and row.wiring.profile == "gb200":
        other_table = row.wiring.ranks < SEVERAL_HOSTS and row.size_bytes < mib(1024)
        return not row.timer_of_a_program and not other_table
    return row.file == NCCL_TESTS_FILE


def tree_of_hosts(row: LinkRow) -> bool:
    """An all-reduce over two hosts of H100, whose NICs are not the limit."""
    wiring = row.wiring
    known = (wiring.profile, row.op, wiring.hosts) == ("h100-sxm", "all_reduce", 2)
    return known and wiring.across and row.size_bytes == TREE_BYTES


def racks(row: LinkRow) -> bool:
    """An all-to-all over two racks of GB300."""
    wiring = row.wiring
    known = (wiring.profile, row.op) == ("gb300", "all_to_all")
    return known and wiring.across and row.size_bytes == TREE_BYTES


def tcpx(row: LinkRow) -> bool:
    """The 16 MiB and the largest size of either table of GPUDirect-TCPX."""
    largest = mib(512) if "Google" in row.cells.get("source", "") else 2**33
    return row.wiring.kind == "tcpx" and row.size_bytes in (mib(16), largest)


def slingshot(row: LinkRow) -> bool:
    """Every second size of all-reduces on two hosts of GH200."""
    known = row.wiring.profile == SLINGSHOT and row.op == "all_reduce" and row.wiring.hosts == 2
    return known and _octave(row) % 2 == 0


def xgmi(row: LinkRow) -> bool:
    """RCCL on eight MI355X, which also gave the bytes past a NIC, and large messages on MI300X."""
    large = row.wiring.profile == "mi300x" and row.size_bytes >= mib(64)
    return large or row.wiring.profile == "mi355x"


def gave_line_rate(row: LinkRow) -> bool:
    """The largest message of a table that does not state its network."""
    return "unspecified" in row.wiring.network and row.size_bytes == 2**34
