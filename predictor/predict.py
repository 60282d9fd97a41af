"""The spine: plan -> loads -> graph -> timeline -> prediction. Nothing is measured or run.

loads       the work that each shard puts on its rank          (predictor.cost.loads)
graph       the operations of one iteration and their costs    (predictor.iteration.torchrec.dlrm)
timeline    when each runs; collectives wait for the last rank (predictor.iteration.timeline)
breakdown   which chain of work fills the iteration            (predictor.iteration.critical_path)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from predictor.cost.errors import Z_90, resource_groups
from predictor.cost.loads import Load, ShardLoads
from predictor.hardware.loader import load_runtime
from predictor.hardware.schema import Group, HardwareProfile, ProvenanceKind, weakest
from predictor.iteration.critical_path import HOST, Segment, critical_path
from predictor.iteration.graph import Graph
from predictor.iteration.plan_scorer import PlanScorer
from predictor.iteration.ranges import OutOfRange, out_of_range
from predictor.iteration.timeline import Timeline, simulate
from predictor.model.memory.peak import memory_of_plan
from predictor.model.memory.ranks import RankMemory
from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import match_plan
from predictor.model.topology import Topology
from predictor.model.workload import Workload

WAITING = "uneven_batches"
"""Phase in which ranks wait for the one whose batch has the most ids."""
PHASES = (
    "input_copy",
    "input_dist",
    "prefetch",
    "embedding_forward",
    "output_dist_forward",
    "dense_forward",
    "dense_backward",
    "output_dist_backward",
    "embedding_backward",
    "all_reduce",
    "optimizer",
    "stash",
    "replica_sync",
    WAITING,
    HOST,
)
"""Named parts of a breakdown, in the order of an iteration."""
ITERATION_ERROR: Mapping[str, float | None] = load_runtime("torchrec")["iteration_error"]
"""1-sigma relative error of whole iterations, on top of that of the constants, by the ``execution``
of a profile; None if unknown."""


@dataclass(frozen=True)
class RankLoad:
    """Load of one rank in one iteration.

    Args:
        busy_ms: phase -> time that the rank's own kernels and transfers take.
        idle_ms: time in which its compute stream waits: for other ranks, transfers or the host.
    """

    rank: int
    busy_ms: dict[str, float]
    idle_ms: float


@dataclass(frozen=True)
class ReplicaSync:
    """Cost of averaging the copies of tables once.

    Args:
        weight_bytes, state_bytes: bytes that each rank of a sharding group all-reduces with the
            ranks that hold the same shards.
        sync_ms: time of one averaging on the slowest rank.
        step_ms: time of an iteration that averages; the prediction's ``iteration_ms`` spreads the
            averaging evenly over all iterations.
        within_step: weights are averaged between forward and backward of every step, overlapped
            with other work (``fully_sharded``).
    """

    weight_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]
    sync_ms: float
    step_ms: float
    within_step: bool = False


@dataclass(frozen=True)
class Prediction:
    """Predicted iteration of one plan.

    Args:
        iteration_ms: steady-state period of the training loop.
        interval_ms: 90 % interval ``(low, high)``, from the profile's stated errors.
        interval_calibrated: True if the coverage of such intervals was checked on measurements.
        breakdown: phase -> part of the critical path; the parts sum to ``iteration_ms``.
        provenance: the weakest of the constants on the critical path.
        critical_path: the chain itself, in order of time.
        out_of_range: quantities beyond the measurements behind the profile.
        dense_ops_by_bytes: op of the dense part without a kernel model -> number of calls; such
            ops are priced by the bytes that they touch.
        dense_by_module: submodule -> device time in ms of its forward and its backward; empty
            if the dense part was not captured from a module.
        replica_sync: None without copies of tables.
    """

    iteration_ms: float
    interval_ms: tuple[float, float]
    breakdown: dict[str, float]
    per_rank: tuple[RankLoad, ...]
    memory: tuple[RankMemory, ...]
    provenance: ProvenanceKind
    critical_path: tuple[Segment, ...]
    graph: Graph
    timeline: Timeline
    out_of_range: tuple[OutOfRange, ...] = ()
    dense_ops_by_bytes: dict[str, int] = field(default_factory=dict)
    dense_by_module: dict[str, tuple[float, float]] = field(default_factory=dict)
    replica_sync: ReplicaSync | None = None
    interval_calibrated: bool = False


def predict(
    workload: Workload,
    topology: Topology,
    hardware: HardwareProfile,
    plan: ShardingPlan,
    shards: ShardLoads | None = None,
) -> Prediction:
    """Predict one iteration of ``workload`` under ``plan``.

    Args:
        workload: the model and its batch per rank.
        topology, hardware: ranks with the memory left for shards, and their costs.
        plan: one sharding per table of the workload, for the topology's world size.
        shards: see `PlanScorer`.

    Raises:
        PlanError: the plan does not cover the workload's tables or the topology's ranks.
    """
    tables = match_plan(workload, topology, plan)
    scorer = PlanScorer(workload, topology, hardware, shards=shards)
    costs = scorer.costs
    loads = scorer.totals(tables)
    graph = scorer.graph(loads[None])
    timeline = simulate(graph, keep_steps=True)
    path = critical_path(graph, timeline)
    groups = [g for s in path for g in profile_groups(s.resource, hardware, topology)]
    iteration_ms = float(timeline.iteration_ms[0])
    return Prediction(
        iteration_ms=iteration_ms,
        interval_ms=iteration_interval(iteration_ms, path, hardware, topology),
        breakdown=_breakdown(path),
        per_rank=_per_rank(graph, iteration_ms),
        memory=tuple(memory_of_plan(workload, topology, plan, hardware.device)),
        provenance=weakest(tuple(g.provenance.kind for g in groups)),
        critical_path=tuple(path),
        graph=graph,
        timeline=timeline,
        out_of_range=out_of_range(costs, tables, loads),
        dense_ops_by_bytes=costs.dense.by_bytes,
        dense_by_module=costs.dense.by_module,
        replica_sync=None if topology.job is None else _replica_sync(workload, graph, loads),
        interval_calibrated=ITERATION_ERROR[hardware.execution] is not None,
    )


def _replica_sync(
    workload: Workload, graph: Graph, loads: NDArray[np.float64]
) -> ReplicaSync | None:
    """Return the cost of averaging the copies once; None if nothing is averaged.

    The graph holds the share of it that falls on each step.

    Args:
        loads: ``[groups, ranks, COLUMNS]``.
    """
    groups = workload.replica_groups
    syncs = [i for i, op in enumerate(graph.ops) if op.phase == "replica_sync"]
    if groups is None or not syncs:
        return None
    weights, states = (
        tuple(loads[..., column].sum(axis=0).astype(int).tolist())
        for column in (Load.SYNCED_WEIGHTS, Load.SYNCED_STATES)
    )
    steps = groups.sync_interval
    ops = [
        replace(op, cost_ms=op.cost_ms * steps, host_ms=op.host_ms * steps) if i in syncs else op
        for i, op in enumerate(graph.ops)
    ]
    sync_ms = float(np.sum([ops[i].cost_ms for i in syncs], axis=0).max())
    step_ms = float(simulate(replace(graph, ops=ops)).iteration_ms[0])
    return ReplicaSync(weights, states, sync_ms, step_ms, groups.fully_sharded)


def _breakdown(path: list[Segment]) -> dict[str, float]:
    parts = dict.fromkeys(PHASES, 0.0)
    for segment in path:
        parts[segment.phase] += segment.duration_ms - segment.waiting_ms
        parts[WAITING] += segment.waiting_ms
    return {phase: ms for phase, ms in parts.items() if ms > 0}


def _per_rank(graph: Graph, iteration_ms: float) -> tuple[RankLoad, ...]:
    loads = []
    for rank in range(graph.world_size):
        busy = dict.fromkeys(PHASES, 0.0)
        computing = 0.0
        for op in graph.ops:
            cost = op.cost_on(rank)
            waiting = op.waiting_on(rank)
            busy[op.phase] += cost - waiting
            busy[WAITING] += waiting
            computing += cost if op.stream == "compute" else 0.0
        positive = {phase: ms for phase, ms in busy.items() if ms > 0}
        loads.append(RankLoad(rank, positive, max(0.0, iteration_ms - computing)))
    return tuple(loads)


def profile_groups(resource: str, hardware: HardwareProfile, topology: Topology) -> list[Group]:
    """Return the profile groups behind a resource: collectives use every link the ranks span."""
    return [hardware.groups[name] for name in resource_groups(resource, topology)]


def iteration_interval(
    iteration_ms: float,
    path: list[Segment],
    hardware: HardwareProfile,
    topology: Topology,
    software_error: float = 0.0,
) -> tuple[float, float]:
    """Return the 90 % interval ``(low, high)`` in ms of an iteration with this critical path.

    Errors of one profile group count as fully correlated. Errors of different groups, and that of
    whole iterations (`ITERATION_ERROR`), count as independent. The interval is log-normal, so that
    it stays positive.

    Args:
        software_error: 1-sigma relative error of the iteration from software that behaves
            differently than predicted.
    """
    by_resource: dict[str, float] = {}
    for segment in path:
        by_resource[segment.resource] = by_resource.get(segment.resource, 0) + segment.duration_ms
    variance = sum(
        (ms * max(g.rel_error for g in profile_groups(resource, hardware, topology))) ** 2
        for resource, ms in by_resource.items()
    )
    own = ITERATION_ERROR[hardware.execution] or 0.0
    factor = math.exp(Z_90 * math.hypot(math.sqrt(variance) / iteration_ms, own, software_error))
    return iteration_ms / factor, iteration_ms * factor
