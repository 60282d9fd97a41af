"""Curves of the shipped GPU profiles within and between hosts, from the public tables.

`predictor.cost.collectives` gives the bytes past each NIC. The cost of such a byte comes from rows
of cards without a profile of their own; tests hold the shipped files against these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.fit.profile_text import set_key
from lab.validate.curves import ROBUST, every_second, fit_own_part, fit_rank_cost
from lab.validate.links import (
    NCCL_TESTS_FILE,
    NO_PEERS,
    SLINGSHOT,
    Key,
    LinkRow,
    read_collectives,
    read_links,
    times_nccl,
)
from lab.validate.links import slingshot as slingshot_row
from lab.validate.links import tcpx as tcpx_row
from predictor.cost.collectives import OPS, Op, bus_factor
from predictor.csv_rows import Row, number, read_table
from predictor.errors import InputError
from predictor.hardware.schema import Curve
from predictor.units import mib
from shardopt.calibrate.collectives import CollectiveRows, errors, fit_curve
from shardopt.calibrate.fitting import Array
from shardopt.files import atomic_write_text

RDMA_PLATFORM = "MI350-class"
RDMA_GBIT_S = 400.0
RDMA_EDGES_MIB = (0.0, 0.25, 1.0, 4.0, 16.0)
"""Band edges in bytes past one NIC."""
RDMA_PROFILES = ("h100-sxm", "h200-sxm", "b200", "a100-40gb", "a100-80gb", "v100-32gb")
FEWEST_BYTES = 2**20
SLINGSHOT_EDGES_MIB = (0.0, 0.0625, 0.5, 4.0, 16.0)
SEND_RECV_US = {"h100": 9.1, "a100": 15.3}
"""Shortest message between two hosts (vidur: DGX H100, DGX A100)."""
EXCHANGE_US = 44.0
"""Latency of an all-to-all over hosts without its messages: an empty one of 2x8 RTX 6000D takes
48 us."""
PEER_US = 0.5
"""Latency of an all-to-all for each peer on another host: its excess over the wire at 16 MiB grows
by 46 us from 8 peers to 120 (ratios of SimAI, at 400 Gbit/s)."""


def rdma(folder: Path) -> Curve:
    """Fit the cost of a byte past a NIC of 400 Gbit/s, from a ring over two hosts of eight.

    Rows: all-reduces from 1 MiB on 2x8 MI350-class cards (rccl-tests), whose two rings-over-all
    halves each send ``15/16`` of the buffer past eight NICs.
    """
    large = _ring_rows(folder)
    past = large.size_bytes * bus_factor("all_gather", 16) / 8
    each = CollectiveRows(past, np.full_like(past, 2.0), large.time_us)
    return fit_curve(each, "past a NIC", RDMA_EDGES_MIB, latency_us=0.0, reweightings=ROBUST)


def _ring_rows(folder: Path) -> CollectiveRows:
    """Return the rows from 1 MiB, with each half's time beyond an empty ring."""
    rows = PublicRows(folder).table(RDMA_PLATFORM, "2x8", "all_reduce")
    empty = float(rows.time_us.min())
    large = rows.where(rows.size_bytes >= FEWEST_BYTES)
    return CollectiveRows(large.size_bytes, large.ranks, (large.time_us - empty) / 2)


def rows_behind(folder: Path) -> dict[str, int]:
    """Return profile -> number of rows behind the cost of a byte past its NICs."""
    of_ring = len(_ring_rows(folder).ranks)
    rows = [row for row in read_links(folder)[0] if slingshot_row(row)]
    return dict.fromkeys(RDMA_PROFILES, of_ring) | {SLINGSHOT: len(rows)}


