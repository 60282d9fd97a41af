"""What a job has taught of the costs: factors, and the errors that they still have.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from predictor.cost.errors import (
    KIND_ERROR,
    TYPE_ERROR,
    FactorErrors,
    error_size,
    resource_groups,
)
from predictor.errors import InputError
from predictor.hardware.learned import (
    BAG,
    BYTES,
    EXCHANGES,
    HOST,
    LATENCY,
    LOOKUPS,
    PROFILE_GROUPS,
    SEQUENCE,
    Evidence,
    Factor,
    Remaining,
    factors_in,
)
from predictor.hardware.schema import HardwareProfile
from predictor.model.plan import ComputeKernel
from predictor.model.topology import Topology
from predictor.model.workload import Workload

Array = NDArray[np.float64]

MACHINE_ERROR, NETWORK_ERROR = 0.5, 1.0
"""1-sigma errors that all costs of a group have in common on another machine than the profile's,
and the latencies and bandwidths of another network: a slow link also slows exchanges that no plan
has run yet. Lookups with pooling and without are as far apart as two groups."""
OTHER_HOST_ERROR = 0.15
"""1-sigma error of what the host of one model's steps says of another model's, whose ops are other
ones: 36 walls of 12 models on one H100, each by a recording of another (TorchRec 1.7, 2026-11)."""
STEP = "step"
LEAST_NOISE = 0.03
"""1-sigma relative error of a measured time at least: what the same phase differs by from one run
of a job to the next."""
MOST_FACTOR = 1000
LEAST_MS = 1e-100
"""A predicted time below it is none."""


@dataclass(frozen=True)
class _Posterior:
    """Logarithms of factors by name: mean and covariance.

    Args:
        spent: ms of all measurements that have the factor.
    """

    at: dict[str, int]
    mean: Array
    covariance: Array
    spent: Array


def posterior(
    given: Sequence[Evidence], hardware: HardwareProfile, topology: Topology
) -> tuple[tuple[Factor, ...], dict[str, Remaining]]:
    """Factors with the errors that are left, and those of the profile's groups.

    Args:
        hardware: without what it has learned; its stated errors are the prior.

    Raises:
        InputError: a factor is beyond `MOST_FACTOR`.
    """
    found = _posterior(given, hardware, topology)
    factors = tuple(
        Factor(
            group=name.partition("/")[0],
            table=name.partition("/")[2] or None,
            factor=round(math.exp(found.mean[i]), 5),
            error=round(math.sqrt(max(found.covariance[i, i], 0.0)), 5),
            evidence_ms=round(float(found.spent[i]), 4),
        )
        for name, i in found.at.items()
    )
    return factors, dict(_remaining(found, hardware, topology))


def errors_left(
    workload: Workload, topology: Topology, hardware: HardwareProfile
) -> FactorErrors | None:
    """How wrong the factors of a profile may still be; None where it has learned nothing."""
    learned = hardware.learned
    if learned is None or not learned.evidence:
        return None
    plain = hardware.model_copy(update={"learned": None})
    found = _posterior(learned.evidence, plain, topology)
    same, covariance = learned.model == workload.name, found.covariance
    if HOST in found.at and not same:
        host = found.at[HOST]
        covariance[host, host] += OTHER_HOST_ERROR**2
    values, vectors = np.linalg.eigh(covariance)
    return FactorErrors(
        at={name: i for name, i in found.at.items() if same or "/" not in name},
        root=vectors * np.sqrt(np.maximum(values, 0.0)),
        prior=lambda name: _prior(name, plain, topology),
        measured=frozenset(part for one in learned.evidence for part in one.parts_ms),
        tables=tuple(
            (key, table.is_pooled)
            for key, table in zip(workload.keys, workload.tables, strict=True)
        ),
    )


def _posterior(
    given: Sequence[Evidence], hardware: HardwareProfile, topology: Topology
) -> _Posterior:
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
    return _Posterior(at, mean, covariance, shares.T @ np.array([one.measured_ms for one in given]))


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
        if not total > LEAST_MS:
            raise InputError(
                f"the evidence '{one.what}' has no predicted time beside its {one.measured_ms:g} ms"
                "; learn again from the traces",
                inputs=("hardware",),
            )
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
        return math.hypot(size.shared, MACHINE_ERROR)
    if head == EXCHANGES and rest in ([LATENCY], [BYTES]):
        return NETWORK_ERROR
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
    known: _Posterior, hardware: HardwareProfile, topology: Topology
) -> Iterator[tuple[str, Remaining]]:
    """What is left of the errors of the groups that the evidence is about.

    ``shared`` is that of a kind of cost as a whole, ``own`` that of a table or of one kind beside
    it; means over the kinds that were measured.
    """
    at, covariance = known.at, known.covariance
    for head, groups in PROFILE_GROUPS.items():
        if head not in at:
            continue
        kinds = [n for n in at if n.startswith(f"{head}.") and "/" not in n]
        single = [n for n in at if n.startswith(f"{head}.") and "/" in n] or kinds
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
