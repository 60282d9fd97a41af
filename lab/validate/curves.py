"""Curves of collectives fitted to public tables, and predictions at other rank counts.

Costs per byte change with the ranks where the wiring does. Two cases are modelled:

- *A switch* (NVSwitch): every rank keeps its links for any number of ranks, so the bus cost stays
  and the latency grows with each doubling. Every measured rank count has a factor on the costs;
  between them it is interpolated, beyond them the last one holds.
- *The cube mesh of a DGX-1* (V100): NCCL runs as many rings as the links of the chosen GPUs can
  close. A ring enters and leaves each GPU through different neighbours, so a GPU with links
  ``l_i`` takes part in at most ``min(sum l, 2 (sum l - max l))`` of them, and the tightest GPU
  decides. A GPU with one neighbour closes no ring; then NCCL runs a chain over one link.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from predictor import units
from predictor.cost.collectives import bus_factor, latency_ms
from predictor.hardware.schema import Curve
from shardopt.calibrate.collectives import CollectiveRows, errors, fit_curve, predict_us
from shardopt.calibrate.fitting import Array, mape

FINE_EDGES_MIB = (0.0, *(2.0**k for k in range(-8, 11)))
"""Edges of one band per octave, 4 KiB to 1 GiB: NCCL changes protocol (LL, LL128, Simple) and
channels within an octave, which wider bands would smear."""
ROBUST = 20
"""Reweightings for tables with few repeats and whole microseconds, such as vidur's."""
FIRM = 0.2
"""The same for rows of several rank counts and few sizes."""
OWN_PARTS = tuple(k / 20 for k in range(41))
CUBE_MESH = {
    **{(0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2},
    **{(2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2},
}
"""NVLinks between the GPUs of a DGX-1 with V100 (NVIDIA DGX-1 with Tesla V100 system architecture,
figure 4, and what nvidia-smi topo -m prints there)."""
CUBE_MESH_GPUS = 8


def every_second(rows: CollectiveRows) -> NDArray[np.bool_]:
    """Return a mask of the first, third, ... size of every rank count."""
    chosen = np.zeros(len(rows.size_bytes), dtype=bool)
    for n in np.unique(rows.ranks):
        sizes = np.unique(rows.size_bytes[rows.ranks == n])
        chosen |= (rows.ranks == n) & np.isin(rows.size_bytes, sizes[::2])
    return chosen


def fit_own_part(rows: CollectiveRows, op: str, edges_mib: Sequence[float]) -> Curve:
    """Fit a curve over several rank counts, with the cost of a rank's own part.

    Least absolute errors; the share is the best of `OWN_PARTS`.
    """

    def fitted(own: float) -> Curve:
        return fit_curve(
            rows, op, edges_mib, smoothing=FIRM, reweightings=ROBUST, own_part=own, hops=True
        )

    def missed(curve: Curve) -> float:
        return mape(errors(curve, rows, op))

    return min((fitted(own) for own in OWN_PARTS), key=missed)


def fit_rank_cost(
    rows: CollectiveRows, op: str, reference: int, like: Curve | None = None
) -> Curve:
    """Fit a curve at one rank count, with a factor on its marginal costs at the others.

    For wirings whose bandwidth jumps with the ranks, such as the cube mesh of V100 hosts, whose
    number of rings depends on them.

    Args:
        like: a curve whose latencies are kept.
    """
    curve = fit_curve(rows.where(rows.ranks == reference), op, like=like)
    cost = {}
    for n in np.unique(rows.ranks):
        here = rows.where(rows.ranks == n)
        latency = latency_ms(curve, int(n)) / units.us(1.0)
        unit = predict_us(curve, here, op) - latency
        # least squares of relative errors in the one factor
        x, y = unit / here.time_us, 1.0 - latency / here.time_us
        cost[int(n)] = float((x @ y) / (x @ x))
    return curve.model_copy(update={"rank_cost": cost})


def cube_mesh_rings(ranks: int) -> float:
    """Return the bus bandwidth among the first ``ranks`` GPUs of a DGX-1, in rings.

    2 to 8 ranks: 1, 2, 4, 1.6, 2, 4, 6. Five ranks run a chain, whose algorithm bandwidth is that
    of one link; in bus bytes that is the bus factor.
    """
    links = np.zeros((ranks, ranks))
    for (a, b), count in CUBE_MESH.items():
        if a < ranks and b < ranks:
            links[a, b] = links[b, a] = count
    if ranks == 2:
        return float(links[0, 1])
    total, most = links.sum(axis=1), links.max(axis=1)
    rings = float(np.minimum(total, 2 * (total - most)).min())
    return rings or bus_factor("all_reduce", ranks)


def has_cube_mesh(platform: str, ranks: Array) -> bool:
    """Return true if a table comes from one DGX-1 of V100s."""
    return platform.lower().startswith("v100") and float(ranks.max()) <= CUBE_MESH_GPUS


def predict_ranks(
    measured: CollectiveRows, targets: CollectiveRows, op: str, platform: str
) -> Array:
    """Predict times in microseconds at some rank counts, from rows at others.

    Args:
        measured: rows to fit, of two rank counts or more.
        targets: sizes and rank counts to predict; their times are not used.
    """
    if has_cube_mesh(platform, np.concatenate((measured.ranks, targets.ranks))):
        measured, targets = _per_ring(measured), _per_ring(targets)
        curve = fit_curve(measured, op, FINE_EDGES_MIB, reweightings=ROBUST)
    else:
        curve = _fit_switch(measured, op)
    return predict_us(curve, targets, op)


def _per_ring(rows: CollectiveRows) -> CollectiveRows:
    """Scale sizes to the load of one ring among eight ranks, on which the time depends."""
    most = cube_mesh_rings(CUBE_MESH_GPUS)
    share = np.array([most / cube_mesh_rings(int(n)) for n in rows.ranks])
    return CollectiveRows(rows.size_bytes * share, rows.ranks, rows.time_us)


def _fit_switch(rows: CollectiveRows, op: str) -> Curve:
    """Fit one curve for all rank counts, with a factor on its costs at each."""
    curve = fit_curve(rows, op, FINE_EDGES_MIB, reweightings=ROBUST)
    counts = np.unique(rows.ranks)
    factors = {int(n): _factor(curve, rows.where(rows.ranks == n), op) for n in counts}
    return curve.model_copy(update={"rank_cost": factors})


def _factor(curve: Curve, rows: CollectiveRows, op: str) -> float:
    """Return the median factor on transfer time at one rank count, where transfer dominates."""
    latency = latency_ms(curve, int(rows.ranks[0])) / units.us(1.0)
    transfer = predict_us(curve, rows, op) - latency
    large = transfer > latency
    if not large.any():
        return 1.0
    ratios = (rows.time_us[large] - latency) / transfer[large]
    return max(0.1, float(np.median(ratios)))
