"""Points of collectives as TorchRec calls them, and the curves of a link.

The reference kernels, which every bench run times too, lie before, between and after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor import units
from predictor.cost.collectives import OPS, bands, bus_factor, latency_ms, transfer_ms
from predictor.hardware.schema import Curve
from shardopt.calibrate.fitting import (
    REWEIGHTINGS,
    Array,
    CalibratedProfile,
    HeldOut,
    least_errors,
    total,
)
from shardopt.calibrate.points import REFERENCE_KERNELS, Point, Size
from shardopt.calibrate.rows import Measurement

SLOWEST_CALL_S = 0.15
"""Longest collective over a slow link; larger messages only take longer."""
ISSUE = "issue"
EDGES_MIB = (0.0, 0.015625, 0.0625, 0.25, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)
"""Default size bands: one edge every two octaves from 16 KiB to 1 GiB of bus bytes."""
SMOOTHING = 0.05
"""Weight of the penalty on cost steps between neighbouring bands, against relative errors of 1."""
FEWEST_SIZES = 3
"""Fewest fit rows of a collective for the curves of its link to be fitted."""


# Points.


def collective_points(
    size: Size, ranks: int, link_gbit_s: float | None = None, **among: Any
) -> list[Point]:
    """Return all collectives at every octave, in random order against drift of the machine.

    Octaves alternate between fit and test; the first and the last are fitted.

    Args:
        link_gbit_s: of the link between the ranks, where each is a host; limits the sizes.
        among: further params of every point.
    """
    low, high = size.collective_octaves
    among = {"ranks": ranks, **among}
    if link_gbit_s is not None:
        high = _last_octave(low, high, link_gbit_s)
        among["link_gbit_s"] = link_gbit_s
    points = [
        Point("collective", {"op": op, "bytes": 2**octave, **among}, (octave - low) % 2 == 1)
        for op in OPS
        for octave in range(low, high + 1)
    ]
    points.append(Point("collective", {"op": "issue", "bytes": 256, **among}))
    order = np.random.default_rng(0).permutation(len(points))
    return [points[i] for i in order]


def _last_octave(low: int, high: int, gbit_s: float) -> int:
    """Return the last octave that a link carries within `SLOWEST_CALL_S`, an even number above low.

    An all-reduce of two ranks sends its whole buffer each way, the other collectives less.
    """
    fits = int(np.log2(SLOWEST_CALL_S * gbit_s * 1e9 / 8))
    if fits >= high:
        return high
    return low + max(fits - low, 2) // 2 * 2


def reference_points(ranks: int, at: str, **among: Any) -> list[Point]:
    """Return the points of the reference kernels at one moment of the calibration."""
    return [
        Point("reference", {"at": at, "kernel": kernel, "ranks": ranks, **among})
        for kernel in REFERENCE_KERNELS
    ]


# Fit.


@dataclass(frozen=True)
class CollectiveRows:
    """Timings of one collective on one platform: three arrays of shape ``[rows]``."""

    size_bytes: Array
    ranks: Array
    time_us: Array

    @classmethod
    def of(cls, rows: Sequence[tuple[float, float, float]]) -> CollectiveRows:
        """Build from (size_bytes, ranks, time_us); sorts by ranks, then size."""
        table = np.array(sorted((n, s, t) for s, n, t in rows), dtype=np.float64).reshape(-1, 3)
        return cls(table[:, 1], table[:, 0], table[:, 2])

    def where(self, keep: NDArray[np.bool_]) -> CollectiveRows:
        return CollectiveRows(self.size_bytes[keep], self.ranks[keep], self.time_us[keep])


def fit_curve(
    rows: CollectiveRows,
    op: str,
    edges_mib: Sequence[float] = EDGES_MIB,
    smoothing: float = SMOOTHING,
    latency_us: float | None = None,
    reweightings: int = 0,
    like: Curve | None = None,
    own_part: float = 0.0,
    hops: bool = False,
) -> Curve:
    """Fit the curve with the least squared, or least absolute, relative errors.

    Non-negative least squares on the latency, its growth with log2 of the ranks (where the rows
    have several rank counts) and the marginal cost of every band; neighbouring bands that the rows
    cannot distinguish are pulled together.

    Args:
        latency_us: fixed latency; None: it is fitted.
        reweightings: 0 for least squares; a dozen come close to least absolute errors, which
            tables need where one row in three is off by a factor.
        like: a curve whose latencies are fixed.
        own_part: of the curve.
        hops: the latency grows with the ranks too, not with their log2 alone.
    """
    time, bus_mib = rows.time_us, _bus_mib(rows, op)
    edges = [e for e in edges_mib if e < bus_mib.max()] or [0.0]
    start = like or Curve(latency_us=latency_us or 0.0, edge_mib=(0.0,), us_per_mib=(1.0,))
    fixed_us = np.array([latency_ms(start, int(n)) for n in rows.ranks]) / units.us(1.0)
    several = len(np.unique(rows.ranks)) > 1 and like is None
    latencies = np.column_stack(
        (
            np.full_like(time, latency_us is None and like is None),
            np.log2(rows.ranks) * several,
            (rows.ranks - 1) * (several and hops),
        )
    )
    own = 1.0 + own_part / (rows.ranks - 1)
    columns = np.hstack((latencies, bands(bus_mib, edges) * own[:, None])) / time[:, None]
    target = 1.0 - fixed_us / time
    steps = smoothing * _step_penalty(edges, bus_mib, time)
    penalty = np.pad(steps, ((0, 0), (latencies.shape[1], 0)))
    solution = least_errors(columns, target, penalty, reweightings)
    first, growth, per_rank, *costs = solution.tolist()
    return Curve(
        latency_us=start.latency_us + first,
        latency_per_doubling_us=start.latency_per_doubling_us + growth,
        latency_per_rank_us=start.latency_per_rank_us + per_rank,
        edge_mib=tuple(edges),
        us_per_mib=(*costs[:-1], max(costs[-1], 1e-9)),
        own_part=own_part,
    )


def _bus_mib(rows: CollectiveRows, op: str) -> Array:
    factor = [bus_factor(op, int(n)) if op in OPS else 1.0 for n in rows.ranks]
    return np.asarray(rows.size_bytes * np.array(factor) / units.MIB)


def _step_penalty(edges: Sequence[float], bus_mib: Array, time: Array) -> Array:
    """Return weights of cost steps relative to the time at the joint, ``[edges - 1, edges]``."""
    order = np.argsort(bus_mib)
    matrix = np.zeros((len(edges) - 1, len(edges)))
    for j, edge in enumerate(edges[1:]):
        weight = edge / float(np.interp(edge, bus_mib[order], time[order]))
        matrix[j, j], matrix[j, j + 1] = weight, -weight
    return matrix


def predict_us(curve: Curve, rows: CollectiveRows, op: str) -> Array:
    """Predict the times in microseconds, shape ``[rows]``."""
    result = np.empty_like(rows.time_us)
    bus_bytes = _bus_mib(rows, op) * units.MIB
    for n in np.unique(rows.ranks):
        here = rows.ranks == n
        time = latency_ms(curve, int(n)) + transfer_ms(curve, bus_bytes[here], int(n))
        result[here] = time / units.us(1.0)
    return result


def errors(curve: Curve, rows: CollectiveRows, op: str, issued_us: float = 0.0) -> Array:
    """Return relative errors ``predicted / measured - 1``, shape ``[rows]``.

    Args:
        issued_us: the host's time to issue a collective; the rows hold it, the curve does not.
    """
    return (predict_us(curve, rows, op) + issued_us) / rows.time_us - 1.0


def curve_rows(rows: Sequence[Measurement], *, rings: bool = False) -> CollectiveRows:
    """Collect the rows of one collective for a fit, by trimmed means.

    Many collectives of an iteration add up to their mean, and trimming drops the hiccups of other
    work. Over a link a message takes once or twice its time on the wire, as acknowledgements of one
    direction may wait behind the data of the other. Among ranks of several hosts sizes and ranks
    are those on the link between hosts.

    Args:
        rings: the backend runs rings and trees over all ranks, as NCCL does.
    """
    return CollectiveRows.of([(*_on_the_link(r.point.params, rings), r.trimmed_us) for r in rows])


def _on_the_link(params: dict[str, Any], rings: bool) -> tuple[float, float]:
    """Return the bytes and ranks with which a curve of one link predicts this collective.

    They follow from the way `predictor.cost.collectives` joins levels. An all-to-all sends the
    bytes for other hosts over the link, and each rank there is one peer more. A reduction sends one
    share of a host's bytes, or over rings and trees the bytes of all ranks.
    """
    size, ranks, hosts = float(params["bytes"]), params["ranks"], params.get("hosts", 1)
    local = ranks // hosts
    if hosts == 1 or local == 1:
        return size, float(ranks)
    if params["op"] == "all_to_all":
        parties = ranks - local + 1
        return size * parties / ranks, float(parties)
    if rings and (hosts > 2 or params["op"] != "all_reduce"):
        # the curve counts (hosts - 1) / hosts of these bytes, all-reduces twice
        passed = 1.0 if params["op"] == "all_reduce" else (ranks - 1) / ranks
        size *= passed * hosts / (hosts - 1)
    return size / local, float(hosts)


def issue_us(rows: Sequence[Measurement]) -> float:
    """Return the host's median time to issue a collective; 0 without such rows."""
    issue = [row.median_us for row in rows if row.point.params["op"] == ISSUE]
    return float(np.median(issue)) if issue else 0.0


