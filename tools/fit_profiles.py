"""How the collective curves of the shipped GPU profiles follow from the public tables.

Each function states its rule once more than the profile's ``source`` does, as code; a test holds
the shipped files against it. Where a table says nothing of a collective, another one of the same
machine, or the same one of another machine, stands in, and the profile's group is ``derived``.
The rows that a rule takes are kept beside its curves: they tell the ranges, and the error of the
same rule when it sees every second size only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from predictor.cost.collectives import OPS, Op
from predictor.csv_rows import Row, number, read_table
from predictor.errors import InputError
from predictor.fit.collectives import Array, CollectiveRows, errors, fit_curve, fit_rank_cost
from predictor.fit.public_tables import Key, read_collectives
from predictor.hardware.schema import Curve

Curves = dict[Op, Curve]

SIMAI_FILE = "simai_alltoall_efficiency.csv"
V100_TRACE_FILE = "trace_param_dlrm8xV100_collectives.csv"

NVLINK4_BYTES_PER_US = 450e3
"""One direction of NVLink 4 (NVIDIA H100 datasheet: 900 GB/s both ways)."""
CUBE_MESH_HOPS = 10 / 7
"""Mean hops between V100s of a DGX-1: 4 peers adjacent, 3 two hops away."""
NVLINK5_ALL_TO_ALL = 347 / 680
NVLINK5_ALL_REDUCE = 480.16 / 838.38
"""Bus bandwidth of H100 over GB300 on one domain at 4-16 GiB (SimAI and nccl-tests tables)."""
A2A_EDGES_MIB = (0.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)
LAUNCH_BOUND_BYTES = 8 * 2**20
"""Below it, one process that launches on eight GPUs sets the time of the A100 all-to-all table."""
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
        chosen = rows.every_second
        if op in OPS:
            self.held_out.append((op, rows.where(~chosen)))
        return self.take(rows.where(chosen))

    def take(self, rows: CollectiveRows) -> CollectiveRows:
        """CollectiveRows that a rule uses."""
        self.taken.append(rows)
        return rows

    def send_recv_us(self, platform: str) -> float:
        """Median time of messages too small for bandwidth to count."""
        rows = _small(self.tables, f"{platform} (vidur)")
        return float(np.median(self.take(rows).time_us))

    def simai(self) -> CollectiveRows:
        """An all-to-all on one host of eight, from its efficiency against NVLink's line rate."""
        found = read_table(self.folder / SIMAI_FILE, ("Size", "1 Node(NVLinkx)"), _simai)
        self.problems += found.problems
        return self.take(CollectiveRows.of(found.rows))

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


def _h100(public: PublicRows) -> Curves:
    """All-reduce from its table; all-to-all from an efficiency curve times NVLink's rate."""
    fitted = fit_curve(public.table("dgxc", "1x8", "all_reduce"), "all_reduce")
    # A100's rows tell the growth with ranks and nothing of sizes
    all_reduce = _spread(fitted, _a100(PublicRows(public.folder))["all_reduce"])
    all_to_all = fit_curve(
        public.simai(),
        "all_to_all",
        edges_mib=A2A_EDGES_MIB,
        latency_us=public.send_recv_us("h100_dgx"),
    )
    latency = {
        "latency_us": all_reduce.latency_us,
        "latency_per_doubling_us": all_reduce.latency_per_doubling_us,
    }
    reduction = all_to_all.model_copy(update=latency)
    return {
        "all_reduce": all_reduce,
        "all_to_all": all_to_all,
        "reduce_scatter": reduction,
        "all_gather": reduction,
    }


def _b200(public: PublicRows) -> Curves:
    """H100's curves at the bandwidth that NVLink 5 reached on GB300."""
    return {
        op: _scaled(curve, NVLINK5_ALL_REDUCE if op == "all_reduce" else NVLINK5_ALL_TO_ALL)
        for op, curve in _h100(public).items()
    }


RULES: Mapping[str, Callable[[PublicRows], Curves]] = {
    "v100-32gb": _v100,
    "a100-40gb": _a100,
    "a100-80gb": _a100,
    "h100-sxm": _h100,
    "h200-sxm": _h100,
    "b200": _b200,
}
"""Profile -> the rule of its curves within a host."""


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


def _simai(row: Row) -> tuple[float, float, float]:
    size, efficiency = number(row, "Size"), number(row, "1 Node(NVLinkx)")
    return size, 8.0, size * 7 / 8 / (efficiency * NVLINK4_BYTES_PER_US)


def _traced(row: Row) -> tuple[tuple[str, str], float, float]:
    name = row["et_collective"].removesuffix("v")
    return (name, row["idx"]), number(row, "in_bytes"), number(row, "kernel_dur_us")
