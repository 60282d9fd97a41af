"""From rows to a hardware profile: every family fitted on its fit rows, scored on its test rows.

Reads rows and nothing else. A group without enough rows keeps the base profile's constants and its
provenance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import yaml

from predictor import fit_cpu, units
from predictor.errors import InputError
from predictor.fit import fit_curve
from predictor.fit_cpu import HeldOut
from predictor.profile_groups import CpuEmbedding, Provenance
from predictor.profile_schema import HardwareProfile
from shardopt.calibrate.design import COLLECTIVE_OPS
from shardopt.calibrate.host import host_costs
from shardopt.calibrate.phases import REFERENCE_KERNELS, TOGETHER
from shardopt.calibrate.rows import PASSES, Measured, Origin
from shardopt.calibrate.small_ops import batched_products, copies, gathers
from shardopt.calibrate.tables import (
    by_tables,
    curve_errors,
    curve_rows,
    gemm_rows,
    less,
    memory_rows,
    span,
    tbe_rows,
)

MIN_REL_ERROR = 0.01
MAX_REL_ERROR = 2.0
FEWEST = 6
"""Fit rows of a family below which nothing is fitted."""
SMALL_BYTES = 1024
"""Up to it, the size of a message does not matter."""


@dataclass
class Calibrated:
    """A profile, and the held-out error of every family that was fitted."""

    profile: HardwareProfile
    errors: dict[str, HeldOut] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class _Builder:
    """Fits family after family onto a base profile."""

    def __init__(
        self,
        rows: Sequence[Measured],
        origin: Origin,
        base: HardwareProfile,
        link_gbit_s: float | None,
    ) -> None:
        self.origin, self.link_gbit_s = origin, link_gbit_s
        self.rows = [row for row in rows if _over_link(row, link_gbit_s)]
        self.made = Calibrated(base)
        self.message_us: float | None = None
        self.call_us = 0.0

    def of(self, family: str, part: str = "", test: bool | None = None) -> list[Measured]:
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
        self, group: Any, fitted: Sequence[Measured], held_out: HeldOut, **ranges: Any
    ) -> Any:
        """``group`` with measured provenance and the held-out error as its own."""
        rms = held_out.rms if held_out.n else group.rel_error
        provenance = Provenance(
            kind="measured",
            source=(
                f"shardopt calibrate on {self.origin.machine}; held-out rows: mean absolute error "
                f"{held_out.mape:.1%}, bias {held_out.bias:+.1%}, n {held_out.n}"
            ),
            versions=self.origin.versions,
            date=max(row.date for row in fitted)[:10],
            n=len(fitted),
            range=ranges,
        )
        error = round(float(np.clip(rms, MIN_REL_ERROR, MAX_REL_ERROR)), 4)
        return group.model_copy(update={"provenance": provenance, "rel_error": error})

    def memory(self) -> None:
        """Elementwise floor and bandwidth; on a CPU every level of memory has that bandwidth."""
        fit, test = (self.of("elementwise", test=held) for held in (False, True))
        if len(fit) < FEWEST:
            return
        floor, gb_s = fit_cpu.fit_memory(memory_rows(fit))
        held_out = HeldOut(fit_cpu.memory_errors(floor, gb_s, memory_rows(test)), len(fit))
        self.made.errors["elementwise"] = held_out
        base = self.made.profile
        sizes = span(row.facts["bytes_moved"] for row in fit + test)
        elementwise = base.elementwise.model_copy(
            update={
                "efficiency": 1.0,
                "floor_us": self._warm_call_us(floor),
                "ramp_us": 0.0,
                **self._small_moves(gb_s),
            }
        )
        levels = dict.fromkeys(("hbm_gb_s", "l2_gb_s", "host_link_gb_s", "ddr_gb_s"), gb_s)
        memory = base.memory.model_copy(update=levels) if base.inline else base.memory
        self.update(elementwise=self.group(elementwise, fit, held_out, bytes_moved=sizes))
        if base.inline:
            self.update(memory=self.group(memory, fit, held_out, bytes_moved=sizes))

    def _small_moves(self, gb_s: float) -> dict[str, Any]:
        """What a CPU's copies of columns, and ids into buckets, take beyond streaming."""
        if not self.made.profile.inline:
            return {}
        pooled = [r for part in PASSES for r in self.of("pooled", part)]
        return {"fused_bias": False, **copies(pooled, self.of("jagged"), gb_s, self.call_us)}

    def _warm_call_us(self, floor_us: float) -> float:
        """Floor of a kernel among others of its like: the rows' own is that of a call after other
        memory was read, which displaces code as well."""
        self.call_us = floor_us
        small = self.of("host")
        return min(floor_us, small[0].median_us) if small else floor_us

    def interaction(self) -> None:
        """Products one by one, and pairs picked from them; on a GPU both are large kernels."""
        profile = self.made.profile
        rows = [r for part in PASSES for r in self.of("interaction", part)]
        if not profile.inline or not rows:
            return
        gemm = profile.gemm.model_copy(update=batched_products(rows, profile))
        moves = profile.elementwise.model_copy(update=gathers(rows, profile, self.call_us))
        self.update(gemm=gemm, elementwise=moves)

    def gemm(self) -> None:
        """Tile, rate, prologue and floor from fp32; the rate alone of other types."""
        fit, test = (
            [r for r in self.of("gemm", test=held) if _is_plain(r)] for held in (False, True)
        )
        if len(fit) < FEWEST or not self.made.profile.inline:
            return
        hbm = self.made.profile.memory.hbm
        base = self.made.profile.gemm.model_copy(
            update={"tflops": {"fp32": 0.1}, "overlaps": False}
        )
        gemm = fit_cpu.fit_cpu_gemm(gemm_rows(fit), hbm, base)
        tested = gemm_rows(test)
        errors = fit_cpu.cpu_gemm_errors(gemm, hbm, tested)
        held_out = HeldOut(errors, len(fit), tested.time_ms)
        self.made.errors["gemm fp32"] = held_out
        narrow = [r for r in self.of("gemm", test=False) if r.point.params["dtype"] == "bf16"]
        if narrow:
            gemm = fit_cpu.fit_gemm_rate(gemm_rows(narrow), hbm, gemm, "bf16")
            tests = [r for r in self.of("gemm", test=True) if r.point.params["dtype"] == "bf16"]
            errors = fit_cpu.cpu_gemm_errors(gemm, hbm, gemm_rows(tests), "bf16")
            self.made.errors["gemm bf16"] = HeldOut(errors, len(narrow))
        # a CPU has no tf32: the same kernels run; other types that no row has keep the base's rate
        known = {str(k): v for k, v in self.made.profile.gemm.tflops.items()}
        rates = known | {str(k): v for k, v in gemm.tflops.items()}
        floor = self.made.profile.elementwise.floor_us
        gemm = gemm.model_copy(
            update={"tflops": rates | {"tf32": rates["fp32"]}, "floor_us": floor}
        )
        flop = span(2.0 * p["m"] * p["n"] * p["k"] for p in (r.point.params for r in fit + test))
        self.update(gemm=self.group(gemm, fit, held_out, flop=flop))

    def lookups(self) -> None:
        """Every coefficient of the CPU's embedding law."""
        law = self.made.profile.embedding
        parts = {part: self.of("lookup", part, test=False) for part in PASSES}
        if min(map(len, parts.values())) < FEWEST or not isinstance(law, CpuEmbedding):
            return
        forward, backward = (tbe_rows(parts[part]) for part in PASSES)
        fitted = fit_cpu.fit_lookups(forward, backward, law)
        scores: list[HeldOut] = []
        for part, names in (("forward", fit_cpu.FORWARD), ("backward", fit_cpu.BACKWARD)):
            rows = self.of("lookup", part, test=True)
            errors = fit_cpu.lookup_errors(fitted, tbe_rows(rows), names)
            held_out = HeldOut(errors, len(parts[part]), tbe_rows(rows).time_ms)
            self.made.errors[f"lookup {part}"] = held_out
            for label, keep in by_tables(rows):
                self.made.errors[f"lookup {part}, {label}"] = HeldOut(errors[keep], held_out.fitted)
            scores.append(held_out)
        fitted = fitted.model_copy(update=self._variants(fitted))
        rows = parts["forward"] + parts["backward"]
        group = self.group(
            fitted,
            rows,
            scores[0] + scores[1],
            tables=span(len(r.facts["tables"]) for r in rows),
            ids=span(sum(t[3] for t in r.facts["tables"]) for r in rows),
            rows=span(t[0] for r in rows for t in r.facts["tables"]),
            dim=span(t[1] for r in rows for t in r.facts["tables"]),
        )
        self.update(embedding=group)

    def _variants(self, law: CpuEmbedding) -> dict[str, float]:
        """Backwards of another kind over what the law gives: the median of each."""
        rows = self.of("lookup_variant", "backward")
        kinds = {
            "backward_stateless": [r for r in rows if r.point.params["optimizer"] == "exact_sgd"],
            "backward_weighted": [r for r in rows if r.point.params["weighted"]],
        }
        found = {}
        for name, of_kind in ((name, some) for name, some in kinds.items() if some):
            table = tbe_rows(of_kind)
            predicted = fit_cpu.predict_lookups(law, table, fit_cpu.BACKWARD)
            found[name] = float(np.median(table.time_ms / predicted))
        return found

    def collectives(self) -> None:
        """A curve for each; the host's time to issue one is a constant of its own."""
        rows = self.of("collective")
        issued = self._issued_us(rows)
        by_op = {op: [r for r in rows if r.point.params["op"] == op] for op in COLLECTIVE_OPS}
        if min(sum(not r.point.test for r in found) for found in by_op.values()) < 3:
            return
        curves, errors = {}, []
        for op, found in by_op.items():
            fit, test = (curve_rows([r for r in found if r.point.test == t]) for t in (0, 1))
            curves[op] = fit_curve(less(fit, issued), op, reweightings=fit_cpu.REWEIGHTINGS)
            held_out = HeldOut(curve_errors(curves[op], test, op, issued), len(fit.size_bytes))
            self.made.errors[op] = held_out
            large = test.where(test.size_bytes >= 4 * units.MIB)
            self.made.errors[f"{op}, from 4 MiB"] = HeldOut(
                curve_errors(curves[op], large, op, issued), len(fit.size_bytes)
            )
            errors.append(held_out)
        uneven = [r for r in rows if r.point.params["op"] == "all_to_all_uneven"]
        if uneven:
            table = curve_rows(uneven)
            error = curve_errors(curves["all_to_all"], table, "all_to_all", issued)
            self.made.errors["all_to_all, uneven"] = HeldOut(error, 0)
        self._wire(rows, curves, sum(errors[1:], start=errors[0]), issued)

    def _issued_us(self, rows: Sequence[Measured]) -> float:
        """What the main thread does of a collective: host ops of the iteration graph count it."""
        issue = [r.median_us for r in rows if r.point.params["op"] == "issue"]
        if self.message_us is None:
            return float(np.median(issue)) if issue else 0.0
        small = [
            r.median_us
            for r in rows
            if r.point.params["op"] == "all_to_all" and r.point.params["bytes"] <= SMALL_BYTES
        ]
        return max(0.0, float(np.median(small)) - self.message_us) if small else 0.0

    def _wire(
        self, rows: list[Measured], curves: dict[str, Any], held_out: HeldOut, issued: float
    ) -> None:
        base = self.made.profile
        spans = {
            "size_bytes": span(r.point.params["bytes"] for r in rows),
            "ranks": span(r.point.params["ranks"] for r in rows),
        }
        name, changed = "intra", dict(curves)
        if self.link_gbit_s is not None:
            name, changed = "inter", {**curves, "nic_gbit_s": self.link_gbit_s}
        wire = getattr(base.collectives, name).model_copy(update=changed)
        wire = self.group(wire, rows, held_out, **spans)
        self.update(
            collectives=base.collectives.model_copy(update={name: wire}),
            overheads=base.overheads.model_copy(
                update={"collective_us": issued if self.message_us is None else 0.0}
            ),
        )

    def host(self) -> None:
        """Host time of an op of the graph, from near-empty iterations."""
        cpu, wall = (self.of("iteration", part) for part in ("cpu", "wall"))
        if not cpu or not self.made.profile.inline:
            return
        found = host_costs(cpu, wall, self.made.profile)
        self.message_us = found.message_us
        self.made.errors["host"] = found.held_out
        overheads = self.made.profile.overheads.model_copy(
            update={
                "op_us": found.op_us,
                "layer_op_us": found.layer_op_us,
                "iteration_us": found.iteration_us,
            }
        )
        self.update(overheads=self.group(overheads, cpu, found.held_out))

    def disown(self) -> None:
        """Groups of a GPU that were not fitted are the base's, of perhaps another device."""
        made = self.made.profile
        for name in ("memory", "gemm", "embedding", "overheads"):
            group = getattr(made, name)
            said = Provenance(kind="not validated", source=f"of {made.name}, not measured here")
            self.update(**{name: group.model_copy(update={"provenance": said})})
        self.made.notes.append("embedding, gemm and overheads of GPUs are not fitted yet")

    def drift(self) -> None:
        """How the reference kernels changed from the start to the end."""
        for kernel in REFERENCE_KERNELS:
            rows = (r for r in self.of("reference") if r.point.params["kernel"] == kernel)
            times = [r.median_us for r in rows]
            if len(times) > 1:
                moved = max(times) / min(times) - 1
                self.made.notes.append(f"reference {kernel} moved by {moved:.1%} meanwhile")
        unstable = sum(not row.stable for row in self.rows)
        self.made.notes.append(f"{unstable} of {len(self.rows)} rows are unstable")


