"""Learning from a job that ran: measured phases against predicted ones correct a profile.

This module pairs measured with predicted times; `predictor.cost.posterior` computes the factors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from predictor.cost.loads import KERNELS, ShardLoads
from predictor.cost.posterior import LEAST_NOISE, STEP, posterior
from predictor.errors import InputError
from predictor.hardware.learned import (
    BYTES,
    COPIES,
    EXCHANGES,
    FIXED,
    HOST,
    LATENCY,
    LOOKUPS,
    Evidence,
    Factor,
    Learned,
    lookup_part,
)
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.critical_path import HOST as HOST_PHASE
from predictor.iteration.graph import Op, host_part_of, part_of
from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import match_plan
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from predictor.predict import Prediction, predict
from predictor.trace.phases import REST, Measured

Parts = dict[str, float]

RESOLUTION_MS = 0.02
"""Error of any time beside `LEAST_NOISE`: the clocks around a phase take time themselves."""

SLOW_HOST = 100.0
"""Factor on host costs at which the host alone decides any step."""


@dataclass(frozen=True)
class Unmatched:
    """Measured time without a predicted counterpart."""

    name: str
    ms: float


def learn(
    workload: Workload,
    topology: Topology,
    hardware: HardwareProfile,
    plan: ShardingPlan,
    measured: Sequence[Measured],
    *,
    name: str,
    steps: int,
    machine: str,
    date: str,
    host_decides: bool = True,
) -> tuple[Learned, list[Unmatched]]:
    """Learn from the steps of one plan, together with the profile's earlier evidence.

    Args:
        name: of the plan.
        host_decides: the devices waited for the host; else a step is no evidence about it.

    Raises:
        InputError: no measured phase is predicted for this plan, or all are far off.
        PlanError: the plan does not fit the workload or the ranks.
    """
    before = hardware.learned
    if before is not None and before.model != workload.name:
        raise InputError(
            f"the profile has learned from model '{before.model}', and this is '{workload.name}'; "
            "start from the profile below it",
            inputs=("hardware",),
        )
    plain = hardware.model_copy(update={"learned": None})
    rows, unmatched = evidence(workload, topology, plain, plan, measured)
    if not host_decides:
        rows = [_without_host(row) for row in rows if {*row.parts_ms} - {HOST}]
    elif not plain.inline:
        issued = _issued_parts(workload, topology, plain, plan)
        rows = [_of_host(row, issued) if row.what == STEP else row for row in rows]
    if not rows:
        raise InputError(
            "none of the measured phases is one of this plan's; give the model and plan that ran"
        )
    every = (*(() if before is None else before.evidence), *rows)
    factors, errors = posterior(every, plain, topology)
    plans = () if before is None else before.plans
    return (
        Learned(
            model=workload.name,
            plans=tuple(dict.fromkeys((*plans, name))),
            machine=machine,
            steps=steps + (0 if before is None else before.steps),
            date=date,
            factors=factors,
            errors=errors,
            evidence=every,
        ),
        unmatched,
    )


def evidence(
    workload: Workload,
    topology: Topology,
    hardware: HardwareProfile,
    plan: ShardingPlan,
    measured: Iterable[Measured],
) -> tuple[list[Evidence], list[Unmatched]]:
    """Pair measured times with their predicted parts; times without are unmatched."""
    predicted = predicted_parts(workload, topology, hardware, plan)
    matched, unmatched = [], []
    for time in measured:
        parts = predicted.get((time.what, time.rank or 0), {})
        total = sum(parts.values())
        where = time.what if time.rank is None else f"{time.what} of rank {time.rank}"
        if total <= 0 or time.ms <= 0:
            unmatched.append(Unmatched(where, time.ms))
            continue
        noise = math.hypot(max(time.noise, LEAST_NOISE), RESOLUTION_MS / time.ms)
        matched.append(Evidence(what=where, measured_ms=time.ms, noise=noise, parts_ms=parts))
    return matched, unmatched


def _without_host(row: Evidence) -> Evidence:
    """Drop the host's part from a piece of evidence."""
    parts = {part: ms for part, ms in row.parts_ms.items() if part != HOST}
    return row.model_copy(update={"parts_ms": parts})


def _of_host(row: Evidence, issued: Parts) -> Evidence:
    """Attribute a step that waited for the host to it, whatever the prediction waits for."""
    return row.model_copy(update={"parts_ms": issued}) if issued else row


def _issued_parts(
    workload: Workload, topology: Topology, hardware: HardwareProfile, plan: ShardingPlan
) -> Parts:
    """Return the host's time in a step that it alone decides; empty if it takes none."""
    slow = predict(workload, topology, _with_factor(hardware, HOST, SLOW_HOST), plan)
    parts = _step_parts(slow, slow.graph.ops, {})
    return {HOST: parts[HOST] / SLOW_HOST} if parts[HOST] > 0 else {}


