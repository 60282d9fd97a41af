"""How the curves between hosts of the shipped GPU profiles follow from the public tables.

A NIC carries what `predictor.cost.collectives` says passes it. Rows of cards without a profile of
their own tell what a byte past a NIC costs; tests hold the shipped files against these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from lab.validate.curves import ROBUST, every_second, fit_own_part, fit_rank_cost
from lab.validate.links import (
    SLINGSHOT,
    LinkRow,
    curve_of_a_host,
    curve_of_a_rack,
    few_ranks_of_a_host,
    read_links,
)
from lab.validate.links import slingshot as slingshot_row
from lab.validate.links import tcpx as tcpx_row
from lab.validate.public_tables import Key, read_collectives
from predictor.cost.collectives import OPS, Op, bus_factor
from predictor.csv_rows import Row, number, read_table
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import Curve
from predictor.units import mib, us
from shardopt.calibrate.collectives import CollectiveRows, errors, fit_curve
from shardopt.calibrate.fitting import Array

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


Curves = dict[str, Curve]
"""By collective; ``in_switch``: an all-reduce that the switch does."""

V100_TRACE_FILE = "trace_param_dlrm8xV100_collectives.csv"

CUBE_MESH_HOPS = 10 / 7
"""Mean hops between V100s of a DGX-1: 4 peers adjacent, 3 two hops away."""
LINK_EDGES_MIB = (0.0, 0.5, 4.0, 64.0, 1024.0)
"""Bands of tables with few sizes and several rank counts."""
A2A_EDGES_MIB = (0.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)
LAUNCH_BOUND_BYTES = 8 * 2**20
"""Below it, one process that launches on eight GPUs sets the time of the A100 all-to-all table."""
SWITCH_BYTES = 2**30
"""From it on the switch is the faster one among the 8 to 64 ranks of a rack."""
RING_BYTES = (2**20, 2**25)
"""Between them rings are, among eight H100."""
TIMER_BYTES = 2**26
"""From it on the program around a collective does not count."""
SMALL_MESSAGE_BYTES = 20000
"""Too small for bandwidth to count."""


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
        """All tables of collectives."""
        found = read_collectives(self.folder)
        self.problems += found.problems
        return found.tables

    def table(
        self, platform: str, wiring: str, op: str, above_bytes: float = 0.0
    ) -> CollectiveRows:
        """The one table of a collective on a platform, from a size on."""
        found = [
            rows
            for (name, wires, what), rows in self.tables.items()
            if platform in name and (wires, what) == (wiring, op)
        ]
        if len(found) != 1:
            raise LookupError(f"{len(found)} tables of {op} on {platform} {wiring}; one is needed")
        rows = found[0].where(found[0].size_bytes >= above_bytes)
        if not self.halved:
            return self.take(rows)
        chosen = every_second(rows)
        if op in OPS:
            self.held_out.append((op, rows.where(~chosen)))
        return self.take(rows.where(chosen))

    def take(self, rows: CollectiveRows) -> CollectiveRows:
        """CollectiveRows that a rule uses."""
        self.taken.append(rows)
        return rows

    @cached_property
    def links(self) -> list[LinkRow]:
        """All rows with the profile of their GPU."""
        return read_links(self.folder)[0]

    def of(self, rows: Sequence[LinkRow], op: Op) -> CollectiveRows:
        """Rows of one collective without the copy that their timer counts; all are taken, none is
        held out."""
        found = [row for row in rows if row.op == op]
        if not found:
            raise LookupError(f"no rows of {op}")
        return self.take(
            CollectiveRows.of(
                [(r.size_bytes, r.wiring.ranks, r.time_us - _copy_us(r)) for r in found]
            )
        )

    def send_recv_us(self, platform: str) -> float:
        """Median time of messages too small for bandwidth to count."""
        rows = _small(self.tables, f"{platform} (vidur)")
        return float(np.median(self.take(rows).time_us))

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


def held_out_errors(folder: Path, name: str) -> Array:
    """Relative errors ``[rows]`` of a profile's rule at the sizes that it did not see.

    The rule is given every second size of the tables of nccl-tests; where a collective takes the
    curve of another, or all rows are needed for it, nothing is held out.
    """
    public = PublicRows(folder, halved=True)
    curves = _curves_of(name, public)
    return np.concatenate([errors(curves[op], rows, op) for op, rows in public.held_out])


def _curves_of(name: str, public: PublicRows) -> Curves:
    try:
        return RULES[name](public)
    except (LookupError, ValueError) as error:
        raise InputError(
            f"{public.folder}: not all rows behind {name} are there: {error}; docs/data.md lists "
            "the files"
        ) from error


def _a100(public: PublicRows) -> Curves:
    """nccl-tests on one host; all-reduce also at 2 to 8 ranks, which tells latency per doubling."""
    platform, wiring = "superbenchmark", "1x8"
    by_ranks = public.table("a100 (vtrain)", "1x2..8", "all_reduce")
    # the table that reaches down to 4 bytes is one of eight: it counts threefold
    one_host = public.table(platform, wiring, "all_reduce")
    all_reduce = fit_curve(_join(by_ranks, *[one_host] * 3), "all_reduce")
    rest: Curves = {
        op: _spread(fit_curve(public.table(platform, wiring, op), op), all_reduce)
        for op in ("reduce_scatter", "all_gather")
    }
    all_to_all = fit_curve(
        public.table(platform, wiring, "all_to_all", LAUNCH_BOUND_BYTES),
        "all_to_all",
        edges_mib=A2A_EDGES_MIB,
        latency_us=public.send_recv_us("a100_dgx"),
    )
    return {"all_reduce": all_reduce, "all_to_all": all_to_all, **rest}


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


def _gb200(public: PublicRows) -> Curves:
    """nccl-tests within a rack, 4 to 64 ranks; all-reduces from 1 GiB among eight or more tell what
    the switch does."""
    rows = [row for row in public.links if curve_of_a_rack(row)]
    switched = [row for row in rows if row.wiring.ranks >= 8 and row.size_bytes >= SWITCH_BYTES]
    ring = [row for row in rows if row.op != "all_reduce" or row not in switched]
    found: Curves = {op: fit_own_part(public.of(ring, op), op, LINK_EDGES_MIB) for op in OPS}
    of = public.of(switched, "all_reduce")
    found["in_switch"] = fit_curve(of, "all_reduce", (0.0,), reweightings=ROBUST, own_part=1.0)
    return found


def _b200(public: PublicRows) -> Curves:
    """XLA's timer from 1 MiB; latencies as on GB200, where nccl-tests measured small messages."""
    rows = [row for row in public.links if curve_of_a_host(row) and row.wiring.profile == "b200"]
    empty = _gb200(PublicRows(public.folder))
    return {op: _like(public.of(rows, op), op, empty[op]) for op in OPS}


