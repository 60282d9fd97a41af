"""Learning from a job that ran: measured phases against predicted ones correct a profile.

Every time is a sum of parts ``p_i``, each multiplied by the factors that
`predictor.hardware.learned.factors_in` names. With ``x`` the logarithms of all factors and ``J``
the share of each in a time, to first order

    log(measured / predicted) = J x + noise,    x ~ N(0, P)

where ``P`` is diagonal: the errors that the profile states. The posterior is the closed form
(Rasmussen and Williams 2006, equation 2.8; here in the space of the measurements)

    G = P J' (J P J' + R)^-1,    mean = G log(measured / predicted),    covariance = P - G J P.

Shares of a whole step are those that its phases give, which have one kind of part each and are
linear already; nothing else is iterated. The order of the evidence does not matter: all of it is
kept, so that a second job is joined to the first by one update of both.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from predictor.cost.errors import KIND_ERROR, TYPE_ERROR, error_size, resource_groups
from predictor.cost.loads import KERNELS, ShardLoads
from predictor.errors import InputError
from predictor.hardware.learned import (
    BAG,
    DENSE,
    EXCHANGES,
    FIXED,
    HOST,
    LOOKUPS,
    PROFILE_GROUPS,
    SEQUENCE,
    Evidence,
    Factor,
    Learned,
    Remaining,
    factors_in,
    lookup_part,
)
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.critical_path import HOST as HOST_PHASE
from predictor.iteration.graph import part_of
from predictor.model.plan import ComputeKernel, ShardingPlan
from predictor.model.plan_check import match_plan
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from predictor.predict import Prediction, predict
from predictor.trace.phases import Measured

Array = NDArray[np.float64]
Parts = dict[str, float]

MACHINE_ERROR, NETWORK_ERROR = 0.5, 1.0
"""1-sigma errors that all costs of a group have in common on another machine than the profile's,
and all exchanges on another network: a slow link also slows exchanges that no plan has run yet.
Lookups with pooling and without are as far apart as two groups."""
STEP = "step"
LEAST_NOISE = 0.03
"""1-sigma relative error of a measured time at least: what the same phase differs by from one run
of a job to the next."""
RESOLUTION_MS = 0.02
"""Error of any time beside that: what the clocks around a phase take themselves."""

MOST_FACTOR = 1000


@dataclass(frozen=True)
class Unmatched:
    """A measured time that no predicted one stands against."""

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
) -> tuple[Learned, list[Unmatched]]:
    """What the steps of one plan teach, joined with what the profile has learned before.

    Args:
        name: of the plan.

    Raises:
        InputError: nothing that was measured is predicted of this plan, or all is far off.
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
    found, unmatched = evidence(workload, topology, plain, plan, measured)
    if not found:
        raise InputError(
            "none of the measured phases is one of this plan's; give the model and plan that ran"
        )
    every = (*(() if before is None else before.evidence), *found)
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
    """Measured times beside the predicted parts of the same; those without are unmatched."""
    predicted = predicted_parts(workload, topology, hardware, plan)
    found, unmatched = [], []
    for one in measured:
        parts = predicted.get((one.what, one.rank or 0), {})
        total = sum(parts.values())
        where = one.what if one.rank is None else f"{one.what} of rank {one.rank}"
        if total <= 0 or one.ms <= 0:
            unmatched.append(Unmatched(where, one.ms))
            continue
        noise = math.hypot(max(one.noise, LEAST_NOISE), RESOLUTION_MS / one.ms)
        found.append(Evidence(what=where, measured_ms=one.ms, noise=noise, parts_ms=parts))
    return found, unmatched


def predicted_parts(
    workload: Workload, topology: Topology, hardware: HardwareProfile, plan: ShardingPlan
) -> dict[tuple[str, int], Parts]:
    """What `Measured` can be about, and rank -> the parts of its predicted time in ms."""
    prediction = predict(workload, topology, hardware, plan)
    found: dict[tuple[str, int], Parts] = defaultdict(lambda: defaultdict(float))
    tables = _table_parts(workload, topology, hardware, plan)
    for op in prediction.graph.ops:
        way, part = _way(op.phase), part_of(op)
        for rank in range(topology.world_size):
            ms = float(op.cost_ms[..., min(rank, op.cost_ms.shape[-1] - 1)].flat[0])
            if way is not None:
                exchange = op.name.removesuffix(" backward").removesuffix(" lookup")
                of = tables.get((way, exchange, rank), {})
                _add(found[f"{LOOKUPS}.{way} {exchange}", rank], of, ms)
            else:
                found[part, rank][part] += ms
                if hardware.inline and part.startswith(DENSE):  # ops and their launches are one
                    found[part, rank][HOST] += op.host_ms
    for rank in range(topology.world_size):
        found[STEP, rank] = _step_parts(prediction, tables)
    return {key: {k: v for k, v in parts.items() if v > 0} for key, parts in found.items()}