def predicted_parts(
    workload: Workload, topology: Topology, hardware: HardwareProfile, plan: ShardingPlan
) -> dict[tuple[str, int], Parts]:
    """Map each phase of `Measured` and rank to the parts of its predicted time in ms."""
    prediction = predict(workload, topology, hardware, plan)
    empty = predict(workload, topology, _without_bytes(hardware), plan).graph.ops
    by_phase: dict[tuple[str, int], Parts] = defaultdict(lambda: defaultdict(float))
    tables = _table_parts(workload, topology, hardware, plan)
    for op, without in zip(prediction.graph.ops, empty, strict=True):
        way, part = _way(op.phase), part_of(op)
        for rank in range(topology.world_size):
            ms = op.cost_on(rank)
            if way is not None:
                exchange = op.name.removesuffix(" backward").removesuffix(" lookup")
                what = f"{LOOKUPS}.{way} {exchange}"
                _add(by_phase[what, rank], tables.get((way, exchange, rank), {}), ms)
            else:
                what = REST if hardware.inline and part in (COPIES, HOST, FIXED) else part
                _split(by_phase[what, rank], part, ms, without.cost_on(rank))
            if hardware.inline:
                host = host_part_of(op, prediction.graph)
                issued = what if host == part or way is not None else REST
                by_phase[issued, rank][host] += op.host_ms
    for rank in range(topology.world_size):
        by_phase[STEP, rank] = _step_parts(prediction, empty, tables)
    return {key: {k: v for k, v in parts.items() if v > 0} for key, parts in by_phase.items()}


def _without_bytes(hardware: HardwareProfile) -> HardwareProfile:
    """Return a profile in which all messages cost as much as empty ones."""
    return _with_factor(hardware, f"{EXCHANGES}.{BYTES}", 1e-9)


def _with_factor(hardware: HardwareProfile, group: str, factor: float) -> HardwareProfile:
    """Return a profile in which one kind of cost is multiplied by a factor."""
    slowed = Factor(group=group, table=None, factor=factor, error=0.0, evidence_ms=0.0)
    learned = Learned(
        model="", plans=(), machine="", steps=1, date="", factors=(slowed,), errors={}, evidence=()
    )
    return hardware.model_copy(update={"learned": learned})


def _split(total: Parts, part: str, ms: float, latency_ms: float) -> None:
    """Add a time; split that of an exchange into latency and bytes."""
    if not part.startswith(f"{EXCHANGES}."):
        total[part] += ms
        return
    kind = part.removeprefix(f"{EXCHANGES}.")
    latency_ms = min(ms, latency_ms)
    total[f"{EXCHANGES}.{LATENCY}.{kind}"] += latency_ms
    total[f"{EXCHANGES}.{BYTES}.{kind}"] += ms - latency_ms


def _way(phase: str) -> str | None:
    return {"embedding_forward": "forward", "embedding_backward": "backward"}.get(phase)


def _add(total: Parts, shares: Mapping[str, float], ms: float) -> None:
    """Add a lookup: parts of its tables, and the time of its launch, which has no factor."""
    of_tables = sum(shares.values())
    for part, share_ms in shares.items():
        total[part] += share_ms * min(1.0, ms / of_tables)
    total[FIXED] += max(0.0, ms - of_tables)


def _table_parts(
    workload: Workload, topology: Topology, hardware: HardwareProfile, plan: ShardingPlan
) -> dict[tuple[str, str, int], Parts]:
    """Map direction, exchange and rank to the lookup times of each table in ms."""
    loads = ShardLoads(workload, topology, hardware)
    by_lookup: dict[tuple[str, str, int], Parts] = defaultdict(lambda: defaultdict(float))
    for index, sharding in enumerate(match_plan(workload, topology, plan)):
        key, kind = workload.keys[index], sharding.sharding_type
        exchange = f"{workload.tables[index].module}.{kind.short}"
        ranks, of_shards = loads.of_table(index, sharding)
        for rank, load, shard in zip(ranks, of_shards, sharding.shards, strict=True):
            for way, column in zip(("forward", "backward"), KERNELS, strict=True):
                kernel, width = sharding.compute_kernel.value, shard.size[1]
                pooled = workload.tables[index].is_pooled
                part = lookup_part(way, kernel, kind.value, width, key, pooled=pooled)
                by_lookup[way, exchange, int(rank)][part] += float(load[column])
    return by_lookup


def _step_parts(
    prediction: Prediction, empty: Sequence[Op], tables: Mapping[tuple[str, str, int], Parts]
) -> Parts:
    """Return the parts of an iteration, by the chain of work that fills it."""
    latencies = {op.name: op for op in empty}
    ops = {op.name: op for op in prediction.graph.ops}
    total: Parts = defaultdict(float)
    issued: Parts = defaultdict(float)
    for issued_op in prediction.graph.ops:
        issued[host_part_of(issued_op, prediction.graph)] += issued_op.host_ms
    whole = sum(issued.values())
    for segment in prediction.critical_path:
        op, way, ms = ops.get(segment.name), _way(segment.phase), segment.duration_ms
        if segment.phase == HOST_PHASE or op is None:
            for part, part_ms in issued.items() if whole > 0 else ():
                total[part] += ms * part_ms / whole
        elif way is not None:
            exchange = op.name.removesuffix(" backward").removesuffix(" lookup")
            _add(total, tables.get((way, exchange, segment.rank), {}), ms)
        else:
            _split(total, part_of(op), ms, latencies[op.name].cost_on(segment.rank))
    return total
