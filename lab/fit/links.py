"""How the curves between hosts of the shipped GPU profiles follow from the public tables.

A NIC carries what `predictor.cost.collectives` says passes it. Rows of cards without a profile of
their own tell what a byte past a NIC costs; tests hold the shipped files against these rules.
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
"""Of bytes past one NIC."""
RDMA_PROFILES = ("h100-sxm", "h200-sxm", "b200", "a100-40gb", "a100-80gb", "v100-32gb")
FEWEST_BYTES = 2**20
SLINGSHOT_EDGES_MIB = (0.0, 0.0625, 0.5, 4.0, 16.0)
SEND_RECV_US = {"h100": 9.1, "a100": 15.3}
"""Shortest message between two hosts (vidur: DGX H100, DGX A100)."""
EXCHANGE_US = 44.0
"""Of an all-to-all over hosts, before its messages: an empty one of 2x8 RTX 6000D takes 48 us."""
PEER_US = 0.5
"""Of an all-to-all for each peer on another host: its excess over the wire at 16 MiB grows by 46 us
from 8 peers to 120 (ratios of SimAI, at 400 Gbit/s)."""


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
    rows = PublicRows(folder).table(RDMA_PLATFORM, "2x8", "all_reduce")
    empty = float(rows.time_us.min())
    large = rows.where(rows.size_bytes >= FEWEST_BYTES)
    return CollectiveRows(large.size_bytes, large.ranks, (large.time_us - empty) / 2)


def rows_behind(folder: Path) -> dict[str, int]:
    """Profile -> rows that tell what a byte past its NICs costs."""
    of_ring = len(_ring_rows(folder).ranks)
    rows = [row for row in read_links(folder)[0] if slingshot_row(row)]
    return dict.fromkeys(RDMA_PROFILES, of_ring) | {SLINGSHOT: len(rows)}


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


def inter_curves(past_nic: Curve, hop_us: float) -> Mapping[str, Curve]:
    """Curves between hosts whose bytes cost alike, from the latency of a hop.

    A ring hops from host to host; a tree goes up and down, one hop a doubling each way.
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
"""By collective; ``in_switch``: an all-reduce that the switch does."""

V100_TRACE_FILE = "trace_param_dlrm8xV100_collectives.csv"

CUBE_MESH_HOPS = 10 / 7
"""Mean hops between V100s of a DGX-1: 4 peers adjacent, 3 two hops away."""
SMALL_BYTES = 4096
"""Too small for the bandwidth of a slot to count."""
EDGES_MIB = (0.0, 0.0625, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0, 256.0)
"""Bands in which NCCL changes protocol: LL and LL128 end somewhere from 256 KiB to 8 MiB, and more
channels open up to 32 MiB."""
SWITCH_RANKS, SWITCH_BYTES = 8, 2**27
"""From them on the switch (NVLS) is the faster one."""