def fit_links(
    draft: CalibratedProfile,
    collective_us: float,
    latency_us: Mapping[str, float] | None = None,
    *,
    holds_issue: bool = False,
) -> CalibratedProfile:
    """Fit a curve for each collective on every link.

    Args:
        collective_us: the host's time to issue a collective, where no other constant has it.
        latency_us: of messages in an iteration, where ranks enter after other work and the main
            thread's part is in the host's ops; the rows then give the cost of bytes alone. None:
            the rows give the latency too.
        holds_issue: True if the rows hold the host's time to issue, which ops of the graph count.
    """
    fitted = draft
    for name, between in (("intra", False), ("inter", True)):
        rows = [row for row in draft.of("collective") if _is_between(row) == between]
        issued_us = issue_us(rows) if holds_issue else 0.0
        fitted = _fit_link(fitted, name, rows, issued_us, latency_us)
    if fitted.profile.collectives == draft.profile.collectives:
        return fitted
    return fitted.constants("overheads", collective_us=collective_us)


def _is_between(row: Measurement) -> bool:
    """Return True if a collective joins several hosts."""
    params = row.point.params
    return "link_gbit_s" in params or params.get("hosts", 1) > 1


def _fit_link(
    draft: CalibratedProfile,
    name: str,
    rows: Sequence[Measurement],
    issued_us: float,
    latency_us: Mapping[str, float] | None,
) -> CalibratedProfile:
    """Fit the curves of one link, unless its rows are too few."""
    by_op = {op: [r for r in rows if r.point.params["op"] == op] for op in OPS}
    if min(sum(not r.point.test for r in op_rows) for op_rows in by_op.values()) < FEWEST_SIZES:
        return draft.kept(f"collectives.{name}") if rows else draft
    local, rings = draft.wiring.local, not draft.profile.inline
    # labels name the link where there are two
    suffix = " between hosts" if name == "inter" and local > 1 else ""
    shipped = getattr(draft.base.collectives, name)
    curves: dict[str, Curve] = {}
    scores = []
    for op, op_rows in by_op.items():
        outside = issued_us
        if name == "inter" and op != "all_to_all" and local > 1:
            # a reduction between hosts of several ranks goes through them first
            within = getattr(draft.profile.collectives.intra, op)
            outside += latency_ms(within, local) / units.us(1.0)
        fit, test = (
            curve_rows([r for r in op_rows if r.point.test == held_out], rings=rings)
            for held_out in (False, True)
        )
        # the iteration graph charges the issue separately
        less = CollectiveRows(fit.size_bytes, fit.ranks, np.maximum(fit.time_us - outside, 1.0))
        curve = curves[op] = fit_curve(less, op, reweightings=REWEIGHTINGS)
        # only the cost of bytes is compared: the latency of rows is not that of iterations
        reference = getattr(shipped, op).model_copy(update={"latency_us": curve.latency_us})
        count, errors_of_shipped = len(fit.size_bytes), errors(reference, test, op, outside)
        scores.append(HeldOut(errors(curve, test, op, outside), count))
        draft = draft.error(f"{op}{suffix}", scores[-1], errors_of_shipped)
    if latency_us is not None:
        for op in OPS:
            in_iterations = {"latency_us": latency_us[op], "latency_per_doubling_us": 0.0}
            curves[op] = curves[op].model_copy(update=in_iterations)
    # rows of an all-reduce include the reduction in the switch
    changed: dict[str, Any] = {**curves, "in_switch": None, "small_rel_error": None}
    if name == "inter" and draft.wiring.link_gbit_s is not None:
        changed["nic_gbit_s"] = draft.wiring.link_gbit_s
    wire = getattr(draft.profile.collectives, name).model_copy(update=changed)
    sizes, ranks = ([row.point.params[key] for row in rows] for key in ("bytes", "ranks"))
    return draft.constants("collectives", **{name: wire}).measured(
        f"collectives.{name}", rows, total(scores), {"size_bytes": sizes, "ranks": ranks}
    )
