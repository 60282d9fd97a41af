"""Host overheads from near-empty iterations of real TorchRec.

What the main thread computes in one is framework code: ops of the iteration graph times one cost,
after the few kernels that run at their floors. What the iteration lasts beyond that is the part of
its collectives that other threads and the wires take.

Why: docs/decisions/0013.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor import units
from predictor.fit.cpu import non_negative
from predictor.fit.held_out import HeldOut
from predictor.hardware.groups import CpuEmbedding
from predictor.hardware.schema import HardwareProfile
from shardopt.calibrate.design.near_empty import batch_of, near_empty
from shardopt.calibrate.rows import Measurement, key_of

Array = NDArray[np.float64]


@dataclass(frozen=True)
class HostCosts:
    """What near-empty iterations tell.

    Args:
        op_us: main thread's time of one op of TorchRec's stages in the iteration graph.
        layer_op_us: of one op around a dense layer.
        iteration_us: of all that belongs to no stage.
        message_us: time of one small collective beyond the main thread's.
        held_out: errors of the main thread's time of each row, fitted on all others.
    """

    op_us: float
    layer_op_us: float
    iteration_us: float
    message_us: float
    held_out: HeldOut


def host_costs(
    cpu: Sequence[Measurement], wall: Sequence[Measurement], profile: HardwareProfile
) -> HostCosts:
    """Fit the rows of near-empty iterations, of which ``cpu`` and ``wall`` are two parts.

    Args:
        profile: whose kernels are fitted already.
    """
    wholes = {key_of(row.point): row.median_us for row in wall}
    counts = [_counts(row.point.params, profile) for row in cpu]
    ops, kernels_us = np.array([c.ops for c in counts]), np.array([c.kernels_us for c in counts])
    collectives = np.array([c.collectives for c in counts])
    main_us = np.array([row.median_us for row in cpu])
    errors = []
    for i in range(len(cpu)):
        others = np.arange(len(cpu)) != i
        costs = _fit(ops[others], (main_us - kernels_us)[others])
        errors.append((ops[i] @ costs + kernels_us[i]) / main_us[i] - 1.0)
    op_us, layer_op_us, iteration_us = _fit(ops, main_us - kernels_us)
    base = np.array([row.point.params["pipeline"] == "base" for row in cpu])
    beyond = np.array([wholes[key_of(row.point)] for row in cpu]) - main_us
    return HostCosts(
        op_us=float(op_us),
        layer_op_us=float(layer_op_us),
        iteration_us=float(iteration_us),
        message_us=max(0.0, float(np.median((beyond / collectives)[base]))),
        held_out=HeldOut(np.array(errors), len(cpu) - 1),
    )


def _fit(ops: Array, times_us: Array) -> Array:
    """Cost of each kind of op, and of the iteration, ``[3]``."""
    return non_negative(ops, np.maximum(times_us, 1.0))


@dataclass(frozen=True)
class _Counts:
    """Ops of TorchRec's stages and of dense layers, iterations, and the rest of one row."""

    ops: tuple[float, float, float]
    collectives: float
    kernels_us: float


def _counts(params: dict[str, Any], profile: HardwareProfile) -> _Counts:
    nothing = dict.fromkeys(("op_us", "layer_op_us", "iteration_us", "collective_us"), 0.0)
    embedding = profile.embedding
    if isinstance(embedding, CpuEmbedding):
        # a table with next to no ids is not what its constant was fitted on
        embedding = embedding.model_copy(update={"forward_table_us": 0.0, "backward_table_us": 0.0})
    bare = profile.overheads.model_copy(update=nothing)
    host = {}
    for name in nothing:
        one = bare.model_copy(update={name: 1.0})
        changed = profile.model_copy(update={"overheads": one, "embedding": embedding})
        host[name], kernels_us = _spent_us(params, changed)
    ops = (host["op_us"], host["layer_op_us"], host["iteration_us"])
    return _Counts(ops, host["collective_us"], kernels_us)


def _spent_us(params: dict[str, Any], profile: HardwareProfile) -> tuple[float, float]:
    """Host and kernel time of the busiest rank, us."""
    batch, candidate = batch_of(*near_empty(params), profile)
    graph = batch.graph(batch.totals(candidate)[None])
    there = [op for op in graph.ops if op.active is None or op.active.all()]
    host = sum(op.host_ms for op in there)
    kernels = sum(float(np.max(op.cost_ms)) for op in there if op.resource != "collectives")
    return host / units.us(1.0), kernels / units.us(1.0)
