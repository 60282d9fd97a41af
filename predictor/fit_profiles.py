"""How the collective curves of the shipped GPU profiles follow from the public tables.

Each function states its rule once more than the profile's ``source`` does, as code; a test holds
the shipped files against it. Where a table says nothing of a collective, another one of the same
machine, or the same one of another machine, stands in, and the profile's group is ``derived``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from predictor.fit import Rows, fit_curve, fit_rank_cost
from predictor.fit_data import collective_rows, read_csv
from predictor.profile_schema import Curve

Curves = dict[str, Curve]

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


def gpu_curves(folder: Path) -> dict[str, Curves]:
    """Intra-host curves by profile name."""
    tables = collective_rows(folder)
    a100, h100 = _a100(tables), _h100(tables, folder)
    return {
        "v100-32gb": _v100(tables, folder),
        "a100-40gb": a100,
        "a100-80gb": a100,
        "h100-sxm": h100,
        "h200-sxm": h100,
        "b200": _b200(h100),
    }


def _a100(tables: dict[tuple[str, str, str], Rows]) -> Curves:
    """nccl-tests on one host; all-reduce also at 2 to 8 ranks, which tells latency per doubling."""

    def table(op: str) -> Rows:
        return _one(tables, "superbenchmark", "1x8", op)

    by_ranks = _one(tables, "a100 (vtrain)", "1x2..8", "all_reduce")
    # the table that reaches down to 4 bytes is one of eight: it counts threefold
    all_reduce = fit_curve(_join(by_ranks, *[table("all_reduce")] * 3), "all_reduce")
    all_to_all = table("all_to_all")
    return {
        "all_reduce": all_reduce,
        "all_to_all": fit_curve(
            all_to_all.where(all_to_all.size_bytes >= LAUNCH_BOUND_BYTES),
            "all_to_all",
            edges_mib=A2A_EDGES_MIB,
            latency_us=_send_recv_us(tables, "a100_dgx"),
        ),
        "reduce_scatter": _spread(fit_curve(table("reduce_scatter"), "reduce_scatter"), all_reduce),
        "all_gather": _spread(fit_curve(table("all_gather"), "all_gather"), all_reduce),
    }


def _v100(tables: dict[tuple[str, str, str], Rows], folder: Path) -> Curves:
    """All-reduce by rank count; small sizes from the shortest kernel over the ranks of a trace."""
    by_ranks = _one(tables, "v100 (vtrain)", "1x2..8", "all_reduce")
    traced = _trace_minima(folder)
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


def _h100(tables: dict[tuple[str, str, str], Rows], folder: Path) -> Curves:
    """All-reduce from its table; all-to-all from an efficiency curve times NVLink's rate."""
    fitted = fit_curve(_one(tables, "dgxc", "1x8", "all_reduce"), "all_reduce")
    all_reduce = _spread(fitted, _a100(tables)["all_reduce"])
    all_to_all = fit_curve(
        _simai(folder),
        "all_to_all",
        edges_mib=A2A_EDGES_MIB,
        latency_us=_send_recv_us(tables, "h100_dgx"),
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


def _b200(h100: Curves) -> Curves:
    """H100's curves at the bandwidth that NVLink 5 reached on GB300."""
    return {
        op: _scaled(curve, NVLINK5_ALL_REDUCE if op == "all_reduce" else NVLINK5_ALL_TO_ALL)
        for op, curve in h100.items()
    }


def _one(tables: dict[tuple[str, str, str], Rows], platform: str, wiring: str, op: str) -> Rows:
    found = [
        rows
        for (name, wires, what), rows in tables.items()
        if platform in name and (wires, what) == (wiring, op)
    ]
    if len(found) != 1:
        raise LookupError(f"{len(found)} tables of {op} on {platform} {wiring}; one is needed")
    return found[0]


def _join(*parts: Rows) -> Rows:
    rows = (zip(p.size_bytes, p.ranks, p.time_us, strict=True) for p in parts)
    return Rows.of([row for part in rows for row in part])


def _spread(curve: Curve, like: Curve, ranks: int = 8) -> Curve:
    """Splits a latency known at one rank count as another curve's splits."""
    doublings = float(np.log2(ranks))
    share = like.latency_us / (like.latency_us + doublings * like.latency_per_doubling_us)
    growth = curve.latency_us * (1 - share) / doublings
    latency = {"latency_us": curve.latency_us * share, "latency_per_doubling_us": growth}
    return curve.model_copy(update=latency)


def _scaled(curve: Curve, factor: float) -> Curve:
    return curve.model_copy(update={"us_per_mib": tuple(factor * c for c in curve.us_per_mib)})


def _send_recv_us(tables: dict[tuple[str, str, str], Rows], platform: str) -> float:
    """Median time of messages too small for bandwidth to count."""
    rows = _one(tables, f"{platform} (vidur)", "1x2", "send_recv")
    return float(np.median(rows.time_us[rows.size_bytes <= 20000]))


def _simai(folder: Path) -> Rows:
    """An all-to-all on one host of eight, from its efficiency against NVLink's line rate."""
    rows = []
    for row in read_csv(folder / SIMAI_FILE):
        size, efficiency = float(row["Size"]), float(row["1 Node(NVLinkx)"])
        rows.append((size, 8.0, size * 7 / 8 / (efficiency * NVLINK4_BYTES_PER_US)))
    return Rows.of(rows)


def _trace_minima(folder: Path) -> dict[str, Rows]:
    """Kernel times once the last rank has arrived: the shortest over ranks, by collective."""
    shortest: dict[tuple[str, str], tuple[float, float]] = {}
    for row in read_csv(folder / V100_TRACE_FILE):
        key = (row["et_collective"].removesuffix("v"), row["idx"])
        time = float(row["kernel_dur_us"])
        size, best = shortest.get(key, (float(row["in_bytes"]), np.inf))
        shortest[key] = (size, min(best, time))
    names: Sequence[str] = sorted({name for name, _ in shortest})
    return {
        name: Rows.of([(s, 8.0, t) for (op, _), (s, t) in shortest.items() if op == name])
        for name in names
    }