def _way(phase: str) -> str | None:
    return {"embedding_forward": "forward", "embedding_backward": "backward"}.get(phase)


def _add(total: Parts, shares: Mapping[str, float], ms: float) -> None:
    """Add a lookup, whose parts are its tables and what no factor touches: a launch as a whole."""
    known = sum(shares.values())
    for part, of in shares.items():
        total[part] += of * min(1.0, ms / known)
    total[FIXED] += max(0.0, ms - known)


def _table_parts(
    workload: Workload, topology: Topology, hardware: HardwareProfile, plan: ShardingPlan
) -> dict[tuple[str, str, int], Parts]:
    """Direction, exchange and rank -> what the lookups of each table take."""
    loads = ShardLoads(workload, topology, hardware)
    found: dict[tuple[str, str, int], Parts] = defaultdict(lambda: defaultdict(float))
    for index, sharding in enumerate(match_plan(workload, topology, plan)):
        key, kind = workload.keys[index], sharding.sharding_type
        exchange = f"{workload.tables[index].module}.{kind.short}"
        ranks, of_shards = loads.of_table(index, sharding)
        for rank, load, shard in zip(ranks, of_shards, sharding.shards, strict=True):
            for way, column in zip(("forward", "backward"), KERNELS, strict=True):
                kernel, width = sharding.compute_kernel.value, shard.size[1]
                pooled = workload.tables[index].is_pooled
                part = lookup_part(way, kernel, kind.value, width, key, pooled=pooled)
                found[way, exchange, int(rank)][part] += float(load[column])
    return found


def _step_parts(prediction: Prediction, tables: Mapping[tuple[str, str, int], Parts]) -> Parts:
    """The iteration by the chain of work that fills it."""
    ops = {op.name: op for op in prediction.graph.ops}
    found: Parts = defaultdict(float)
    for segment in prediction.critical_path:
        op, way, ms = ops.get(segment.name), _way(segment.phase), segment.duration_ms
        if segment.phase == HOST_PHASE or op is None:
            found[HOST] += ms
        elif way is not None:
            exchange = op.name.removesuffix(" backward").removesuffix(" lookup")
            _add(found, tables.get((way, exchange, segment.rank), {}), ms)
        else:
            found[part_of(op)] += ms
    return found


def posterior(
    given: Sequence[Evidence], hardware: HardwareProfile, topology: Topology
) -> tuple[tuple[Factor, ...], dict[str, Remaining]]:
    """Factors with the errors that are left, and those of the profile's groups.

    Args:
        hardware: without what it has learned; its stated errors are the prior.

    Raises:
        InputError: a factor is beyond `MOST_FACTOR`.
    """
    parts = dict.fromkeys(part for one in given for part in one.parts_ms)
    names = list(dict.fromkeys(name for part in parts for name in factors_in(part)))
    prior = np.array([_prior(name, hardware, topology) for name in names])
    at = {name: i for i, name in enumerate(names)}
    phases = [one for one in given if one.what != STEP]
    around = np.zeros(len(names))
    for rows in filter(None, (phases, given)):
        shares, ratios = _linear(rows, at, around)
        noise = np.array([one.noise for one in rows])
        mean, covariance = update(prior, shares, ratios, noise)
        _refuse_beyond(dict(zip(names, mean.tolist(), strict=True)))
        around = mean
    spent = shares.T @ np.array([one.measured_ms for one in given])
    factors = tuple(
        Factor(
            group=name.partition("/")[0],
            table=name.partition("/")[2] or None,
            factor=round(math.exp(mean[i]), 5),
            error=round(math.sqrt(max(covariance[i, i], 0.0)), 5),
            evidence_ms=round(float(spent[i]), 4),
        )
        for name, i in at.items()
    )
    return factors, dict(_remaining(given, names, covariance, hardware, topology))