def _is_plain(row: Measured) -> bool:
    """An fp32 multiplication without a bias, which is a copy of its own."""
    params = row.point.params
    return bool(params["dtype"] == "fp32" and params["layout"] != "addmm")


def _over_link(row: Measured, gbit_s: float | None) -> bool:
    """Whether a row is of this link, where it is of any: other links have other curves."""
    return row.point.family not in TOGETHER or row.point.params.get("link_gbit_s") == gbit_s


def build_profile(
    rows: Sequence[Measured],
    origin: Origin,
    base: HardwareProfile,
    name: str,
    ranks: int,
    memory_gib: float,
    link_gbit_s: float | None = None,
) -> Calibrated:
    """The profile that the rows give.

    Args:
        base: whose constants stay where nothing was measured.
        memory_gib: main memory of the whole machine; its ranks share it.
        link_gbit_s: of the link between hosts of one rank, whose rows are fitted; None: those of
            ranks within the machine.

    Raises:
        InputError: there are too few rows of every family.
    """
    builder = _Builder(rows, origin, base, link_gbit_s)
    # bandwidth first: the fit of GEMM uses it
    builder.memory()
    builder.gemm()
    builder.interaction()
    builder.lookups()
    builder.host()
    builder.collectives()
    builder.drift()
    if not base.inline:
        builder.disown()
    if not builder.made.errors:
        raise InputError(f"{len(rows)} rows are too few to fit anything; measure more points")
    local = ranks if link_gbit_s is None else 1
    over = "" if link_gbit_s is None else f" on hosts joined by {link_gbit_s:g} Gbit/s"
    shape: dict[str, Any] = {
        "name": name,
        "title": f"{origin.machine}, {ranks} ranks{over}, measured by shardopt calibrate",
        "gpus_per_host": local,
        "nvlink_domain": local,
    }
    if base.inline:
        share = round(memory_gib / ranks, 2)
        shape |= {"hbm_gib": share, "ddr_gib": share}
    builder.update(**shape)
    return builder.made


def profile_text(profile: HardwareProfile) -> str:
    """The profile as YAML, figures to five digits."""
    data = _rounded(profile.model_dump(mode="json", by_alias=True, exclude_none=True))
    head = "# Written by shardopt calibrate; keys carry their unit.\n"
    return head + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=98)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