def tcpx(rows: Sequence[LinkRow]) -> Curve:
    """Fit the cost of a byte past a TCP NIC; it is zero until the latency is used up.

    Two tables of all-gathers on 2x8 H100 disagree by 1.4 in bandwidth. The latency is the geometric
    mean at 16 MiB, and the cost of a byte that at larger sizes. Many chunks are in flight at once,
    so transfers hide behind the latency: ``sqrt(latency^2 + (cost w)^2)``.
    """
    tcp_rows = [row for row in rows if tcpx_row(row)]
    small = [row.time_us for row in tcp_rows if row.size_bytes == mib(16)]
    large = [
        row.time_us / (row.size_bytes * bus_factor("all_gather", row.wiring.ranks) / 8 / mib(1))
        for row in tcp_rows
        if row.size_bytes > mib(16)
    ]
    latency, cost = (float(np.exp(np.mean(np.log(times)))) for times in (small, large))
    return Curve(latency_us=latency, edge_mib=(0.0, latency / cost), us_per_mib=(0.0, cost))


def slingshot(rows: Sequence[LinkRow], within_us: float) -> Curve:
    """Fit the cost of a byte past a Slingshot NIC, from trees over two hosts of four GH200.

    Args:
        within_us: time of an empty all-reduce within one of the hosts.
    """
    slingshot_rows = [row for row in rows if slingshot_row(row)]
    empty = min(row.time_us for row in slingshot_rows)
    past = [
        (row.size_bytes / 4, 2.0, row.time_us - empty)
        for row in slingshot_rows
        if row.time_us > empty
    ]
    curve = fit_curve(
        CollectiveRows.of(past),
        "past a NIC",
        SLINGSHOT_EDGES_MIB,
        latency_us=0.0,
        reweightings=ROBUST,
    )
    return curve.model_copy(update={"latency_us": max(0.0, empty - within_us) / 2})


def inter_curves(past_nic: Curve, hop_us: float) -> Mapping[str, Curve]:
    """Return the curves between hosts of equal cost per byte, from the latency of a hop.

    A ring hops from host to host; a tree has one hop up and one down for each doubling.
    """
    ring = past_nic.model_copy(update={"latency_us": 0.0, "latency_per_rank_us": hop_us})
    doubling = {"latency_us": 0.0, "latency_per_doubling_us": 2 * hop_us}
    exchange = {"latency_us": EXCHANGE_US, "latency_per_rank_us": PEER_US}
    return {
        "all_to_all": past_nic.model_copy(update=exchange),
        "all_reduce": past_nic.model_copy(update=doubling),
        "reduce_scatter": ring,
        "all_gather": ring,
    }


Curves = dict[str, Curve]
"""Collective -> curve; ``in_switch``: an all-reduce that the switch computes."""

V100_TRACE_FILE = "trace_param_dlrm8xV100_collectives.csv"

CUBE_MESH_HOPS = 10 / 7
"""Mean hops between V100s of a DGX-1: 4 peers adjacent, 3 two hops away."""
SMALL_BYTES = 4096
"""Messages up to this size do not depend on the bandwidth of a slot."""
EDGES_MIB = (0.0, 0.0625, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0, 256.0)
"""Bands in which NCCL changes protocol: LL and LL128 end somewhere from 256 KiB to 8 MiB, and more
channels open up to 32 MiB."""
SWITCH_RANKS, SWITCH_BYTES = 8, 2**27
"""Ranks and bytes from which the switch (NVLS) is faster than a ring."""