def _refuse_beyond(logarithms: Mapping[str, float]) -> None:
    """Refuse factors that no model of this plan can be wrong by."""
    name, log = max(logarithms.items(), key=lambda item: abs(item[1]))
    if abs(log) > math.log(MOST_FACTOR):
        times = f"over {MOST_FACTOR} times" if log > 0 else f"less than 1/{MOST_FACTOR} of"
        raise InputError(
            f"by the measured times, {name} takes {times} what is predicted; that is not learned. "
            "Give the model, the plan and the profile of the job that was measured"
        )


def _linear(given: Sequence[Evidence], at: Mapping[str, int], around: Array) -> tuple[Array, Array]:
    """Shares ``[measurements, factors]`` and log ratios ``[measurements]`` to first order around
    logarithms of factors ``[factors]``."""
    shares, ratios = np.zeros((len(given), len(at))), np.zeros(len(given))
    for i, one in enumerate(given):
        times = {
            part: ms * math.exp(sum(around[at[name]] for name in factors_in(part)))
            for part, ms in one.parts_ms.items()
        }
        total = sum(times.values())
        for part, ms in times.items():
            for name in factors_in(part):
                shares[i, at[name]] += ms / total
        ratios[i] = math.log(one.measured_ms / total) + shares[i] @ around
    return shares, ratios


def update(prior: Array, shares: Array, ratios: Array, noise: Array) -> tuple[Array, Array]:
    """Mean ``[factors]`` and covariance of logarithms of factors, given measurements.

    Args:
        prior: standard deviations ``[factors]`` around zero, independent.
        shares: ``[measurements, factors]``, of each factor in a time.
        ratios: logarithms of measured over predicted time, ``[measurements]``.
        noise: their standard deviations.
    """
    scaled = shares * prior**2
    spread = scaled @ shares.T + np.diag(noise**2)
    gain = np.linalg.solve(spread, scaled).T
    return gain @ ratios, np.diag(prior**2) - gain @ scaled


def _prior(name: str, hardware: HardwareProfile, topology: Topology) -> float:
    """Standard deviation of a factor's logarithm, by what the profile states."""
    group, _, table = name.partition("/")
    head, *rest = group.split(".")
    size = error_size(hardware, _groups(head, hardware, topology))
    if not rest:
        return math.hypot(size.shared, NETWORK_ERROR if head == EXCHANGES else MACHINE_ERROR)
    if head == LOOKUPS and rest[-1] in (BAG, SEQUENCE):
        return MACHINE_ERROR
    if head == LOOKUPS and not table and rest[-1] not in tuple(ComputeKernel):
        return TYPE_ERROR
    return max(KIND_ERROR, size.own)


def _groups(head: str, hardware: HardwareProfile, topology: Topology) -> Iterable[str]:
    if head == EXCHANGES:
        return resource_groups("collectives", topology)
    return (name for name in PROFILE_GROUPS[head] if name in hardware.groups)


def _remaining(
    given: Sequence[Evidence],
    names: Sequence[str],
    covariance: Array,
    hardware: HardwareProfile,
    topology: Topology,
) -> Iterator[tuple[str, Remaining]]:
    """What is left of the errors of the groups that the evidence is about.

    ``shared`` is that of a kind of cost as a whole, ``own`` that of a table or of one kind beside
    it; means over the kinds that were measured.
    """
    at = {name: i for i, name in enumerate(names)}
    for head, groups in PROFILE_GROUPS.items():
        if head not in at:
            continue
        kinds = [n for n in names if n.startswith(f"{head}.") and "/" not in n]
        single = [n for n in names if n.startswith(f"{head}.") and "/" in n] or kinds
        together = [[at[head], at[kind]] for kind in kinds] or [[at[head]]]
        shared = math.sqrt(np.mean([covariance[np.ix_(i, i)].sum() for i in together]))
        own = [max(covariance[at[n], at[n]], 0.0) for n in single]
        for name in groups:
            stated = error_size(hardware, [name])
            left = math.sqrt(np.mean(own)) if own else stated.own
            yield (
                name,
                Remaining(
                    shared=round(min(shared, stated.shared), 5), own=round(min(left, stated.own), 5)
                ),
            )
