"""Fits curves of collectives to measured rows, with the error on rows held out.

Pure functions from rows to the curves of `predictor.cost.collectives`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from predictor import units
from predictor.cost.collectives import bands, bus_factor, latency_ms, transfer_ms
from predictor.fit.scores import gmae, mape
from predictor.hardware.schema import Curve

Array = NDArray[np.float64]

EDGES_MIB = (0.0, 0.015625, 0.0625, 0.25, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)
"""Default size bands: one edge every two octaves from 16 KiB to 1 GiB of bus bytes."""
FINE_EDGES_MIB = (0.0, *(2.0**k for k in range(-8, 11)))
"""One band per octave from 4 KiB to 1 GiB: NCCL changes protocol (LL, LL128, Simple) and channels
within an octave, which wider bands would smear."""
ROBUST = 20
"""Reweightings for tables with few repeats and whole microseconds, such as vidur's."""
TRUSTED_ERROR = 0.01
"""Relative errors below it count as equally good in a reweighted fit."""
SMOOTHING = 0.05
"""Weight of the penalty on cost steps between neighbouring bands, against relative errors of 1."""
FIRM = 0.2
"""The same for rows of several rank counts and few sizes."""
OWN_PARTS = tuple(k / 20 for k in range(41))
SMALL_BYTES = 65536
"""Messages up to this size are bound by latency; their error is reported separately."""


@dataclass(frozen=True)
class CollectiveRows:
    """Timings of one collective on one platform: three arrays of shape ``[rows]``."""

    size_bytes: Array
    ranks: Array
    time_us: Array

    @classmethod
    def of(cls, rows: Sequence[tuple[float, float, float]]) -> CollectiveRows:
        """From (size_bytes, ranks, time_us), sorted by ranks, then size."""
        table = np.array(sorted((n, s, t) for s, n, t in rows), dtype=np.float64).reshape(-1, 3)
        return cls(table[:, 1], table[:, 0], table[:, 2])

    def where(self, keep: NDArray[np.bool_]) -> CollectiveRows:
        """The rows for which ``keep`` holds."""
        return CollectiveRows(self.size_bytes[keep], self.ranks[keep], self.time_us[keep])

    @property
    def every_second(self) -> NDArray[np.bool_]:
        """Mask: the first, third, ... size of every rank count."""
        chosen = np.zeros(len(self.size_bytes), dtype=bool)
        for n in np.unique(self.ranks):
            sizes = np.unique(self.size_bytes[self.ranks == n])
            chosen |= (self.ranks == n) & np.isin(self.size_bytes, sizes[::2])
        return chosen


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
    """The curve whose relative errors have the least squares, or the least absolute values.

    Non-negative least squares on the latency, its growth with log2 of the ranks (where the rows
    have several rank counts) and the marginal cost of every band; neighbouring bands that the rows
    cannot distinguish are pulled together.

    Args:
        latency_us: taken as given instead of fitted.
        reweightings: 0 for least squares; a dozen come close to least absolute errors, which
            tables need where one row in three is off by a factor (see `ROBUST`).
        like: a curve whose latencies are taken as given.
        own_part: of the curve.
        hops: the latency grows with the ranks too, not with their log2 alone.
    """
    time, bus_mib = rows.time_us, _bus_mib(rows, op)
    edges = [e for e in edges_mib if e < bus_mib.max()] or [0.0]
    start = like or Curve(latency_us=latency_us or 0.0, edge_mib=(0.0,), us_per_mib=(1.0,))
    given = np.array([latency_ms(start, int(n)) for n in rows.ranks]) / units.us(1.0)
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
    target = 1.0 - given / time
    steps = smoothing * _step_penalty(edges, bus_mib, time)
    penalty = np.pad(steps, ((0, 0), (latencies.shape[1], 0)))
    weight = np.ones_like(time)
    solution = _non_negative(columns, target, penalty)
    for _ in range(reweightings):
        off = np.abs(columns @ solution - target)
        weight = 1.0 / np.sqrt(np.maximum(off, TRUSTED_ERROR))
        weight /= np.sqrt((weight**2).mean())
        solution = _non_negative(columns * weight[:, None], target * weight, penalty)
    first, growth, per_rank, *costs = solution.tolist()
    return Curve(
        latency_us=start.latency_us + first,
        latency_per_doubling_us=start.latency_per_doubling_us + growth,
        latency_per_rank_us=start.latency_per_rank_us + per_rank,
        edge_mib=tuple(edges),
        us_per_mib=(*costs[:-1], max(costs[-1], 1e-9)),
        own_part=own_part,
    )


