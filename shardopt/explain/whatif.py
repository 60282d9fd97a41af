"""Sensitivity of an iteration: the same plan predicted again with one thing changed.

Settings that the user could change are the advisor's (`search.tune.advice`).

Effects do not add up: once one thing is faster, another chain of work sets the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from predictor.hardware.scaling import scale_group
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.graph import Graph, Op
from predictor.iteration.timeline import simulate
from predictor.model.distribution import Distribution, Uniform, Zipf
from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import match_plan
from predictor.predict import Prediction
from search.problem import Problem
from search.tune.advice import faster_link
from shardopt.formatting import percent

STEP = 0.1
"""Bandwidths, rates and batches change by this fraction."""
ALPHA_STEP = 0.1
"""Change of the exponent of Zipf distributions."""


@dataclass(frozen=True)
class WhatIf:
    """A change that is not one of the plan, and the iteration time under it.

    Args:
        kind: ``bandwidth``, ``rate``, ``host``, ``batch``, ``skew`` or ``limit`` (a
            bound on what a better balance or a free host could give, not something to buy).
        change_ms: ``iteration_ms`` less that of the plan as it is; negative is faster.
    """

    kind: str
    change: str
    iteration_ms: float
    change_ms: float


def sensitivity(problem: Problem, plan: ShardingPlan, prediction: Prediction) -> list[WhatIf]:
    """Predict changes of bandwidth, rates, host, batch and skew, in this order.

    What a model or machine does not have (a NIC on one host, Zipf ids) is left out.
    """
    before = prediction.iteration_ms
    changes = []
    for kind, change, changed in (*_machines(problem), *_workloads(problem)):
        candidate = match_plan(changed.workload, changed.topology, plan)
        scorer = replace(changed, loads=None).scorer
        after = float(scorer.score([candidate])[0])
        if kind == "batch":
            batch = changed.workload.batch_size
            ratio = batch / problem.workload.batch_size * before / after
            word = "more" if ratio >= 1 else "fewer"
            change += f" ({batch:,} per rank): {percent(abs(ratio - 1))} {word} samples/s"
        changes.append(WhatIf(kind, change, after, after - before))
    for change, graph in _limits(prediction.graph):
        after = float(simulate(graph).iteration_ms[0])
        changes.append(WhatIf("limit", change, after, after - before))
    return changes


ChangedProblems = Iterator[tuple[str, str, Problem]]


def _machines(problem: Problem) -> ChangedProblems:
    """Yield problems with one bandwidth, rate or host cost better by `STEP`."""
    hw, topology = problem.hardware, problem.topology
    more, faster = f"+{percent(STEP)}", 1 + STEP
    memory = "main memory bandwidth" if hw.inline else "HBM bandwidth"
    hbm = {"hbm_gb_s": hw.memory.hbm_gb_s * faster}
    changes = [("bandwidth", f"{memory} {more}", _group(hw, "memory", hbm))]
    if topology.nvlink_domain > 1:
        inside = "bandwidth inside a host" if hw.inline else "NVLink bandwidth"
        changes.append(("bandwidth", f"{inside} {more}", faster_link(hw, "intra", faster)))
    if topology.groups > 1:
        between = "bandwidth between hosts (NIC)"
        changes.append(("bandwidth", f"{between} {more}", faster_link(hw, "inter", faster)))
    tflops = {"tflops": {name: rate * faster for name, rate in hw.gemm.tflops.items()}}
    changes.append(("rate", f"matrix multiplication rate {more}", _group(hw, "gemm", tflops)))
    host = scale_group(hw, "overheads", 1 - STEP)
    changes.append(("host", f"host overhead -{percent(STEP)}", host))
    for kind, change, hardware in changes:
        yield kind, change, replace(problem, hardware=hardware)


def _group(hw: HardwareProfile, name: str, update: dict[str, Any]) -> HardwareProfile:
    return hw.model_copy(update={name: getattr(hw, name).model_copy(update=update)})


def _workloads(problem: Problem) -> ChangedProblems:
    workload = problem.workload
    for factor in (1 + STEP, 1 - STEP):
        batch = max(1, round(workload.batch_size * factor))
        if batch != workload.batch_size:
            ratio = batch / workload.batch_size - 1
            change = f"batch {'+' if ratio > 0 else '-'}{percent(abs(ratio))}"
            yield "batch", change, replace(problem, workload=workload.with_batch_size(batch))
    distributions = [f.distribution for table in workload.tables for f in table.features]
    zipf = sum(isinstance(distribution, Zipf) for distribution in distributions)

    def redistributed(change: Callable[[Distribution], Distribution]) -> Problem:
        tables = []
        for table in workload.tables:
            features = (replace(f, distribution=change(f.distribution)) for f in table.features)
            tables.append(replace(table, features=tuple(features)))
        return replace(problem, workload=replace(workload, tables=tuple(tables)))

    for step in (ALPHA_STEP, -ALPHA_STEP) if zipf else ():
        change = f"Zipf alpha of the ids {step:+g} ({zipf} of {len(distributions)} features)"
        yield "skew", change, redistributed(partial(_change_alpha, step=step))
    if any(not isinstance(distribution, Uniform) for distribution in distributions):
        yield "skew", "all ids equally likely", redistributed(lambda _: Uniform())


def _change_alpha(distribution: Distribution, step: float) -> Distribution:
    if not isinstance(distribution, Zipf):
        return distribution
    return replace(distribution, alpha=max(0.0, distribution.alpha + step))


def _limits(graph: Graph) -> Iterator[tuple[str, Graph]]:
    if graph.world_size > 1:
        means = [replace(op, cost_ms=_spread_evenly(op)) for op in graph.ops]
        yield "the same work, spread evenly over the ranks", replace(graph, ops=means)
    ops = [replace(op, host_ms=0.0) for op in graph.ops]
    free = replace(graph, ops=ops, launch_latency_ms=0.0)
    yield "no host overhead (as with CUDA graphs)", free


def _spread_evenly(op: Op) -> np.ndarray:
    return np.broadcast_to(op.cost_ms.mean(axis=-1, keepdims=True), op.cost_ms.shape)
