"""Checks whether a prediction goes beyond the measurements behind its profile.

The largest message, multiplication and lookup are compared with the upper ends of the measured
ranges. Lower ends do not matter: for small sizes every cost model has a fitted floor. Above the
largest measured size the last slope is extrapolated, and what changes there (another protocol of
NCCL, another kernel, a cache that is too small) is in no constant. Rank counts are checked on both
sides, since fewer ranks use other rings and trees too. Batches of small products, elementwise
kernels, bulk copies and groups without ranges are not checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.loads import Load
from predictor.hardware.schema import HardwareProfile
from predictor.model.plan import TablePlan
from predictor.model.topology import Topology

Array = NDArray[np.float64]
Largest = dict[str, dict[str, float]]
"""Group of the profile -> quantity -> the largest value in the prediction."""

ROUNDED = 1e-4
"""Tolerance for bounds that profiles hold to five digits."""


@dataclass(frozen=True)
class OutOfRange:
    """Quantity for which a prediction leaves the measured range of a group.

    Args:
        group: of the profile.
        profile: name or file that the group comes from.
        quantity: as in the group's ``provenance.range``.
        asked: the largest value in the prediction.
        low, high: the measured range.
    """

    group: str
    profile: str
    quantity: str
    asked: float
    low: float
    high: float


def out_of_range(
    costs: FixedCosts, plans: Sequence[TablePlan], loads: Array
) -> tuple[OutOfRange, ...]:
    """List the quantities for which a prediction leaves the ranges of its profile, by group.

    Args:
        costs: those that the prediction's graph was built with.
        plans: the sharding of every table.
        loads: their summed loads, ``[groups, ranks, COLUMNS]``.
    """
    largest: Largest = defaultdict(dict)
    for collectives in costs.all_collectives:
        for (op, scope), size in collectives.largest.items():
            for group, share in collectives.shares(op, scope):
                largest_bytes = largest[group].get("size_bytes", 0.0)
                largest[group]["size_bytes"] = max(largest_bytes, share * size)
    shapes = costs.dense.products
    if shapes:
        sides = np.array([*shapes], dtype=np.float64).max(axis=0)
        flop = max(2.0 * m * n * k for m, n, k in shapes)
        largest["gemm"] = dict(zip(("m", "n", "k", "flop"), (*sides.tolist(), flop), strict=True))
    largest["embedding"] = _largest_lookups(plans, loads)
    return (
        *ranks_outside(costs.hardware, costs.topology.whole),
        *_outside(costs.hardware, largest),
    )


def _largest_lookups(plans: Sequence[TablePlan], loads: Array) -> dict[str, float]:
    """Return the largest shard, and the largest fused lookup of any rank."""
    sizes = [shard.size for plan in plans for shard in plan.shards]
    return {
        "rows": float(max((rows for rows, _ in sizes), default=0)),
        "dim": float(max((dim for _, dim in sizes), default=0)),
        "tables": float(loads[..., Load.SHARDS].max(initial=0.0)),
        "ids": float(loads[..., Load.IDS].max(initial=0.0)),
    }


def ranks_outside(hardware: HardwareProfile, topology: Topology) -> list[OutOfRange]:
    """List groups of collectives used outside their measured rank counts; needs no plan."""
    joined = {"intra": min(topology.nvlink_domain, topology.world_size)}
    if topology.groups > 1:
        joined["inter"] = topology.world_size
    ranks = {f"collectives.{link}": {"ranks": float(n)} for link, n in joined.items() if n > 1}
    return _outside(hardware, ranks)


def _outside(
    hardware: HardwareProfile, largest: Mapping[str, Mapping[str, float]]
) -> list[OutOfRange]:
    outside = []
    for name, group in hardware.groups.items():
        for quantity, (low, high) in group.provenance.range.items():
            value = largest.get(name, {}).get(quantity, low)
            if value > high * (1 + ROUNDED) or (quantity == "ranks" and value < low):
                profile = hardware.origins[name]
                outside.append(OutOfRange(name, profile, quantity, value, low, high))
    return outside
