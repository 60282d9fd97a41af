"""Share of the network between hosts in a plan's time, and the same plan over others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from predictor.cost.collectives import OPS
from predictor.cost.loads import ShardLoads
from predictor.hardware.networks import Network
from predictor.hardware.schema import Curve, HardwareProfile
from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import match_plan
from predictor.predict import Prediction, predict
from search.problem import Problem

LEAST_SHARE = 0.005
"""Share of an iteration that a stage must grow by."""
SLOWER = 2.0
"""Factor on all times between hosts that tells which stage they decide."""
OTHERS = ("ib-ndr", "roce", "efa-v2", "tcpx")
"""Kinds that are predicted in place of the assumed one: for rent, and unlike one another."""


@dataclass(frozen=True)
class NetworkPart:
    """The part of the network between hosts in an iteration.

    Args:
        stage: longest phase of the breakdown that a slower network prolongs; None: it prolongs
            hardly any.
        stage_ms: of it on the critical path.
        others: kind -> iteration in ms of the same plan over it; empty where the network was named.
    """

    stage: str | None
    stage_ms: float
    others: Mapping[str, float]


def network_part(
    problem: Problem, plan: ShardingPlan, prediction: Prediction, *, named: bool
) -> NetworkPart | None:
    """Find what the network decides of a plan's iteration; None where NICs join no ranks of it.

    Args:
        named: somebody said what network it is.
    """
    hardware = problem.hardware
    if problem.topology.whole.groups == 1 or hardware.inline:
        return None

    inputs = problem.workload, problem.topology
    loads = problem.loads or ShardLoads(*inputs, hardware)  # of lookups, which no network changes
    problem = replace(problem, loads=loads)
    tables = match_plan(*inputs, plan)

    def time_over(kind: str) -> float:
        other = replace(problem, hardware=Network(kind).joins(hardware))
        return float(other.scorer.score([tables])[0])

    slower = predict(*inputs, _slower(hardware), plan, loads)
    least = LEAST_SHARE * prediction.iteration_ms
    decided = {
        phase: part
        for phase, part in prediction.breakdown.items()
        if slower.breakdown.get(phase, 0.0) - part >= least
    }
    stage = max(decided, key=decided.__getitem__, default=None)
    by_kind = {} if named else {kind: time_over(kind) for kind in OTHERS}
    return NetworkPart(stage, 0.0 if stage is None else decided[stage], by_kind)


def _slower(hardware: HardwareProfile) -> HardwareProfile:
    """The same hosts with `SLOWER` times the latency of the network and cost of a byte."""
    inter, changed = hardware.collectives.inter, dict[str, Any]()
    for op in OPS:
        curve: Curve = getattr(inter, op)
        latencies = ("latency_us", "latency_per_doubling_us", "latency_per_rank_us")
        update = {name: SLOWER * getattr(curve, name) for name in latencies}
        costs = tuple(SLOWER * cost for cost in curve.us_per_mib)
        changed[op] = curve.model_copy(update={**update, "us_per_mib": costs})
    if inter.peer_us_per_mib is not None:
        changed["peer_us_per_mib"] = SLOWER * inter.peer_us_per_mib
    links = hardware.collectives.model_copy(update={"inter": inter.model_copy(update=changed)})
    return hardware.model_copy(update={"collectives": links})
