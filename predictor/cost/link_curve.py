"""Time of one collective on one link, by message size and ranks.

A collective of ``n`` ranks moves ``w = size factor(n)`` bus bytes past the busiest link, with the
factors of nccl-tests (doc/PERFORMANCE.md): ``(n-1)/n`` for all-to-all, reduce-scatter and
all-gather, ``2 (n-1)/n`` for all-reduce. Its time is

    t(w, n) = latency + latency_per_doubling log2(n) + latency_per_rank (n - 1)
              + (1 + own_part / (n - 1)) rank_cost(n) sum_j c_j band_j(w)

where ``band_j`` rises with slope one from edge ``e_j`` to edge ``e_(j+1)`` and ``c_j >= 0`` is the
marginal cost of a byte in that band: continuous, and never falling with size. The joints are
hyperbolas, ``band_j(w) = h(w, e_j) - h(w, e_(j+1))`` with ``h(w, e) = sqrt(w^2 + e^2) - e``. Lin et
al. 2024 fit three pieces that do not meet; the bands replace them. `predictor.fit.collectives` fits
``c_j``.

A ring takes a hop per rank (NCCL src/graph/tuning.cc: ``nsteps`` times the latency of the link), a
tree a hop per doubling. Beside what a rank exchanges it copies or reduces its own ``1/n`` of the
buffer, ``w / (n - 1)`` bytes, each at ``own_part`` of a bus byte's cost; one is an all-reduce in
the switch (NVLS), whose time does not depend on the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from predictor import units
from predictor.hardware.schema import Curve

Array = NDArray[np.float64]


def bus_factor(op: str, ranks: int) -> float:
    """Bus bytes per byte of buffer (nccl-tests, doc/PERFORMANCE.md)."""
    return (2.0 if op == "all_reduce" else 1.0) * (ranks - 1) / ranks


def hyperbola(w: Array, edge: float) -> Array:
    """``sqrt(w^2 + edge^2) - edge``: flat below the edge, slope one above; free of cancellation."""
    return np.asarray(w * w / np.maximum(np.hypot(w, edge) + edge, np.finfo(np.float64).tiny))


def bands(w: Array, edges: Sequence[float]) -> Array:
    """``[..., edges]``: how many of the ``w`` bytes fall into each size band."""
    rises = [hyperbola(w, edge) for edge in edges] + [np.zeros_like(w)]
    return np.stack([a - b for a, b in pairwise(rises)], axis=-1)


def rank_cost(curve: Curve, ranks: int) -> float:
    """Factor on the marginal costs at this rank count: that of a rank's own part, and that of the
    wiring, linear in log2 of the ranks between."""
    own = 1.0 + curve.own_part / (ranks - 1)
    if not curve.rank_cost:
        return own
    known = sorted(curve.rank_cost)
    values = [curve.rank_cost[n] for n in known]
    return own * float(np.interp(np.log2(ranks), np.log2(known), values))


def latency_ms(curve: Curve, ranks: int) -> float:
    """Time of an empty message."""
    doublings = curve.latency_per_doubling_us * float(np.log2(ranks))
    return units.us(curve.latency_us + doublings + curve.latency_per_rank_us * (ranks - 1))


def transfer_ms(curve: Curve, bus_bytes: Array, ranks: int) -> Array:
    """Time beyond the latency, same shape as ``bus_bytes``."""
    edges = [units.MIB * edge for edge in curve.edge_mib]
    costs = units.us(1.0) / units.MIB * np.asarray(curve.us_per_mib)
    return np.asarray(bands(bus_bytes, edges) @ costs) * rank_cost(curve, ranks)
