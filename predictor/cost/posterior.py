"""Factors on costs learned from jobs, and their remaining errors.

Every time is a sum of parts ``p_i``, each multiplied by the factors that
`predictor.hardware.learned.factors_in` names. With ``x`` the logarithms of all factors and ``J``
the share of each in a time, to first order

    log(measured / predicted) = J x + noise,    x ~ N(0, P)

where ``P`` is diagonal: the errors that the profile states. The posterior is the closed form
(Rasmussen and Williams 2006, equation 2.8; here in the space of the measurements)

    G = P J' (J P J' + R)^-1,    mean = G log(measured / predicted),    covariance = P - G J P.

A phase has one kind of part, so its shares are constant. The shares of a whole step are taken at
the factors that the phases give; nothing else is iterated. The order of the evidence does not
matter: all of it is kept, and a second job is joined to the first by one update of both.
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
"""1-sigma errors on another machine than the profile's: of all costs of a group together, and of
the network's latencies and bandwidths. A slow link also slows exchanges that no plan has run yet.
Lookups with pooling and without differ as much as two groups."""
OTHER_HOST_ERROR = 0.15
"""1-sigma error of one model's host factor applied to another model, which runs other ops: 36 wall
times of 12 models on one H100, each by a recording of another (TorchRec 1.7, 2026-11)."""
STEP = "step"
LEAST_NOISE = 0.03
"""Least 1-sigma relative error of a measured time: the spread of a phase between runs of a job."""
MOST_FACTOR = 1000
LEAST_MS = 1e-100
"""Predicted times below it count as zero."""


@dataclass(frozen=True)
class _Posterior:
    """Mean and covariance of the logarithms of factors.

    Args:
        spent: measured ms that the evidence has for each factor.
    """

    at: dict[str, int]
    mean: Array
    covariance: Array
    spent: Array


def posterior(
    evidence: Sequence[Evidence], hardware: HardwareProfile, topology: Topology
) -> tuple[tuple[Factor, ...], dict[str, Remaining]]:
    """Return the factors with their remaining errors, and the remaining errors of profile groups.

    Args:
        hardware: without what it has learned; its stated errors are the prior.

    Raises:
        InputError: a factor is beyond `MOST_FACTOR`.
    """
    fitted = _posterior(evidence, hardware, topology)
    factors = tuple(
        Factor(
            group=name.partition("/")[0],
            table=name.partition("/")[2] or None,
            factor=round(math.exp(fitted.mean[i]), 5),
            error=round(math.sqrt(max(fitted.covariance[i, i], 0.0)), 5),
            evidence_ms=round(float(fitted.spent[i]), 4),
        )
        for name, i in fitted.at.items()
    )
    return factors, dict(_remaining(fitted, hardware, topology))


def errors_left(
    workload: Workload, topology: Topology, hardware: HardwareProfile
) -> FactorErrors | None:
    """Return the remaining errors of a profile's factors; None where it has learned nothing."""
    learned = hardware.learned
    if learned is None or not learned.evidence:
        return None
    plain = hardware.model_copy(update={"learned": None})
    fitted = _posterior(learned.evidence, plain, topology)
    same, covariance = learned.model == workload.name, fitted.covariance
    if HOST in fitted.at and not same:
        host = fitted.at[HOST]
        covariance[host, host] += OTHER_HOST_ERROR**2
    values, vectors = np.linalg.eigh(covariance)
    return FactorErrors(
        at={name: i for name, i in fitted.at.items() if same or "/" not in name},
        root=vectors * np.sqrt(np.maximum(values, 0.0)),
        prior=lambda name: _prior(name, plain, topology),
        measured=frozenset(part for row in learned.evidence for part in row.parts_ms),
        tables=tuple(
            (key, table.is_pooled)
            for key, table in zip(workload.keys, workload.tables, strict=True)
        ),
    )


def _posterior(
    evidence: Sequence[Evidence], hardware: HardwareProfile, topology: Topology
) -> _Posterior:
    parts = dict.fromkeys(part for row in evidence for part in row.parts_ms)
    names = list(dict.fromkeys(name for part in parts for name in factors_in(part)))
    prior = np.array([_prior(name, hardware, topology) for name in names])
    at = {name: i for i, name in enumerate(names)}
    phases = [row for row in evidence if row.what != STEP]
    around = np.zeros(len(names))
    for rows in filter(None, (phases, evidence)):
        shares, ratios = _linear(rows, at, around)
        noise = np.array([row.noise for row in rows])
        mean, covariance = update(prior, shares, ratios, noise)
        _refuse_beyond(dict(zip(names, mean.tolist(), strict=True)))
        around = mean
    return _Posterior(
        at, mean, covariance, shares.T @ np.array([row.measured_ms for row in evidence])
    )


def _refuse_beyond(logarithms: Mapping[str, float]) -> None:
    """Refuse factors that no model of this plan can be wrong by."""
    name, log = max(logarithms.items(), key=lambda item: abs(item[1]))
    if abs(log) > math.log(MOST_FACTOR):
        times = f"over {MOST_FACTOR} times" if log > 0 else f"less than 1/{MOST_FACTOR} of"
        raise InputError(
            f"by the measured times, {name} takes {times} what is predicted; that is not learned. "
            "Give the model, the plan and the profile of the job that was measured"
        )


def _linear(
    evidence: Sequence[Evidence], at: Mapping[str, int], around: Array
) -> tuple[Array, Array]:
    """Linearise the evidence around logarithms of factors ``[factors]``.

    Returns:
        Shares ``[measurements, factors]`` and log ratios ``[measurements]``.
    """
    shares, ratios = np.zeros((len(evidence), len(at))), np.zeros(len(evidence))
    for i, row in enumerate(evidence):
        times = {
            part: ms * math.exp(sum(around[at[name]] for name in factors_in(part)))
            for part, ms in row.parts_ms.items()
        }
        total = sum(times.values())
        if not total > LEAST_MS:
            raise InputError(
                f"the evidence '{row.what}' has no predicted time beside its {row.measured_ms:g} ms"
                "; learn again from the traces",
                inputs=("hardware",),
            )
        for part, ms in times.items():
            for name in factors_in(part):
                shares[i, at[name]] += ms / total
        ratios[i] = math.log(row.measured_ms / total) + shares[i] @ around
    return shares, ratios


def update(prior: Array, shares: Array, ratios: Array, noise: Array) -> tuple[Array, Array]:
    """Return mean ``[factors]`` and covariance of logarithms of factors, given measurements.

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
    """Return the standard deviation of a factor's logarithm that the profile implies."""
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
    fitted: _Posterior, hardware: HardwareProfile, topology: Topology
) -> Iterator[tuple[str, Remaining]]:
    """Yield the remaining errors of the groups that have evidence.

    ``shared`` is the error of a kind of cost as a whole. ``own`` is that of a table, or of one kind
    beside it. Both are means over the measured kinds.
    """
    at, covariance = fitted.at, fitted.covariance
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
            own_error = math.sqrt(np.mean(own)) if own else stated.own
            yield (
                name,
                Remaining(
                    shared=round(min(shared, stated.shared), 5),
                    own=round(min(own_error, stated.own), 5),
                ),
            )
