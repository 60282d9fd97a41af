"""Another sharding plan on a trace: how its lookups and exchanges would change, rank by rank.

The trace has their times under the plan it was recorded with; `predictor.predict` gives the ratio
of the same phases between both plans. Kernels of fused lookups and all-to-alls are scaled by that
ratio. Work that only the new plan has, such as a reduce-scatter, is not in the trace and is not
added; `PlanSwap.notes` lists it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from predictor.errors import InputError
from predictor.hardware.loader import HardwareProfile
from predictor.model.plan import ShardingPlan, ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from predictor.predict import Prediction, predict
from predictor.trace.events import DeviceEvent, RankTrace

FORWARD = re.compile(r"split_embedding\w*_forward|batch_index_select|bounds_check_indices")
BACKWARD = re.compile(
    r"split_embedding_backward_codegen_(?!dense)|linearize_index|RadixSort|find_long_segments"
)
"""Kernels of FBGEMM's fused TBE (codegen/training); those of dense tables stay with each rank."""
EXCHANGES = (
    "input_dist",
    "output_dist_forward",
    "output_dist_backward",
)


@dataclass(frozen=True)
class PlanSwap:
    """Times under the new plan over those under the old one, by rank.

    Args:
        forward, backward: of fused lookups; None on ranks that had none.
        exchange: of all-to-alls, which end together on all ranks.
    """

    forward: tuple[float | None, ...]
    backward: tuple[float | None, ...]
    exchange: float
    notes: tuple[str, ...]

    def factor(self, rank: int, event: DeviceEvent) -> float | None:
        """Factor for one kernel or collective of a rank; None if it does not depend on the plan."""
        if event.collective is not None:
            return self.exchange if event.collective.op in ("all_to_all", "send_recv") else None
        if BACKWARD.search(event.name):
            return self.backward[rank]
        return self.forward[rank] if FORWARD.search(event.name) else None


def plan_swap(
    traces: Sequence[RankTrace],
    workload: Workload,
    topology: Topology,
    hardware: HardwareProfile,
    before: ShardingPlan,
    after: ShardingPlan,
) -> PlanSwap:
    """Compare two plans of the traced model.

    Args:
        topology: of the traced job.
        hardware: of the device that the trace was taken on.
        before: the plan that it was taken with.

    Raises:
        InputError: a traced rank is not one of the plans'.
        PlanError: a plan does not fit the model or the topology.
    """
    outside = sorted({t.rank for t in traces} - set(range(topology.world_size)))
    if outside:
        raise InputError(
            f"the trace has rank {outside[0]}, the plans have ranks 0 to {topology.world_size - 1}"
        )
    old, new = (predict(workload, topology, hardware, plan) for plan in (before, after))
    forward, backward = (_ratios(old, new, f"embedding_{way}") for way in ("forward", "backward"))
    exchange = _exchanges(new) / _exchanges(old) if _exchanges(old) else 1.0
    return PlanSwap(forward, backward, exchange, tuple(_notes(old, new, before, after)))


def _busy(prediction: Prediction, phase: str) -> list[float]:
    return [load.busy_ms.get(phase, 0.0) for load in prediction.per_rank]


def _ratios(old: Prediction, new: Prediction, phase: str) -> tuple[float | None, ...]:
    pairs = zip(_busy(old, phase), _busy(new, phase), strict=True)
    return tuple(after / before if before > 0 else None for before, after in pairs)


def _exchanges(prediction: Prediction) -> float:
    """Time of all exchanges; they take as long on every rank."""
    return max(sum(load.busy_ms.get(p, 0.0) for p in EXCHANGES) for load in prediction.per_rank)


def _notes(
    old: Prediction, new: Prediction, before: ShardingPlan, after: ShardingPlan
) -> list[str]:
    found = [
        f"lookups and all-to-alls scaled by the predicted ratio of both plans, which take "
        f"{old.iteration_ms:.3g} and {new.iteration_ms:.3g} ms when predicted as a whole"
    ]
    idle = [
        rank
        for rank, (a, b) in enumerate(
            zip(_busy(old, "embedding_forward"), _busy(new, "embedding_forward"), strict=True)
        )
        if not a and b
    ]
    if idle:
        found.append(
            f"rank {', '.join(map(str, idle))} ran no lookups in the trace, so those that the new "
            "plan gives it are left out"
        )
    kinds = _types(after) - _types(before)
    if kinds:
        found.append(
            f"{', '.join(sorted(kinds))} was not used when traced; collectives and kernels that "
            "only it needs are left out"
        )
    return found


def _types(plan: ShardingPlan) -> set[ShardingType]:
    return {table.sharding_type for table in plan.tables.values()}
