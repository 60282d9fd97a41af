"""The profile of a GPU: the groups that rows tell, over a base profile that has the others.

Why: docs/decisions/0015.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from predictor import units
from predictor.fit import cuda as fit_cuda
from predictor.fit.constants import FittedProfile, FreeConstant, Predict, fit_free
from predictor.fit.held_out import HeldOut
from predictor.hardware.schema import HardwareProfile
from shardopt.calibrate.design.near_empty import batch_of, near_empty
from shardopt.calibrate.design.points import MIX, MIX_LAUNCHES
from shardopt.calibrate.profile.builder import FEWEST, Builder
from shardopt.calibrate.profile.tables import gemm_rows, launch_rows, memory_rows, span
from shardopt.calibrate.rows import Measurement

HOST_OPS = (
    FreeConstant("overheads", "op_us", 0.5, 500.0),
    FreeConstant("overheads", "layer_op_us", 0.5, 500.0),
    FreeConstant("overheads", "iteration_us", 1.0, 100_000.0),
)
Rows = TypeVar("Rows")
LOOKUP_FAMILIES = ("lookup", "lookup_cached", "model_lookup")


class CudaBuilder(Builder):
    """Fits family after family onto a base profile."""

    def build(self) -> None:
        """Bandwidth first, which all other kernels use; host ops last, as they need the rest."""
        self.device()
        self.streaming()
        self.moves()
        self.copies()
        self.gemm()
        self.lookups()
        self.collectives()
        self.overheads()

    def device(self) -> None:
        """What the device says of itself; the base may be a smaller one of its kind."""
        said = next((r.facts["device"] for r in self.of("host") if "device" in r.facts), None)
        if said is not None:
            base = self.made.profile
            memory = base.memory.model_copy(update={"l2_mib": said["l2_mib"] or base.memory.l2_mib})
            self.update(sms=said["sms"], hbm_gib=said["memory_gib"], memory=memory)

    def streaming(self) -> None:
        """Bandwidth of the device's memory."""
        fit, test = (self.of("streaming", test=held) for held in (False, True))
        if not fit:
            return
        self.made.profile = fit_cuda.fit_streaming(self.made.profile, memory_rows(fit))
        held_out = self._score(
            "streaming", fit, test, fit_cuda.predict_streaming, memory_rows(test)
        )
        said = "; all as in the base profile but hbm_gb_s"
        self._put("memory", self.made.profile.memory, fit, held_out, said)

    def moves(self) -> None:
        """How memory-bound kernels reach the bandwidth."""
        fit, test = (self.of("elementwise", test=held) for held in (False, True))
        if len(fit) < FEWEST:
            return
        found = fit_cuda.fit_moves(self.made.profile, memory_rows(fit))
        self.made.profile = found.hw
        held_out = self._score("elementwise", fit, test, fit_cuda.predict_moves, memory_rows(test))
        sizes = span(r.facts["bytes_moved"] for r in fit + test)
        group = found.hw.elementwise
        self._put("elementwise", group, fit, held_out, _kept_text(found), bytes_moved=sizes)

    def copies(self) -> None:
        """The host link, of the memory group, whose error stays that of streaming."""
        fit, test = (self.of("copy_h2d", test=held) for held in (False, True))
        if len(fit) < FEWEST:
            return
        found = fit_cuda.fit_copies(self.made.profile, memory_rows(fit))
        self.made.profile = found.hw
        held_out = self._score("copy_h2d", fit, test, fit_cuda.predict_copies, memory_rows(test))
        self._extend_memory(
            found, "host_link_gb_s and host_link_latency_us of copies", fit, held_out
        )

    def gemm(self) -> None:
        """A rate for each data type; what no row has keeps the base's."""
        fit, test = (_by_dtype(self.of("gemm", test=held)) for held in (False, True))
        fit = {dtype: rows for dtype, rows in fit.items() if len(rows) >= FEWEST}
        if not fit:
            return
        found = fit_cuda.fit_gemms(
            self.made.profile, {dtype: gemm_rows(rows) for dtype, rows in fit.items()}
        )
        self.made.profile = found.hw
        scores = []
        for dtype, rows in fit.items():
            of = test.get(dtype, [])
            given = {dtype: gemm_rows(of)}
            scores.append(self._score(f"gemm {dtype}", rows, of, fit_cuda.predict_gemms, given))
        used = [row for rows in fit.values() for row in rows]
        sizes = {side: span(r.point.params[side] for r in used) for side in ("m", "n", "k")}
        held_out = sum(scores[1:], start=scores[0])
        # an event timer adds nothing that the floor has not
        group = found.hw.gemm.model_copy(update={"timing_floor_us": found.hw.gemm.floor_us})
        self._put("gemm", group, used, held_out, _kept_text(found), **sizes)

    def lookups(self) -> None:
        """Constants of the TBE's kernel model, and the L2's bandwidth, seen in gathers alone."""
        rows = [r for family in LOOKUP_FAMILIES for r in self._of_all_parts(family)]
        fit, test = ([r for r in rows if r.point.test == held] for held in (False, True))
        if len(fit) < FEWEST:
            return
        found = fit_cuda.fit_launches(self.made.profile, launch_rows(fit))
        self.made.profile = found.hw
        scores = []
        for label, keep in _labels().items():
            fitted, of = ([r for r in some if keep(r)] for some in (fit, test))
            if of:
                predict, given = fit_cuda.predict_launches, launch_rows(of)
                scores.append(self._score(label, fitted, of, predict, given))
        held_out = sum(scores[1:], start=scores[0]) if scores else HeldOut(np.zeros(0), len(fit))
        self._extend_memory(found, "l2_gb_s of lookups", fit, held_out)
        self._put(
            "embedding",
            found.hw.embedding,
            fit,
            held_out,
            _kept_text(found),
            tables=span(len(r.facts["tables"]) for r in rows),
            ids=span(sum(t[3] for t in r.facts["tables"]) for r in rows),
            rows=span(t[0] for r in rows for t in r.facts["tables"]),
            dim=span(t[1] for r in rows for t in r.facts["tables"]),
        )

    def overheads(self) -> None:
        """Launches and waiting from loops of small ops, ops of TorchRec from near-empty iterations.

        The same ops on host tensors run the same framework code and launch nothing, so the
        difference is the launches'. A round trip is an op, its launch, the way to the device, the
        kernel, and the way back.
        """
        known = {r.point.params["what"]: r.median_us for r in self.of("host")}
        if not {"op", "op_on_host", "round_trip", "sync"} <= set(known):
            return
        launch = max(0.0, (known["op"] - known["op_on_host"]) * MIX / MIX_LAUNCHES)
        ways = known["round_trip"] - known["op_on_host"] - launch
        latency = (ways - self.made.profile.elementwise.floor_us) / 2
        costs = {
            "launch_us": launch,
            "launch_latency_us": max(0.0, latency),
            "sync_us": known["sync"],
        }
        base = self.made.profile.overheads
        self.update(overheads=base.model_copy(update=costs))
        rows, held_out, kept = self._host_ops()
        self._put(
            "overheads", self.made.profile.overheads, [*self.of("host"), *rows], held_out, kept
        )

    def _host_ops(self) -> tuple[list[Measurement], HeldOut, str]:
        """Fit `HOST_OPS` so that near-empty iterations are predicted as long as they were.

        Each half of the rows is predicted by a fit of the other.
        """
        rows = self.of("iteration", "wall")
        nothing = HeldOut(np.zeros(0), 0)
        if len(rows) < 2 * FEWEST:
            return [], nothing, "; ops of the host as in the base profile: no iterations were run"
        base, errors = self.made.profile, []
        for held in (0, 1):
            fit, test = rows[1 - held :: 2], rows[held::2]
            found = fit_free(base, HOST_OPS, _iterations(fit), _ms(fit))
            errors.append(_iterations(test)(found.hw) / _ms(test) - 1.0)
        found = fit_free(base, HOST_OPS, _iterations(rows), _ms(rows))
        held_out = HeldOut(np.concatenate(errors), len(rows) // 2)
        self.made.errors["host"] = held_out
        self.made.profile = found.hw
        return rows, held_out, _kept_text(found)

    def issued_us(self, rows: Sequence[Measurement]) -> float:
        """Events of the device see nothing of the host's issuing."""
        del rows
        return 0.0

    def collective_us(self, rows: Sequence[Measurement]) -> float:
        """The host's time to issue one."""
        known = any(r.point.params["op"] == "issue" for r in rows)
        return self.issue_us(rows) if known else self.made.profile.overheads.collective_us

    def _of_all_parts(self, family: str) -> list[Measurement]:
        return [row for row in self.rows if row.point.family == family]

    def _score(
        self,
        label: str,
        fit: Sequence[Measurement],
        test: Sequence[Measurement],
        predict: Callable[[HardwareProfile, Rows], Any],
        rows: Rows,
    ) -> HeldOut:
        """Errors of rows held out, of the profile as it is now, kept under a label.

        Args:
            rows: those of ``test`` as ``predict`` takes them.
        """
        held_out = HeldOut(predict(self.made.profile, rows) / _ms(test) - 1.0, len(fit), _ms(test))
        self.made.errors[label] = held_out
        self.made.shipped[label] = HeldOut(predict(self.base, rows) / _ms(test) - 1.0, 0)
        return held_out

    def _put(
        self,
        name: str,
        group: Any,
        fitted: Sequence[Measurement],
        held_out: HeldOut,
        also: str = "",
        **ranges: tuple[float, float],
    ) -> None:
        self.update(**{name: self.group(group, fitted, held_out, also, ranges)})
        self.made.groups.add(name)

    def _extend_memory(
        self, found: FittedProfile, what: str, fit: Sequence[Measurement], held_out: HeldOut
    ) -> None:
        """More constants of the memory group, whose error stays that of streaming kernels."""
        self.made.profile = found.hw
        if not any(constant.group == "memory" for constant in found.fitted):
            return
        memory = found.hw.memory
        if "memory" not in self.made.groups:
            self._put("memory", memory, fit, held_out, f"; all as in the base profile but {what}")
            return
        said = {"source": f"{memory.provenance.source}, {what}"}
        provenance = memory.provenance.model_copy(update=said)
        self.update(memory=memory.model_copy(update={"provenance": provenance}))


def _labels() -> dict[str, Callable[[Measurement], bool]]:
    """Families of lookups whose errors are reported, each row in one of them."""

    def of(family: str, part: str, uvm: bool = False) -> Callable[[Measurement], bool]:
        def keep(row: Measurement) -> bool:
            link = row.point.params.get("kernel", "fused") == "fused_uvm"
            return (row.point.family, row.part, link) == (family, part, uvm)

        return keep

    return {
        "lookup forward": of("lookup", "forward"),
        "lookup backward": of("lookup", "backward"),
        "lookup forward, fused_uvm": of("lookup", "forward", uvm=True),
        "lookup backward, fused_uvm": of("lookup", "backward", uvm=True),
        "cache prefetch": of("lookup_cached", "prefetch"),
        "lookup forward, cached": of("lookup_cached", "forward"),
        "lookup backward, cached": of("lookup_cached", "backward"),
        "model's lookup forward": of("model_lookup", "forward"),
        "model's lookup backward": of("model_lookup", "backward"),
    }


def _kept_text(found: FittedProfile) -> str:
    """What the provenance says of constants that the rows do not tell."""
    if not found.kept:
        return ""
    return f"; as in the base profile, as the rows do not tell: {_names(found.kept)}"


def _names(constants: Sequence[FreeConstant]) -> str:
    return ", ".join(sorted(f"{c.group}.{c.key}" for c in constants))


def _by_dtype(rows: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    found: dict[str, list[Measurement]] = {}
    for row in rows:
        if row.point.params["layout"] != "addmm":
            found.setdefault(row.point.params["dtype"], []).append(row)
    return found


def _ms(rows: Sequence[Measurement]) -> Any:
    return np.array([units.us(row.median_us) for row in rows])


def _iterations(rows: Sequence[Measurement]) -> Predict:
    """Predicted iterations of near-empty models."""
    models = [near_empty(row.point.params) for row in rows]

    def times(hw: HardwareProfile) -> Any:
        found = []
        for workload, plan in models:
            batch, candidate = batch_of(workload, plan, hw)
            found.append(float(batch.score([candidate])[0]))
        return np.array(found)

    return times
