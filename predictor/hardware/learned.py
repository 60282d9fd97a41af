"""Factors on a profile's costs learned from jobs that ran, and the evidence behind them.

A cost is multiplied by several factors: one of its group, one of its kind, and of lookups one each
for kernel, pooling, sharding type, width and table. `factors_in` says which; their logarithms are
what `predictor.learn` estimates. The constants of the profile stay as they are.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

LOOKUPS, EXCHANGES, DENSE, HOST = "lookups", "exchanges", "dense", "host"
LATENCY, BYTES = "latency", "bytes"
"""Parts of an exchange: the time of an empty message, and all beyond it."""
COPIES = f"{DENSE}.copies"
"""Copies of ids and outputs, before and after their exchanges."""
FIXED = "fixed"
"""The part of a time that no factor touches."""
PROFILE_GROUPS = {
    LOOKUPS: ("embedding",),
    EXCHANGES: ("collectives.intra", "collectives.inter"),
    DENSE: ("gemm", "elementwise"),
    HOST: ("overheads",),
}
"""Group of factors -> groups of the profile that its costs come from."""

Ms = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Sigma = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]

BAG, SEQUENCE = "bag", "sequence"
"""Lookups with pooling and without; each has kernels of its own."""


def lookup_part(
    way: str, kernel: str, sharding_type: str, width: int, table: str, *, pooled: bool = True
) -> str:
    """Return the name of a table's lookup time; ``way`` is ``forward`` or ``backward``.

    Args:
        width: columns of a shard.
    """
    pooling = BAG if pooled else SEQUENCE
    return f"{LOOKUPS}.{way}.{kernel}.{pooling}.{sharding_type}.{width}/{table}"


def factors_in(part: str) -> tuple[str, ...]:
    """Return the names of the factors that multiply a part of a time.

    ``exchanges.ids`` has ``exchanges`` and ``exchanges.ids``, and ``exchanges.bytes.ids``, what it
    takes beyond an empty message, ``exchanges.bytes`` as well; the lookups of a table have
    ``lookups``, ``lookups.WAY.KERNEL``, ``lookups.WAY.POOLING``, ``lookups.WAY.TYPE``,
    ``lookups.WAY.WIDTH`` and ``lookups.WAY/TABLE``.
    """
    if part == FIXED:
        return ()
    kind, _, table = part.partition("/")
    group, *rest = kind.split(".")
    if group == EXCHANGES and rest and rest[0] in (LATENCY, BYTES):
        return (group, f"{group}.{rest[0]}", ".".join((group, *rest[1:])))
    if group != LOOKUPS:
        return (group,) if not rest else (group, kind)
    way, *kinds = rest
    return (group, *(f"{group}.{way}.{kind}" for kind in kinds), f"{group}.{way}/{table}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Factor(_Strict):
    """Factor on the costs of a group, or of one table in it.

    Args:
        error: remaining 1-sigma relative error.
        evidence_ms: measured time behind it.
    """

    group: str
    table: str | None = None
    factor: Above
    error: Ms
    evidence_ms: Ms

    @property
    def name(self) -> str:
        return self.group if self.table is None else f"{self.group}/{self.table}"


class Evidence(_Strict):
    """Measured time, with its prediction by the profile's own constants.

    Args:
        what: measured part and rank.
        noise: 1-sigma relative error of the measurement.
        parts_ms: part -> its predicted time; they add up.
    """

    what: str
    measured_ms: Above
    noise: Above
    parts_ms: dict[str, Ms]

    @field_validator("parts_ms")
    @classmethod
    def _check_parts(cls, parts: dict[str, float]) -> dict[str, float]:
        for part in parts:
            group, *rest = part.partition("/")[0].split(".")
            is_part = group in PROFILE_GROUPS and (
                group != LOOKUPS or (len(rest) == 5 and "/" in part)
            )
            if part != FIXED and not is_part:
                raise ValueError(
                    f"{part!r} is not a part of a time; give '{FIXED}', "
                    f"'{LOOKUPS}.WAY.KERNEL.POOLING.TYPE.WIDTH/TABLE' or one of "
                    f"{', '.join(PROFILE_GROUPS)}"
                )
        return parts


class Remaining(_Strict):
    """Errors of a profile group after learning, as in `predictor.cost.errors.ErrorSize`."""

    shared: Sigma
    own: Sigma


class Learned(_Strict):
    """Factors learned from a job.

    Args:
        model: name of the model; factors of tables hold for it alone.
        plans: plans that ran.
        machine, date: place and time of the run.
        steps: number of steps behind the medians.
        errors: profile group -> remaining errors.
        evidence: all evidence, so that more can be added and correlations are kept.
    """

    model: str
    plans: tuple[str, ...]
    machine: str
    steps: int = Field(ge=1)
    date: str
    factors: tuple[Factor, ...]
    errors: dict[str, Remaining]
    evidence: tuple[Evidence, ...]

    @field_validator("errors")
    @classmethod
    def _check_errors(cls, errors: dict[str, Remaining]) -> dict[str, Remaining]:
        groups = [name for names in PROFILE_GROUPS.values() for name in names]
        for name in errors:
            if name not in groups:
                raise ValueError(f"{name!r} is not a group of a profile; give {', '.join(groups)}")
        return errors

    @cached_property
    def _by_name(self) -> dict[str, float]:
        return {factor.name: factor.factor for factor in self.factors}

    def factor(self, part: str) -> float:
        """Return the factor on a part of a time."""
        return prod(self._by_name.get(name, 1.0) for name in factors_in(part))

    def of_messages(self) -> tuple[float, float]:
        """Return the factors on an exchange's latency and on its further time, beside `factor`."""
        latency, beyond = (self._by_name.get(f"{EXCHANGES}.{n}", 1.0) for n in (LATENCY, BYTES))
        return latency, beyond

    def for_model(self, model: str) -> Learned:
        """Return the factors for a model; those of tables are dropped for another model."""
        if model == self.model:
            return self
        general = tuple(factor for factor in self.factors if factor.table is None)
        # not `model_copy`, which also copies what is cached
        return Learned(**(dict(self) | {"factors": general}))
