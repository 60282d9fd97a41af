"""Fitting the constants of HugeCTR's runtimes: ``python -m lab fit hugectr --data DIR``.

Rows: A100-SXM and H100-SXM systems of MLPerf rounds up to v3.1. Three factors on kernel times are
shared by all rounds of DLRM-DCNv2, and each of v3.0 and v3.1 has the fixed time of a step; rounds
v2.x have another embedding, with its own update factor and step. The loss is
the mean absolute log error, weighted by the square root of the systems that share a configuration,
with a weak pull of the factors towards one. It prints what
`predictor/hardware/runtimes/hugectr.yaml` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lab.runtimes.hugectr import Runtime, runtime_of_round
from lab.statistics import grouped
from lab.validate.mlperf import DCNV2, Planner, builder_of, read_systems
from shardopt.calibrate.fitting import Array

PULL = 0.01
"""Weight of the squared log factors beside the mean log error."""
EVALUATIONS, RESTARTS = 400, 3
"""The simplex collapses on the edges of absolute errors, so it restarts from its result."""


class Rows:
    """Measured configurations, with the median over the systems that share one."""

    def __init__(self, folder: Path, rounds: Callable[[tuple[int, ...]], bool]) -> None:
        planner, _ = Planner.read(folder)
        systems = [
            s
            for s in read_systems(folder).rows
            if s.is_fitted and rounds(s.version) and (s.benchmark != DCNV2 or planner.matrix(s))
        ]
        alike = grouped(
            systems,
            lambda s: (s.runtime.name, s.profile, s.nodes, s.gpus_per_node, s.global_batch,
                       planner.knobs(s)),
        )  # fmt: skip
        self.builders = [builder_of(members[0], planner) for members in alike.values()]
        self.versions = [members[0].version for members in alike.values()]
        times = [[system.measured_ms for system in members] for members in alike.values()]
        self.measured = np.array([np.median(members) for members in times])
        self.weights = np.array([len(members) ** 0.5 for members in times])

    def loss(self, runtime_of: Callable[[tuple[int, ...]], Runtime]) -> float:
        """Return the weighted mean of the absolute log errors."""
        predicted = []
        for builder, version in zip(self.builders, self.versions, strict=True):
            # the submission chooses the frequent rows; they are no constant to fit
            rule = builder.runtime.hybrid
            builder.use(replace(runtime_of(version), hybrid=rule))
            predicted.append(builder.iteration_ms())
        error = np.abs(np.log(np.array(predicted) / self.measured))
        return float((self.weights @ error) / self.weights.sum())


def fit_dcnv2(folder: Path) -> tuple[Runtime, Runtime]:
    """Fit the runtimes of v3.0 and v3.1."""
    rows = Rows(folder, lambda version: version >= (3, 0))

    def runtimes(x: Array) -> tuple[Runtime, Runtime]:
        lookup, update, gemm, step30, step31 = np.abs(x).tolist()
        shared = {"lookup_factor": lookup, "update_factor": update, "gemm_factor": gemm}
        return (
            replace(runtime_of_round((3, 0)), step_us=step30, **shared),
            replace(runtime_of_round((3, 1)), step_us=step31, **shared),
        )

    def loss(x: Array) -> float:
        v30, v31 = runtimes(x)
        pull = PULL * float((np.log(np.abs(x[:3])) ** 2).sum())
        return rows.loss(lambda version: v30 if version < (3, 1) else v31) + pull

    return runtimes(_minimum(loss, [1.0, 1.5, 1.0, 450.0, 420.0]))


def fit_hybrid(folder: Path, like: Runtime) -> Runtime:
    """Fit the runtime of rounds v2.x; lookups and multiplications are those of later rounds."""
    rows = Rows(folder, lambda version: version < (3, 0))
    base = replace(
        runtime_of_round((2, 0)), lookup_factor=like.lookup_factor, gemm_factor=like.gemm_factor
    )

    def runtime(x: Array) -> Runtime:
        update, step = np.abs(x).tolist()
        return replace(base, update_factor=update, step_us=step)

    def loss(x: Array) -> float:
        return rows.loss(lambda _: runtime(x)) + PULL * float(np.log(abs(x[0])) ** 2)

    return runtime(_minimum(loss, [1.5, 50.0]))


def _minimum(loss: Callable[[Array], float], start: Sequence[float]) -> Array:
    from scipy.optimize import minimize

    x = np.array(start)
    for _ in range(RESTARTS):
        result = minimize(
            loss,
            x,
            method="Nelder-Mead",
            options={"maxfev": EVALUATIONS, "xatol": 1e-4, "fatol": 1e-6},
        )
        x = np.asarray(result.x)
    return x


def run(data: Path) -> Iterator[str]:
    """Yield a line for each fitted runtime."""
    v30, v31 = fit_dcnv2(data)
    for runtime in (fit_hybrid(data, v31), v30, v31):
        yield (
            f"{runtime.name}: lookup_factor {runtime.lookup_factor:.3f}, update_factor "
            f"{runtime.update_factor:.3f}, gemm_factor {runtime.gemm_factor:.3f}, "
            f"step_us {runtime.step_us:.0f}"
        )
