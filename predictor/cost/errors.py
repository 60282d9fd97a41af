"""Draws of the errors that a prediction's costs may have: what a profile states, as numbers.

A profile states the error of a group's times (``rel_error``, and the error on held-out rows). A
draw multiplies every cost by log-normal factors of median one. All costs of a group share one
factor, and each kernel has one more. The kernels of a lookup group have two of equal variance: one
per table and direction (forward or backward), and one more per sharding type, since each type runs
other kernels on other shapes. Where a job has taught factors on the costs, draws are those of the
factors, with their correlations.

Draws come in pairs of opposite signs (antithetic variates, Hammersley and Morton 1956), so that
means over few draws are steady. A factor depends on the seed and on its name alone, not on the
order of calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from predictor.hardware import learned as parts
from predictor.hardware.learned import (
    BYTES,
    DENSE,
    EXCHANGES,
    LATENCY,
    LOOKUPS,
    factors_in,
    lookup_part,
)
from predictor.hardware.schema import SIGMA_OVER_MEAN, HardwareProfile
from predictor.model.plan import ComputeKernel, ShardingType, TablePlan
from predictor.model.topology import Topology

Array = NDArray[np.float64]

KERNEL_ERROR = 0.07
"""1-sigma error of one lookup, or of another kernel of a group without held-out rows; measured on
single lookups, forward and backward (docs/accuracy.md)."""
LEARNED_ERROR = 0.03
"""1-sigma error of a lookup that a job has measured, beside the errors of its factors."""
KIND_ERROR = 0.25
"""1-sigma error of one kind of cost on another machine, beside the stated error of its group: on
CPU ranks the phases of nine structural plans were off by factors of 0.4 to 1.55."""
TYPE_ERROR = 0.1
"""1-sigma error of lookups under one sharding type; smaller, since all types share kernels."""
Z_90 = 1.6449
"""Half-width of a 90 % normal interval in standard deviations."""
OVERHEADS = "overheads"
"""The resource whose costs are those of the host."""
_NORMAL = NormalDist()


def resource_groups(resource: str, topology: Topology) -> list[str]:
    """Return the names of the profile groups behind a resource.

    Collectives use every kind of link the ranks span. Dense gradients cross those of the whole job.
    """
    if resource != "collectives":
        return [resource]
    names, topology = [], topology.whole
    if topology.nvlink_domain > 1:
        names.append("collectives.intra")
    if topology.groups > 1:
        names.append("collectives.inter")
    return names or ["collectives.intra"]


@dataclass(frozen=True)
class ErrorSize:
    """1-sigma relative errors of the costs of one resource.

    Args:
        shared: that all of its costs have in common.
        own: that each kernel has by itself.
    """

    shared: float
    own: float


HEADS = {
    "embedding": LOOKUPS,
    "collectives": EXCHANGES,
    "gemm": DENSE,
    "elementwise": DENSE,
    OVERHEADS: parts.HOST,
}
"""Resource -> the factor that all of its costs have, of `predictor.hardware.learned`."""


@dataclass(frozen=True)
class FactorErrors:
    """Remaining errors of learned factors; their logarithms are normal around the learned ones.

    Args:
        at: name of a factor -> its row in ``root``.
        root: a square root of their covariance, ``[factors, factors]``.
        prior: standard deviation of a factor that no job has measured.
        measured: parts of times that jobs have measured.
        tables: key of each table, and whether its lookups are pooled.
    """

    at: Mapping[str, int]
    root: Array
    prior: Callable[[str], float]
    measured: frozenset[str]
    tables: Sequence[tuple[str, bool]]

    def about(self, resource: str) -> bool:
        """Tell whether a job has measured any cost of a resource."""
        return HEADS.get(resource) in self.at

    def log(self, name: str, normal: Callable[[str], Array]) -> Array:
        """Draw the logarithm of a factor's remaining error, ``[draws]``.

        Args:
            normal: standard normal draws of one error.
        """
        if name not in self.at:
            return self.prior(name) * normal(name)
        row = self.root[self.at[name]]
        return np.asarray(row @ np.array([normal(f"learned {i}") for i in range(len(row))]))

    def own(self, part: str) -> float:
        """Return the 1-sigma error of a cost beside its factors."""
        return LEARNED_ERROR if part in self.measured else KERNEL_ERROR


def known_errors(hardware: HardwareProfile, topology: Topology) -> dict[str, ErrorSize]:
    """Map each resource to the errors of its costs that the profile states."""
    resources = {name.split(".")[0] for name in hardware.groups}
    return {
        name: error_size(hardware, resource_groups(name, topology)) for name in sorted(resources)
    }


def no_errors() -> CostErrors:
    return GivenErrors({})


def error_size(hardware: HardwareProfile, names: Iterable[str]) -> ErrorSize:
    """Return the error of a cost that comes from these groups of the profile."""
    groups = [hardware.groups[name] for name in names]
    held_out = [g.provenance.error.mean for g in groups if g.provenance.error is not None]
    own = SIGMA_OVER_MEAN * max(held_out) if held_out else KERNEL_ERROR
    return ErrorSize(max(g.rel_error for g in groups), own)


class CostErrors:
    """Random factors on costs.

    Args:
        sizes: resource -> its errors.
        draws: number of draws, even and at least 2; or 1.
        seed: of all draws, >= 0.
        factors: remaining errors of learned factors; they replace the ``sizes`` of their resources.
    """

    def __init__(
        self,
        sizes: Mapping[str, ErrorSize],
        draws: int,
        seed: int,
        factors: FactorErrors | None = None,
    ) -> None:
        self.sizes = sizes
        self.draws = draws
        self.seed = seed
        self.factors = factors
        normal = lru_cache(maxsize=None)(self._normal)
        if factors is not None:
            self._factor = lru_cache(maxsize=None)(lambda name: factors.log(name, normal))
        self.shared = lru_cache(maxsize=None)(self._shared)
        self.op = lru_cache(maxsize=None)(self._op)
        self._lookups = lru_cache(maxsize=None)(self._lookup)

    def _shared(self, resource: str) -> Array:
        """Draw the factor that all costs of a resource share, ``[draws]``."""
        if self._learned(resource) is not None:
            return np.asarray(np.exp(self._left([HEADS[resource]])))
        return np.asarray(np.exp(self.sizes[resource].shared * self._normal(resource)))

    def _op(self, resource: str, name: str, link: str = "", kind: str = "") -> Array:
        """Draw the factor of an operation, ``[draws]``; for lookups, without that of `lookup`.

        Args:
            link: of a collective, the group of the slowest link that it spans.
            kind: part of a time that the operation is, as `predictor.hardware.learned` names it.
        """
        if resource in ("embedding", OVERHEADS):
            return self.shared(resource)
        own, factors = self._normal(f"{resource}/{name}"), self._learned(resource)
        if factors is None:
            return np.asarray(self.shared(resource) * np.exp(self.sizes[resource].own * own))
        log = self._left(factors_in(kind) or (HEADS[resource],)) + factors.own(kind) * own
        if resource == "collectives":  # its split into latency and bytes is not known here
            log = log + self._left(f"{EXCHANGES}.{name}" for name in (LATENCY, BYTES)) / 2
        return np.asarray(np.exp(log))

    def _learned(self, resource: str) -> FactorErrors | None:
        """Return the errors of learned factors, or None where they are not about a resource."""
        return self.factors if self.factors is not None and self.factors.about(resource) else None

    def _left(self, names: Iterable[str]) -> Array:
        """Draw the logarithm of the remaining errors of several factors, ``[draws]``."""
        return np.asarray(np.sum([self._factor(name) for name in names], axis=0))

    def lookup(self, table: int, plan: TablePlan) -> Array:
        """Draw the factors of a table's forward and backward, ``[2, draws]``.

        The factor that all lookups share is not included.
        """
        width = max((shard.size[1] for shard in plan.shards), default=0)
        return self._lookups(table, plan.sharding_type, plan.compute_kernel, width)

    def _lookup(
        self, table: int, sharding_type: ShardingType, kernel: ComputeKernel, width: int
    ) -> Array:
        factors, rows = self._learned("embedding"), []
        for way in ("forward", "backward"):
            if factors is None:
                name = f"table {table} {way}"
                of_table, of_type = self._normal(name), self._normal(f"{name} {sharding_type}")
                log = self.sizes["embedding"].own * math.sqrt(0.5) * (of_table + of_type)
            else:
                key, pooled = factors.tables[table]
                kinds = kernel.value, sharding_type.value, width, key
                part = lookup_part(way, *kinds, pooled=pooled)
                names = (name for name in factors_in(part) if name != LOOKUPS)
                log = self._left(names) + factors.own(part) * self._normal(part)
            rows.append(np.exp(log))
        return np.asarray(rows)

    def _normal(self, name: str) -> Array:
        """Draw one error from the standard normal distribution, ``[draws]``."""
        rng = np.random.default_rng([self.seed, crc32(name.encode())])
        half = self._half(rng, max(1, self.draws // 2))
        return np.concatenate((half, -half))[: self.draws]

    def _half(self, rng: np.random.Generator, count: int) -> Array:
        return rng.standard_normal(count)


class StratifiedErrors(CostErrors):
    """Few draws that cover every error evenly: a Latin hypercube of pairs of opposite signs (McKay,
    Beckman and Conover 1979).

    Every factor takes each quantile ``(i + 1/2) / draws`` of its distribution once, in an order of
    its own.
    """

    def _half(self, rng: np.random.Generator, count: int) -> Array:
        upper = [_NORMAL.inv_cdf(0.5 + (i + 0.5) / (2 * count)) for i in range(count)]
        return np.asarray(rng.permutation(upper) * rng.choice([-1.0, 1.0], count))


class GivenErrors(CostErrors):
    """One draw with given factors.

    Args:
        factors: profile group -> factor on its times, > 0; 1 where it is missing. ``collectives``
            stands for both of its groups.
    """

    def __init__(self, factors: Mapping[str, float]) -> None:
        super().__init__({}, draws=1, seed=0)
        self.given = dict(factors)

    def _shared(self, resource: str) -> Array:
        return np.array([self.given.get(resource, 1.0)])

    def _op(self, resource: str, name: str, link: str = "", kind: str = "") -> Array:
        return self.shared(link if link in self.given else resource)

    def lookup(self, table: int, plan: TablePlan) -> Array:
        return np.ones((2, 1))


class JoinedErrors(CostErrors):
    """Concatenated draws of several.

    Args:
        picked: range of the concatenated draws to keep.
    """

    def __init__(self, parts: Iterable[CostErrors], picked: slice = slice(None)) -> None:
        self.parts, self.picked = [*parts], picked
        count = len(range(sum(part.draws for part in self.parts))[picked])
        super().__init__(self.parts[0].sizes if self.parts else {}, count, seed=0)

    def _shared(self, resource: str) -> Array:
        return np.concatenate([part.shared(resource) for part in self.parts])[self.picked]

    def _op(self, resource: str, name: str, link: str = "", kind: str = "") -> Array:
        draws = [part.op(resource, name, link, kind) for part in self.parts]
        return np.concatenate(draws)[self.picked]

    def lookup(self, table: int, plan: TablePlan) -> Array:
        draws = [part.lookup(table, plan) for part in self.parts]
        return np.concatenate(draws, axis=1)[:, self.picked]


class PickedError(JoinedErrors):
    """Single draw of others, given by its number from 0."""

    def __init__(self, errors: CostErrors, draw: int) -> None:
        super().__init__([errors], slice(draw, draw + 1))
