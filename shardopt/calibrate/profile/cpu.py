"""The profile of CPU ranks: one bandwidth for all memory, and host code that runs inline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from predictor.fit import cpu as fit_cpu
from predictor.fit.held_out import HeldOut
from predictor.hardware.schema import CpuEmbedding, Curve
from shardopt.calibrate.design.points import OPTIMIZER
from shardopt.calibrate.profile.builder import FEWEST, Builder
from shardopt.calibrate.profile.dense_parts import DensePartCosts, dense_part_costs
from shardopt.calibrate.profile.host import host_costs
from shardopt.calibrate.profile.small_ops import batched_products, copies, gathers
from shardopt.calibrate.profile.tables import by_tables, gemm_rows, memory_rows, span, tbe_rows
from shardopt.calibrate.rows import PASSES, Measurement


class CpuBuilder(Builder):
    """Fits family after family onto a base profile."""

    latency_us: Mapping[str, float] | None = None
    """Of messages in an iteration, beyond the main thread's time; None: no row says it."""
    dense_costs = DensePartCosts()
    fitted_host = False
    """Whether ops of the host have what the main thread does of a collective."""
    call_us = 0.0

    def build(self) -> None:
        """Bandwidth first: the fit of GEMM uses it; the host before the collectives."""
        self.memory()
        self.gemm()
        self.interaction()
        self.lookups()
        self.dense_parts()
        self.host()
        self.collectives()

    def memory(self) -> None:
        """Elementwise floor and bandwidth, which every level of memory has."""
        fit, test = (self.of("elementwise", test=held) for held in (False, True))
        if len(fit) < FEWEST:
            return
        floor, gb_s = fit_cpu.fit_memory(memory_rows(fit))
        held_out = HeldOut(fit_cpu.memory_errors(floor, gb_s, memory_rows(test)), len(fit))
        base = self.made.profile
        errors = fit_cpu.memory_errors(floor, base.memory.hbm_gb_s, memory_rows(test))
        self.made.errors["elementwise"] = held_out
        self.made.shipped["elementwise"] = HeldOut(errors, 0)
        sizes = {"bytes_moved": span(row.facts["bytes_moved"] for row in fit + test)}
        elementwise = base.elementwise.model_copy(
            update={
                "efficiency": 1.0,
                "floor_us": self._warm_call_us(floor),
                "ramp_us": 0.0,
                **self._small_moves(gb_s),
            }
        )
        levels = dict.fromkeys(("hbm_gb_s", "l2_gb_s", "host_link_gb_s", "ddr_gb_s"), gb_s)
        memory = base.memory.model_copy(update=levels)
        self.update(
            elementwise=self.group(elementwise, fit, held_out, ranges=sizes),
            memory=self.group(memory, fit, held_out, ranges=sizes),
        )

    def _small_moves(self, gb_s: float) -> dict[str, Any]:
        """What a CPU's copies of columns, and ids into buckets, take beyond streaming."""
        pooled = [r for part in PASSES for r in self.of("pooled", part)]
        return {"fused_bias": False, **copies(pooled, self.of("jagged"), gb_s, self.call_us)}

    def _warm_call_us(self, floor_us: float) -> float:
        """Floor of a kernel among others of its like: the rows' own is that of a call after other
        memory was read, which displaces code as well."""
        self.call_us = floor_us
        small = self.of("host")
        return min(floor_us, small[0].median_us) if small else floor_us

    def interaction(self) -> None:
        """Products one by one, and pairs picked from them."""
        profile = self.made.profile
        rows = [r for part in PASSES for r in self.of("interaction", part)]
        if not rows:
            return
        gemm = profile.gemm.model_copy(update=batched_products(rows, profile))
        moves = profile.elementwise.model_copy(update=gathers(rows, profile, self.call_us))
        self.update(gemm=gemm, elementwise=moves)

    def gemm(self) -> None:
        """Tile, rate, prologue and floor from fp32; the rate alone of other types."""
        fit, test = (
            [r for r in self.of("gemm", test=held) if _is_plain(r)] for held in (False, True)
        )
        if len(fit) < FEWEST:
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
        shipped = self.base.gemm.model_copy(update={"floor_us": gemm.floor_us})
        errors = fit_cpu.cpu_gemm_errors(shipped, self.base.memory.hbm, tested)
        self.made.shipped["gemm fp32"] = HeldOut(errors, 0)
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
        self.update(gemm=self.group(gemm, fit, held_out, ranges={"flop": flop}))

    def dense_parts(self) -> None:
        """Single ops of dense parts that are no DLRM's, where they were measured."""
        profile = self.made.profile
        costs = self.dense_costs = dense_part_costs(self.of, profile)
        self.made.errors |= costs.errors
        self.update(
            gemm=profile.gemm.model_copy(update=costs.gemm),
            elementwise=profile.elementwise.model_copy(update=costs.elementwise),
            embedding=profile.embedding.model_copy(update=costs.embedding),
            overheads=profile.overheads.model_copy(update={"step_us": costs.step_us}),
        )

    def lookups(self) -> None:
        """Every coefficient of the CPU's embedding model."""
        embedding = self.made.profile.embedding
        parts = {
            part: self.of("lookup", part, test=False) + self._of_model(part, test=False)
            for part in PASSES
        }
        if min(map(len, parts.values())) < FEWEST or not isinstance(embedding, CpuEmbedding):
            return
        forward, backward = (tbe_rows(parts[part]) for part in PASSES)
        fitted = fit_cpu.fit_lookups(forward, backward, embedding)
        scores: list[HeldOut] = []
        for part, names in (("forward", fit_cpu.FORWARD), ("backward", fit_cpu.BACKWARD)):
            rows = self.of("lookup", part, test=True)
            errors = fit_cpu.lookup_errors(fitted, tbe_rows(rows), names)
            held_out = HeldOut(errors, len(parts[part]), tbe_rows(rows).time_ms)
            self.made.errors[f"lookup {part}"] = held_out
            shipped = fit_cpu.lookup_errors(embedding, tbe_rows(rows), names)
            self.made.shipped[f"lookup {part}"] = HeldOut(shipped, 0)
            for label, keep in by_tables(rows):
                self.made.errors[f"lookup {part}, {label}"] = HeldOut(errors[keep], held_out.fitted)
            scores.append(held_out)
            of_model = self._of_model(part, test=True)
            if of_model:
                errors = fit_cpu.lookup_errors(fitted, tbe_rows(of_model), names)
                self.made.errors[f"model's lookup {part}"] = HeldOut(errors, held_out.fitted)
        fitted = self._dense(fitted.model_copy(update=self._variants(fitted)))
        rows = parts["forward"] + parts["backward"]
        group = self.group(
            fitted,
            rows,
            scores[0] + scores[1],
            ranges={
                "tables": span(len(r.facts["tables"]) for r in rows),
                "ids": span(sum(t[3] for t in r.facts["tables"]) for r in rows),
                "rows": span(t[0] for r in rows for t in r.facts["tables"]),
                "dim": span(t[1] for r in rows for t in r.facts["tables"]),
            },
        )
        self.update(embedding=group)

    def _of_model(self, part: str, test: bool) -> list[Measurement]:
        """Lookups of the given model's tables that the coefficients are for.

        Other optimizers, weights and types have factors of their own, or none.
        """
        plain: dict[str, Any] = {"dtype": "fp32", "weighted": False, "pooled": True}
        if part == "backward":
            plain["optimizer"] = OPTIMIZER
        return [
            row for row in self.of("model_lookup", part, test) if plain.items() <= row.facts.items()
        ]

    def _variants(self, embedding: CpuEmbedding) -> dict[str, float]:
        """Backwards of another kind over what the kernel model gives: the median of each."""
        rows = self.of("lookup_variant", "backward")
        kinds = {
            "backward_stateless": [r for r in rows if r.point.params["optimizer"] == "exact_sgd"],
            "backward_weighted": [r for r in rows if r.point.params["weighted"]],
        }
        found = {}
        for name, of_kind in ((name, some) for name, some in kinds.items() if some):
            table = tbe_rows(of_kind)
            predicted = fit_cpu.predict_lookups(embedding, table, fit_cpu.BACKWARD)
            found[name] = float(np.median(table.time_ms / predicted))
        return found

    def _dense(self, embedding: CpuEmbedding) -> CpuEmbedding:
        """Backwards that make dense gradients; as they were where there are too few rows."""
        fit, test = (self.of("lookup_dense", "backward", test=held) for held in (False, True))
        if len(fit) < FEWEST:
            return embedding
        fitted, launch_us = fit_cpu.fit_dense(tbe_rows(fit), embedding)
        errors = fit_cpu.dense_errors(fitted, launch_us, tbe_rows(test))
        self.made.errors["lookup backward, dense gradient"] = HeldOut(errors, len(fit))
        return fitted

    def host(self) -> None:
        """Host time of an op of the graph, from near-empty iterations."""
        cpu, wall = (self.of("iteration", part) for part in ("cpu", "wall"))
        if not cpu:
            return
        found = host_costs(cpu, wall, self.made.profile, self.dense_costs.layer_op_us)
        self.latency_us, self.fitted_host = found.latency_us, True
        self.made.errors["host"] = found.held_out
        overheads = self.made.profile.overheads.model_copy(
            update={
                "op_us": found.op_us,
                "layer_op_us": found.layer_op_us,
                "iteration_us": found.iteration_us,
            }
        )
        self.update(overheads=self.group(overheads, cpu, found.held_out))

    def issued_us(self, rows: Sequence[Measurement]) -> float:
        """What the main thread does of a collective, unless the latency is that of iterations."""
        return self.issue_us(rows) if self.latency_us is None else 0.0

    def collective_us(self, rows: Sequence[Measurement]) -> float:
        """Nothing where the host's ops, fitted on iterations, have it."""
        return 0.0 if self.fitted_host else self.issued_us(rows)

    def in_iterations(self, op: str, curve: Curve) -> Curve:
        """The latency is that of iterations: ranks enter as they come from other work there, and
        the main thread's part is in the host's ops; from the rows comes what bytes cost."""
        if self.latency_us is None:
            return curve
        return curve.model_copy(
            update={"latency_us": self.latency_us[op], "latency_per_doubling_us": 0.0}
        )


def _is_plain(row: Measurement) -> bool:
    """An fp32 multiplication without a bias, which is a separate copy."""
    params = row.point.params
    return bool(params["dtype"] == "fp32" and params["layout"] != "addmm")