class PublicRows:
    """Public tables, and the rows that a rule has used.

    Args:
        folder: folder of the tables.
        halved: return every second size only; the others are held out.
    """

    def __init__(self, folder: Path, *, halved: bool = False) -> None:
        self.folder = folder
        self.halved = halved
        self.taken: list[CollectiveRows] = []
        self.held_out: list[tuple[Op, CollectiveRows]] = []
        self.problems: list[str] = []

    @cached_property
    def tables(self) -> dict[Key, CollectiveRows]:
        tables, problems = read_collectives(self.folder)
        self.problems += problems
        return tables

    def table(self, platform: str, wiring: str, op: str) -> CollectiveRows:
        """Return the one table of a collective on a platform."""
        matches = [
            rows
            for (name, wires, collective), rows in self.tables.items()
            if platform in name and (wires, collective) == (wiring, op)
        ]
        if len(matches) != 1:
            raise LookupError(
                f"{len(matches)} tables of {op} on {platform} {wiring}; one is needed"
            )
        rows = matches[0]
        if not self.halved:
            return self.take(rows)
        chosen = every_second(rows)
        if op in OPS:
            self.held_out.append((op, rows.where(~chosen)))
        return self.take(rows.where(chosen))

    def take(self, rows: CollectiveRows) -> CollectiveRows:
        self.taken.append(rows)
        return rows

    @cached_property
    def links(self) -> list[LinkRow]:
        """All rows with the profile of their GPU."""
        return read_links(self.folder)[0]

    def measured(self, system: str) -> dict[Op, CollectiveRows]:
        """Return collective -> nccl-tests rows of a profile's GPU, the median of repeats."""
        rows_of: dict[Op, CollectiveRows] = {}
        for op in OPS:
            times: dict[tuple[float, float], list[float]] = {}
            for row in self.links:
                if row.op == op and row.wiring.profile == system and times_nccl(row):
                    key = (row.size_bytes, float(row.wiring.ranks))
                    times.setdefault(key, []).append(row.time_us)
            if not times:
                raise LookupError(f"no rows of {op} on {system} in {NCCL_TESTS_FILE}")
            rows = CollectiveRows.of([(*key, float(np.median(t))) for key, t in times.items()])
            if self.halved:
                chosen = every_second(rows)
                self.held_out.append((op, rows.where(~chosen)))
                rows = rows.where(chosen)
            rows_of[op] = self.take(rows)
        return rows_of

    def trace_minima(self) -> dict[str, CollectiveRows]:
        """Return each collective's kernel times from the last arrival: the least over ranks."""
        columns = ("et_collective", "idx", "kernel_dur_us", "in_bytes")
        traced = read_table(self.folder / V100_TRACE_FILE, columns, _traced)
        self.problems += traced.problems
        shortest: dict[tuple[str, str], tuple[float, float]] = {}
        for key, size, time in traced.rows:
            first_size, best = shortest.get(key, (size, np.inf))
            shortest[key] = (first_size, min(best, time))
        names = sorted({name for name, _ in shortest})
        return {
            name: self.take(
                CollectiveRows.of(
                    [(s, 8.0, t) for (op, _), (s, t) in shortest.items() if op == name]
                )
            )
            for name in names
        }