def _h100(public: PublicRows) -> Curves:
    """What the switch does from nccl-tests on eight ranks; rings from fewer ranks, and from sizes
    at which they are the faster one; the others from XLA's timer."""
    rows = [
        row for row in public.links if curve_of_a_host(row) and row.wiring.profile == "h100-sxm"
    ]
    empty = _gb200(PublicRows(public.folder))
    found: Curves = {
        op: _like(public.of(rows, op), op, empty[op]) for op in OPS if op != "all_reduce"
    }
    table = public.table("dgxc", "1x8", "all_reduce")
    # A100's rows tell the growth with ranks and nothing of sizes
    known = _spread(fit_curve(table, "all_reduce"), _a100(PublicRows(public.folder))["all_reduce"])
    found["in_switch"] = _scaled(known, 7 / 8).model_copy(update={"own_part": 1.0})
    timed = [row for row in rows if row.size_bytes >= TIMER_BYTES]
    few = public.of([*timed, *filter(few_ranks_of_a_host, public.links)], "all_reduce")
    sized = (table.size_bytes >= RING_BYTES[0]) & (table.size_bytes <= RING_BYTES[1])
    ring = _join(few, table.where(sized))
    found["all_reduce"] = _like(ring, "all_reduce", known)
    return found


def _like(rows: CollectiveRows, op: str, empty: Curve) -> Curve:
    return fit_own_part(rows, op, LINK_EDGES_MIB[:-1], like=empty)


RULES: Mapping[str, Callable[[PublicRows], Curves]] = {
    "v100-32gb": _v100,
    "a100-40gb": _a100,
    "a100-80gb": _a100,
    "h100-sxm": _h100,
    "h200-sxm": _h100,
    "b200": _b200,
    "gb200": _gb200,
}
"""Profile -> the rule of its curves within a host."""


def _copy_us(row: LinkRow) -> float:
    return 2 * row.copied_bytes / load_hardware(row.wiring.profile).streaming / us(1.0)


def _small(tables: Mapping[Key, CollectiveRows], platform: str) -> CollectiveRows:
    rows = tables[platform, "1x2", "send_recv"]
    return rows.where(rows.size_bytes <= SMALL_MESSAGE_BYTES)


def _join(*parts: CollectiveRows) -> CollectiveRows:
    rows = (zip(p.size_bytes, p.ranks, p.time_us, strict=True) for p in parts)
    return CollectiveRows.of([row for part in rows for row in part])


def _spread(curve: Curve, like: Curve, ranks: int = 8) -> Curve:
    """Splits a latency known at one rank count as another curve's splits."""
    doublings = float(np.log2(ranks))
    share = like.latency_us / (like.latency_us + doublings * like.latency_per_doubling_us)
    growth = curve.latency_us * (1 - share) / doublings
    latency = {"latency_us": curve.latency_us * share, "latency_per_doubling_us": growth}
    return curve.model_copy(update=latency)


def _scaled(curve: Curve, factor: float) -> Curve:
    return curve.model_copy(update={"us_per_mib": tuple(factor * c for c in curve.us_per_mib)})


def _traced(row: Row) -> tuple[tuple[str, str], float, float]:
    name = row["et_collective"].removesuffix("v")
    return (name, row["idx"]), number(row, "in_bytes"), number(row, "kernel_dur_us")