def fit_own_part(
    rows: CollectiveRows, op: str, edges_mib: Sequence[float], like: Curve | None = None
) -> Curve:
    """The curve over several rank counts, with what a rank's own part costs.

    Least absolute errors; the share is the best of `OWN_PARTS`.
    """

    def fitted(own: float) -> Curve:
        return fit_curve(
            rows,
            op,
            edges_mib,
            smoothing=FIRM,
            reweightings=ROBUST,
            like=like,
            own_part=own,
            hops=True,
        )

    def missed(curve: Curve) -> float:
        return mape(errors(curve, rows, op))

    return min((fitted(own) for own in OWN_PARTS), key=missed)


def _non_negative(columns: Array, target: Array, penalty: Array) -> Array:
    """Least squares with coefficients >= 0, columns scaled to one."""
    from scipy.optimize import nnls

    matrix = np.vstack((columns, penalty))
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(matrix / scale, np.concatenate((target, np.zeros(len(penalty)))))
    return np.asarray(solution / scale)


def _bus_mib(rows: CollectiveRows, op: str) -> Array:
    factor = np.array([bus_factor(op, int(n)) if op in _COUNTED else 1.0 for n in rows.ranks])
    return np.asarray(rows.size_bytes * factor / units.MIB)


_COUNTED = ("all_to_all", "all_reduce", "reduce_scatter", "all_gather")


def _step_penalty(edges: Sequence[float], bus_mib: Array, time: Array) -> Array:
    """``[edges - 1, edges]``: cost steps, relative to the time at the joint."""
    order = np.argsort(bus_mib)
    matrix = np.zeros((len(edges) - 1, len(edges)))
    for j, edge in enumerate(edges[1:]):
        weight = edge / float(np.interp(edge, bus_mib[order], time[order]))
        matrix[j, j], matrix[j, j + 1] = weight, -weight
    return matrix


def predict_us(curve: Curve, rows: CollectiveRows, op: str) -> Array:
    """Times in microseconds, shape ``[rows]``."""
    result = np.empty_like(rows.time_us)
    bus_bytes = _bus_mib(rows, op) * units.MIB
    for n in np.unique(rows.ranks):
        here = rows.ranks == n
        time = latency_ms(curve, int(n)) + transfer_ms(curve, bus_bytes[here], int(n))
        result[here] = time / units.us(1.0)
    return result


def errors(curve: Curve, rows: CollectiveRows, op: str) -> Array:
    """Relative errors ``predicted / measured - 1``, shape ``[rows]``."""
    return predict_us(curve, rows, op) / rows.time_us - 1.0


@dataclass(frozen=True)
class Score:
    """Held-out error above and up to 64 KiB, as fractions; NaN where there are no rows."""

    gmae: float
    mape: float
    gmae_small: float
    n: int


def score_every_second(rows: CollectiveRows, op: str) -> Score:
    """Fit on every second size, score on the others."""
    chosen = rows.every_second
    held_out = rows.where(~chosen)
    error = errors(fit_curve(rows.where(chosen), op), held_out, op)
    return _score(error, held_out.size_bytes > SMALL_BYTES)


def score_ranks(rows: CollectiveRows, op: str, fit_ranks: Sequence[int]) -> Score:
    """Fit on some rank counts, score on the others."""
    chosen = np.isin(rows.ranks, fit_ranks)
    held_out = rows.where(~chosen)
    error = errors(fit_curve(rows.where(chosen), op), held_out, op)
    return _score(error, held_out.size_bytes > SMALL_BYTES)


def _score(error: Array, large: NDArray[np.bool_]) -> Score:
    def over(mask: NDArray[np.bool_], of: Callable[[Array], float]) -> float:
        return of(error[mask]) if mask.any() else math.nan

    return Score(over(large, gmae), over(large, mape), over(~large, gmae), len(error))


def fit_rank_cost(rows: CollectiveRows, op: str, reference: int) -> Curve:
    """A curve fitted at one rank count, with a factor on its marginal costs at the others.

    For wirings whose bandwidth jumps with the ranks, such as the cube mesh of V100 hosts, whose
    number of rings depends on them.
    """
    curve = fit_curve(rows.where(rows.ranks == reference), op)
    cost = {}
    for n in np.unique(rows.ranks):
        here = rows.where(rows.ranks == n)
        latency = latency_ms(curve, int(n)) / units.us(1.0)
        unit = predict_us(curve, here, op) - latency
        # least squares of relative errors in the one factor
        x, y = unit / here.time_us, 1.0 - latency / here.time_us
        cost[int(n)] = float((x @ y) / (x @ x))
    return curve.model_copy(update={"rank_cost": cost})