@dataclass(frozen=True)
class Fit:
    """Curves of a profile's ``collectives.intra``.

    Args:
        rows: all rows behind them.
        problems: a line of text for each row that could not be read.
    """

    curves: Curves
    rows: CollectiveRows
    problems: tuple[str, ...]

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Quantity -> [low, high] that the rows cover."""
        rows = self.rows
        return {
            "size_bytes": (float(rows.size_bytes.min()), float(rows.size_bytes.max())),
            "ranks": (float(rows.ranks.min()), float(rows.ranks.max())),
        }


def gpu_fits(folder: Path) -> dict[str, Fit]:
    """Fit the curves within a host, by profile name.

    Raises:
        InputError: a table is missing, cannot be read, or lacks the rows that a rule needs.
    """
    fits = {}
    for name in RULES:
        public = PublicRows(folder)
        curves = _curves_of(name, public)
        fits[name] = Fit(curves, _join(*public.taken), tuple(public.problems))
    return fits


def held_out_errors(folder: Path, name: str) -> list[tuple[Op, CollectiveRows, Array]]:
    """Fit a profile's rule to every second size, and return its errors at the others.

    Returns:
        Collective, rows, and relative errors ``[rows]``.
    """
    public = PublicRows(folder, halved=True)
    curves = _curves_of(name, public)
    results = []
    for op, rows in public.held_out:
        error = errors(curves[op], rows, op)
        if op == "all_reduce" and "in_switch" in curves:
            error = np.minimum(error, errors(curves["in_switch"], rows, op))
        results.append((op, rows, error))
    return results


def _curves_of(name: str, public: PublicRows) -> Curves:
    try:
        return RULES[name](public)
    except (LookupError, ValueError) as error:
        raise InputError(
            f"{public.folder}: not all rows behind {name} are there: {error}; docs/data.md lists "
            "the files"
        ) from error


def _nccl(public: PublicRows, system: str) -> Curves:
    """Fit nccl-tests at 2, 4 and 8 ranks, in a rack up to 64.

    All-reduces of a switch are fitted apart, because their time does not depend on the ranks.
    """
    rows = public.measured(system)
    reduced = rows["all_reduce"]
    switched = (reduced.ranks >= SWITCH_RANKS) & (reduced.size_bytes >= SWITCH_BYTES)
    # without in-switch reduction (A100), eight ranks run a ring like any other number
    adds = system in ADDS_UP
    ring = reduced.where(~switched) if adds else reduced
    curves: Curves = {
        op: fit_own_part(ring if op == "all_reduce" else rows[op], op, EDGES_MIB) for op in OPS
    }
    if adds:
        curves["in_switch"] = fit_curve(
            reduced.where(switched), "all_reduce", (0.0,), reweightings=ROBUST, own_part=1.0
        )
    return curves


def _pcie(public: PublicRows, system: str) -> Curves:
    """Fit nccl-tests of cards joined by PCIe, whose bandwidth falls with the ranks."""
    curves: Curves = {}
    for op, rows in public.measured(system).items():
        small = rows.where(rows.size_bytes <= SMALL_BYTES)
        empty = fit_curve(small, op, (0.0,), reweightings=ROBUST, hops=True)
        curves[op] = fit_rank_cost(rows, op, SWITCH_RANKS, empty)
    return curves


def _v100(public: PublicRows) -> Curves:
    """Fit the all-reduce by rank count, small sizes to the shortest kernels of a trace."""
    by_ranks = public.table("v100 (vtrain)", "1x2..8", "all_reduce")
    traced = public.trace_minima()
    all_reduce = fit_rank_cost(_join(by_ranks, *[traced["allreduce"]] * 3), "all_reduce", 8)
    half = all_reduce.model_copy(update={"latency_us": all_reduce.latency_us / 2})
    shortest = float(min(traced["all_to_all"].time_us))
    hops = {"latency_us": shortest, "rank_cost": {}}
    return {
        "all_reduce": all_reduce,
        "all_to_all": _scaled(all_reduce, CUBE_MESH_HOPS).model_copy(update=hops),
        "reduce_scatter": half,
        "all_gather": half,
    }


ADDS_UP = ("h100-sxm", "b200", "gb200")
"""Profiles with rows of in-switch reductions."""
RULES: Mapping[str, Callable[[PublicRows], Curves]] = {
    "v100-32gb": _v100,
    **{
        name: partial(_nccl, system=system)
        for name, system in {
            "a100-40gb": "a100-80gb",
            "a100-80gb": "a100-80gb",
            "h100-sxm": "h100-sxm",
            "h200-sxm": "h100-sxm",
            "b200": "b200",
            "gb200": "gb200",
        }.items()
    },
    NO_PEERS: partial(_pcie, system=NO_PEERS),
}
"""Profile -> rule that fits its curves within a host."""


def _join(*parts: CollectiveRows) -> CollectiveRows:
    rows = (zip(p.size_bytes, p.ranks, p.time_us, strict=True) for p in parts)
    return CollectiveRows.of([row for part in rows for row in part])


def _scaled(curve: Curve, factor: float) -> Curve:
    return curve.model_copy(update={"us_per_mib": tuple(factor * c for c in curve.us_per_mib)})


def _traced(row: Row) -> tuple[tuple[str, str], float, float]:
    name = row["et_collective"].removesuffix("v")
    return (name, row["idx"]), number(row, "in_bytes"), number(row, "kernel_dur_us")


def run(folder: Path, profiles: Path) -> None:
    """Write the curves within a host into the files of a folder of profiles."""
    for name, fit in gpu_fits(folder).items():
        path = profiles / f"{name}.yaml"
        text = path.read_text(encoding="utf-8")
        for op, curve in fit.curves.items():
            text = set_key(text, ["collectives", "intra", op], _plain(curve))
        atomic_write_text(path, text)


def _plain(curve: Curve) -> dict[str, Any]:
    """Return the keys of a curve that differ from their defaults, to five digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: rounded(part) for key, part in value.items()}
        if isinstance(value, (tuple, list)):
            return [rounded(part) for part in value]
        return float(f"{value:.5g}")

    return {key: rounded(v) for key, v in curve.model_dump(exclude_defaults=True).items()}
