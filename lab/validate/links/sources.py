"""Which public rows gave a shipped profile a constant of its collectives.

The rules of `lab.tools.fit_profiles` and `lab.tools.fit_networks` take their rows from here.

Why: docs/decisions/0043.
"""

from __future__ import annotations

import math

from lab.fit.public_tables import VIDUR_FILE, VTRAIN_FILE
from lab.validate.links.rows import XLA_FILE, LinkRow
from predictor.units import mib

TCPX = "h100-sxm-tcpx"
SLINGSHOT = "gh200"
RACK_SIZES = (14, 18, 20, 24, 28, 30, 34)
"""Of tables of a rack, log2 of the bytes."""
HOST_SIZES = (20, 22, 24, 26, 30)
"""Of tables of two and eight ranks, log2 of the bytes."""
PART_SIZES = (20, 24, 30)
"""The same of four ranks."""
TREE_BYTES = 2.0**33


def gave_constants(row: LinkRow) -> bool:
    """Whether a constant of the row's profile comes from this row."""
    source = row.cells.get("source", "")
    if row.file == VTRAIN_FILE or "superbenchmark" in source or "dgxc-benchmarking" in source:
        return True
    rules = (
        curve_of_a_rack,
        curve_of_a_host,
        few_ranks_of_a_host,
        tree_of_hosts,
        racks,
        tcpx,
        slingshot,
        line_rate,
    )
    return any(rule(row) for rule in rules)


def _octave(row: LinkRow) -> float:
    return math.log2(row.size_bytes)


def curve_of_a_rack(row: LinkRow) -> bool:
    """nccl-tests on GB200, 4 to 64 ranks."""
    return _fits(row, "gb200") and _octave(row) in RACK_SIZES


def curve_of_a_host(row: LinkRow) -> bool:
    """XLA's timer on H100 and B200 from 1 MiB, ranks that NVSwitch joins."""
    if not _fits(row, "h100-sxm", "b200"):
        return False
    if row.op == "all_reduce" and row.wiring.profile == "h100-sxm" and row.wiring.ranks == 8:
        return False
    return _octave(row) in (PART_SIZES if row.wiring.ranks == 4 else HOST_SIZES)


def few_ranks_of_a_host(row: LinkRow) -> bool:
    """All-reduces of two and four ranks of a DGX H100: 2 MiB, 16 to 20 MiB, 64 MiB."""
    wiring = row.wiring
    known = row.file == VIDUR_FILE and wiring.profile == "h100-sxm" and not wiring.pairs
    sized = mib(16) < row.size_bytes < mib(20) or row.size_bytes in (mib(2), mib(64))
    return known and sized and wiring.hosts == 1 and wiring.ranks < 8


def _fits(row: LinkRow, *profiles: str) -> bool:
    return row.file == XLA_FILE and row.wiring.profile in profiles


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
    return row.wiring.profile == TCPX and row.size_bytes in (mib(16), largest)


def slingshot(row: LinkRow) -> bool:
    """Every second size of all-reduces on two hosts of GH200."""
    known = row.wiring.profile == SLINGSHOT and row.op == "all_reduce" and row.wiring.hosts == 2
    return known and _octave(row) % 2 == 0


def line_rate(row: LinkRow) -> bool:
    """The largest message of a table that does not state its network."""
    return "unspecified" in row.wiring.network and row.size_bytes == 2**34
