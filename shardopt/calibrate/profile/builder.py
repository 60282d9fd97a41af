"""Fitting rows onto a base profile: what CPU ranks and GPUs have in common.

Reads rows and nothing else. A group without enough rows keeps the base profile's constants and its
provenance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from predictor import units
from predictor.cost.collectives import latency_ms
from predictor.fit import cpu as fit_cpu
from predictor.fit.collectives import fit_curve
from predictor.fit.held_out import HeldOut
from predictor.hardware.schema import Curve, HardwareProfile, Provenance
from shardopt.calibrate.accepted import accept
from shardopt.calibrate.design.phases import REFERENCE_KERNELS, TOGETHER
from shardopt.calibrate.design.points import COLLECTIVE_OPS
from shardopt.calibrate.profile.source import source_on
from shardopt.calibrate.profile.tables import curve_errors, curve_rows, span, subtract
from shardopt.calibrate.profile.verdict import judge
from shardopt.calibrate.rows import Measurement, Origin

MIN_REL_ERROR = 0.01
MAX_REL_ERROR = 2.0
FEWEST = 6
"""Fit rows of a family below which nothing is fitted."""
FEWEST_SIZES = 3
"""Fit rows of a collective below which no curve of its link is fitted."""
LARGE_BYTES = 4 * units.MIB
"""Messages whose error is reported apart."""


@dataclass
class CalibratedProfile:
    """A profile, and the held-out error of every family that was fitted.

    Args:
        shipped: errors of the base profile on the same rows, of families that hold rows out.
        groups: of the profile that were fitted, as `HardwareProfile.groups` names them.
    """

    profile: HardwareProfile
    errors: dict[str, HeldOut] = field(default_factory=dict)
    shipped: dict[str, HeldOut] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Wiring:
    """What joins the ranks whose collectives are fitted.

    Args:
        ranks: all of them.
        hosts: that they lie on, evenly.
        link_gbit_s: of the emulated link between hosts of one rank; None: there is none.
    """

    ranks: int
    hosts: int = 1
    link_gbit_s: float | None = None

    @property
    def local(self) -> int:
        """Ranks of one host."""
        return 1 if self.link_gbit_s is not None else self.ranks // self.hosts


class Builder(ABC):
    """Fits family after family onto a base profile."""

    def __init__(
        self, rows: Sequence[Measurement], origin: Origin, base: HardwareProfile, wiring: Wiring
    ) -> None:
        self.origin, self.wiring = origin, wiring
        self.accepted = accept(row for row in rows if _of_wiring(row, wiring))
        self.rows = self.accepted.rows
        self.base, self.made = base, CalibratedProfile(base)

    @abstractmethod
    def build(self) -> None:
        """Fit all families in an order that gives each fit what it needs."""

    @abstractmethod
    def issued_us(self, rows: Sequence[Measurement]) -> float:
        """How much of the rows of collectives is the host's, which ops of the graph count."""

    @abstractmethod
    def collective_us(self, rows: Sequence[Measurement]) -> float:
        """The host's time to issue a collective, where no other constant has it."""

    def of(self, family: str, part: str = "", test: bool | None = None) -> list[Measurement]:
        """Rows of one family, fit or test or both."""
        return [
            row
            for row in self.rows
            if row.point.family == family
            and row.part == part
            and (test is None or row.point.test == test)
        ]

    def update(self, **groups: Any) -> None:
        """Replace groups of the profile."""
        self.made.profile = self.made.profile.model_copy(update=groups)

    def group(
        self,
        group: Any,
        fitted: Sequence[Measurement],
        held_out: HeldOut,
        also: str = "",
        ranges: Mapping[str, tuple[float, float]] | None = None,
    ) -> Any:
        """``group`` with measured provenance and the held-out error.

        Args:
            also: said after the error, such as constants that stay as they were.
        """
        rms = held_out.rms if held_out.n else group.rel_error
        provenance = Provenance(
            kind="measured",
            source=f"{source_on(self.origin.machine)}held-out rows: {_error_text(held_out)}{also}",
            versions=self.origin.versions,
            date=max(row.date for row in fitted)[:10],
            n=len(fitted),
            range=dict(ranges or {}),
            error=held_out.known,
        )
        error = round(float(np.clip(rms, MIN_REL_ERROR, MAX_REL_ERROR)), 4)
        return group.model_copy(update={"provenance": provenance, "rel_error": error})

    def collectives(self) -> None:
        """A curve for each, on every link; issuing one is the host's."""
        rows = self.of("collective")
        over = [r for r in rows if _is_between(r)]
        within = [r for r in rows if not _is_between(r)]
        fitted = [self._wire("intra", within), self._wire("inter", over)]
        if any(fitted):
            collective_us = self.collective_us(rows)
            overheads = self.made.profile.overheads
            self.update(overheads=overheads.model_copy(update={"collective_us": collective_us}))

    def issue_us(self, rows: Sequence[Measurement]) -> float:
        """Median time to issue a collective; 0 where there are no such rows."""
        issue = [r.median_us for r in rows if r.point.params["op"] == "issue"]
        return float(np.median(issue)) if issue else 0.0

    def _wire(self, name: str, rows: list[Measurement]) -> bool:
        """Fit the curves of one link; whether there were enough rows."""
        by_op = {op: [r for r in rows if r.point.params["op"] == op] for op in COLLECTIVE_OPS}
        if min(sum(not r.point.test for r in found) for found in by_op.values()) < FEWEST_SIZES:
            if rows:
                self._keep(f"collectives.{name}")
            return False
        issued = self.issued_us(rows)
        within = {op: getattr(self.made.profile.collectives.intra, op) for op in COLLECTIVE_OPS}
        curves, errors = {}, []
        rings = not self.made.profile.inline
        for op, found in by_op.items():
            outside = issued + (self._inner_us(within[op], op) if name == "inter" else 0.0)
            fit, test = (
                curve_rows([r for r in found if r.point.test == t], rings=rings) for t in (0, 1)
            )
            curves[op] = fit_curve(subtract(fit, outside), op, reweightings=fit_cpu.REWEIGHTINGS)
            held_out = HeldOut(curve_errors(curves[op], test, op, outside), len(fit.size_bytes))
            self.made.errors[self._label(name, op)] = held_out
            shipped = getattr(getattr(self.base.collectives, name), op)
            # what bytes cost is compared: the latency of rows is not that of iterations
            shipped = shipped.model_copy(update={"latency_us": curves[op].latency_us})
            self.made.shipped[self._label(name, op)] = HeldOut(
                curve_errors(shipped, test, op, outside), 0
            )
            large = test.where(test.size_bytes >= LARGE_BYTES)
            self.made.errors[self._label(name, f"{op}, from 4 MiB")] = HeldOut(
                curve_errors(curves[op], large, op, outside), len(fit.size_bytes)
            )
            errors.append(held_out)
        uneven = [r for r in rows if r.point.params["op"] == "all_to_all_uneven"]
        if uneven:
            table = curve_rows(uneven, rings=rings)
            error = curve_errors(curves["all_to_all"], table, "all_to_all", issued)
            self.made.errors[self._label(name, "all_to_all, uneven")] = HeldOut(error, 0)
        used = {op: self.in_iterations(op, curve) for op, curve in curves.items()}
        self._put_wire(name, rows, used, sum(errors[1:], start=errors[0]))
        return True

    def in_iterations(self, op: str, curve: Curve) -> Curve:
        """A curve fitted on its rows as iterations are charged for it."""
        del op
        return curve

    def _label(self, name: str, op: str) -> str:
        """Of an error; says the link where there are two."""
        return f"{op} between hosts" if name == "inter" and self.wiring.local > 1 else op

    def _inner_us(self, curve: Any, op: str) -> float:
        """What a reduction between hosts of several ranks takes within them first."""
        local = self.wiring.local
        if op == "all_to_all" or local == 1:
            return 0.0
        return latency_ms(curve, local) / units.us(1.0)

    def _put_wire(
        self, name: str, rows: list[Measurement], curves: dict[str, Any], held_out: HeldOut
    ) -> None:
        base = self.made.profile
        spans = {
            "size_bytes": span(r.point.params["bytes"] for r in rows),
            "ranks": span(r.point.params["ranks"] for r in rows),
        }
        # rows of an all-reduce hold what the switch does of it
        changed = {**curves, "in_switch": None, "small_rel_error": None}
        if name == "inter" and self.wiring.link_gbit_s is not None:
            changed["nic_gbit_s"] = self.wiring.link_gbit_s
        wire = getattr(base.collectives, name).model_copy(update=changed)
        wire = self.group(wire, rows, held_out, ranges=spans)
        self.made.groups.add(f"collectives.{name}")
        self.update(collectives=base.collectives.model_copy(update={name: wire}))

    def _keep(self, what: str) -> None:
        self.made.notes.append(f"{what}: too few rows are left; the base profile's constants stay")

    def judge(self) -> None:
        """The verdict; says how the reference kernels changed from the start to the end."""
        drift = {}
        for kernel in REFERENCE_KERNELS:
            rows = (r for r in self.of("reference") if r.point.params["kernel"] == kernel)
            times = [r.median_us for r in rows]
            if len(times) > 1:
                drift[kernel] = max(times) / min(times) - 1
                self.made.notes.append(f"reference {kernel} moved by {drift[kernel]:.1%} meanwhile")
        found, made = self.accepted, self.made
        for family in sorted({r.point.family for r in found.refused} - set(TOGETHER)):
            left = sum(r.point.family == family and not r.point.test for r in self.rows)
            if left < FEWEST:
                self._keep(family)
        made.notes.append(
            f"{found.repeated} rows were measured again, {len(found.refused)} are refused"
        )
        ranks = self.wiring.ranks // self.wiring.hosts
        self.update(verdict=judge(found, drift, made.errors, made.shipped, ranks))


def _error_text(held_out: HeldOut) -> str:
    if not held_out.n:
        return "none"
    said = f"mean absolute error {held_out.mape:.1%}, bias {held_out.bias:+.1%}"
    return f"{said}, n {held_out.n}"


def _is_between(row: Measurement) -> bool:
    """Whether a collective joins several hosts."""
    params = row.point.params
    return "link_gbit_s" in params or params.get("hosts", 1) > 1


def _of_wiring(row: Measurement, wiring: Wiring) -> bool:
    """Whether a row is of this wiring, where it is of any: other links have other curves."""
    family, params = row.point.family, row.point.params
    if family not in TOGETHER:
        return True
    if params.get("link_gbit_s") != wiring.link_gbit_s:
        return False
    within_a_host = family == "collective" and wiring.hosts > 1 and "hosts" not in params
    return within_a_host or params.get("hosts", 1) == wiring.hosts