class PublicRows:
    """The public tables, and which of their rows a rule has taken.

    Args:
        folder: of the tables.
        halved: give every second size only; the others are held out.
    """

    def __init__(self, folder: Path, *, halved: bool = False) -> None:
        self.folder = folder
        self.halved = halved
        self.taken: list[CollectiveRows] = []
        self.held_out: list[tuple[Op, CollectiveRows]] = []
        self.problems: list[str] = []

    @cached_property
    def tables(self) -> dict[Key, CollectiveRows]:
        found, problems = read_collectives(self.folder)
        self.problems += problems
        return found

    def table(self, platform: str, wiring: str, op: str) -> CollectiveRows:
        """The one table of a collective on a platform."""
        found = [
            rows
            for (name, wires, what), rows in self.tables.items()
            if platform in name and (wires, what) == (wiring, op)
        ]
        if len(found) != 1:
            raise LookupError(f"{len(found)} tables of {op} on {platform} {wiring}; one is needed")
        rows = found[0]
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
        """Collective -> rows of a profile's GPU that nccl-tests timed, the median of repeats."""
        found: dict[Op, CollectiveRows] = {}
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
            found[op] = self.take(rows)
        return found

    def trace_minima(self) -> dict[str, CollectiveRows]:
        """Kernel times once the last rank has arrived: the shortest over ranks, by collective."""
        columns = ("et_collective", "idx", "kernel_dur_us", "in_bytes")
        found = read_table(self.folder / V100_TRACE_FILE, columns, _traced)
        self.problems += found.problems
        shortest: dict[tuple[str, str], tuple[float, float]] = {}
        for key, size, time in found.rows:
            known, best = shortest.get(key, (size, np.inf))
            shortest[key] = (known, min(best, time))
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
    """Intra-host curves and their rows, by profile name.

    Raises:
        InputError: a table is missing, cannot be read, or lacks the rows that a rule takes.
    """
    found = {}
    for name in RULES:
        public = PublicRows(folder)
        curves = _curves_of(name, public)
        found[name] = Fit(curves, _join(*public.taken), tuple(public.problems))
    return found


def held_out_errors(folder: Path, name: str) -> list[tuple[Op, CollectiveRows, Array]]:
    """Collective, rows and relative errors ``[rows]`` of a profile's rule at sizes that it did not
    see: it is given every second one."""
    public = PublicRows(folder, halved=True)
    curves = _curves_of(name, public)
    found = []
    for op, rows in public.held_out:
        error = errors(curves[op], rows, op)
        if op == "all_reduce" and "in_switch" in curves:
            error = np.minimum(error, errors(curves["in_switch"], rows, op))
        found.append((op, rows, error))
    return found


def _curves_of(name: str, public: PublicRows) -> Curves:
    try:
        return RULES[name](public)
    except (LookupError, ValueError) as error:
        raise InputError(
            f"{public.folder}: not all rows behind {name} are there: {error}; docs/data.md lists "
            "the files"
        ) from error


def _nccl(public: PublicRows, system: str) -> Curves:
    """nccl-tests at 2, 4 and 8 ranks, in a rack up to 64.

    All-reduces of a switch are fitted apart, because their time does not depend on the ranks.
    """
    rows = public.measured(system)
    reduced = rows["all_reduce"]
    switched = (reduced.ranks >= SWITCH_RANKS) & (reduced.size_bytes >= SWITCH_BYTES)
    # without a switch that adds up (A100), eight ranks are a ring's like any others
    adds = system in ADDS_UP
    ring = reduced.where(~switched) if adds else reduced
    found: Curves = {
        op: fit_own_part(ring if op == "all_reduce" else rows[op], op, EDGES_MIB) for op in OPS
    }
    if adds:
        found["in_switch"] = fit_curve(
            reduced.where(switched), "all_reduce", (0.0,), reweightings=ROBUST, own_part=1.0
        )
    return found


def _pcie(public: PublicRows, system: str) -> Curves:
    """nccl-tests where cards reach each other over PCIe, whose bandwidth falls with the ranks."""
    found: Curves = {}
    for op, rows in public.measured(system).items():
        small = rows.where(rows.size_bytes <= SMALL_BYTES)
        empty = fit_curve(small, op, (0.0,), reweightings=ROBUST, hops=True)
        found[op] = fit_rank_cost(rows, op, SWITCH_RANKS, empty)
    return found


def _v100(public: PublicRows) -> Curves:
    """All-reduce by rank count; small sizes from the shortest kernel over the ranks of a trace."""
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
"""Profiles with rows of switches that add up."""
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
"""Profile -> the rule of its curves within a host."""


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
    """Keys of a curve that differ from their defaults, to five digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: rounded(part) for key, part in value.items()}
        if isinstance(value, (tuple, list)):
            return [rounded(part) for part in value]
        return float(f"{value:.5g}")

    return {key: rounded(v) for key, v in curve.model_dump(exclude_defaults=True).items()}
