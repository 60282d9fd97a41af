"""Host overheads from near-empty iterations of real TorchRec.

What the main thread computes in one is framework code: ops of the iteration graph times one cost,
after the few kernels that run at their floors. What the iteration lasts beyond that is the latency
of its collectives: what other threads, their scheduling and the wires take of a small message among
ranks that arrive as they do in training.

Why: docs/decisions/0013, docs/decisions/0036.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor import units
from predictor.cost.collectives import OPS, Op
from predictor.fit.cpu import non_negative
from predictor.fit.held_out import HeldOut
from predictor.hardware.schema import CpuEmbedding, Curve, HardwareProfile
from shardopt.calibrate.design.near_empty import batch_of, near_empty
from shardopt.calibrate.rows import Measurement, key_of

Array = NDArray[np.float64]

LATENCIES: tuple[tuple[Op, ...], ...] = (
    ("all_to_all",),
    ("all_reduce",),
    ("reduce_scatter", "all_gather"),
)
"""Collectives with a latency of their own; a row split's forward and backward come together."""
FEWEST_WALLS = 2 * len(LATENCIES)
"""Iterations whose wall time is known below which no latency is fitted."""


@dataclass(frozen=True)
class HostCosts:
    """What near-empty iterations tell.

    Args:
        op_us: main thread's time of one op of TorchRec's stages in the iteration graph.
        layer_op_us: of one op around a dense layer.
        iteration_us: of all that belongs to no stage.
        latency_us: of one message of each collective, beyond the main thread's time; None: too few
            rows say it.
        held_out: errors of the main thread's time of each row, fitted on all others.
    """

    op_us: float
    layer_op_us: float
    iteration_us: float
    latency_us: Mapping[str, float] | None
    held_out: HeldOut


def host_costs(
    cpu: Sequence[Measurement],
    wall: Sequence[Measurement],
    profile: HardwareProfile,
    layer_op_us: float | None = None,
) -> HostCosts:
    """Fit the rows of near-empty iterations, of which ``cpu`` and ``wall`` are two parts.

    Args:
        profile: whose kernels are fitted already.
        layer_op_us: where it is known from rows of layers alone; few of these iterations tell it.
    """
    wholes = {key_of(row.point): row.median_us for row in wall}
    counts = [_counts(row.point.params, profile) for row in cpu]
    ops, kernels_us = np.array([c.ops for c in counts]), np.array([c.kernels_us for c in counts])
    messages = np.array([c.messages for c in counts])
    main_us = np.array([row.median_us for row in cpu])
    errors = []
    for i in range(len(cpu)):
        others = np.arange(len(cpu)) != i
        costs = _fit(ops[others], (main_us - kernels_us)[others], layer_op_us)
        errors.append((ops[i] @ costs + kernels_us[i]) / main_us[i] - 1.0)
    op_us, layer_op_us, iteration_us = _fit(ops, main_us - kernels_us, layer_op_us)
    # other pipelines hide some of it
    seen = [row.point.params["pipeline"] == "base" and key_of(row.point) in wholes for row in cpu]
    whole_us = np.array([wholes.get(key_of(row.point), 0.0) for row in cpu])
    latencies = _latencies(messages[seen], (whole_us - main_us)[seen])
    return HostCosts(
        op_us=float(op_us),
        layer_op_us=float(layer_op_us),
        iteration_us=float(iteration_us),
        latency_us=latencies,
        held_out=HeldOut(np.array(errors), len(cpu) - 1),
    )


def _fit(ops: Array, times_us: Array, layer_op_us: float | None) -> Array:
    """Cost of each kind of op, and of the iteration, ``[3]``."""
    if layer_op_us is None:
        return non_negative(ops, np.maximum(times_us, 1.0))
    rest = np.maximum(times_us - layer_op_us * ops[:, 1], 1.0)
    op_us, iteration_us = non_negative(ops[:, [0, 2]], rest)
    return np.array([op_us, layer_op_us, iteration_us])


def _latencies(messages: Array, beyond_us: Array) -> dict[str, float] | None:
    """Of each collective; None where rows are few or lack one of them."""
    if len(messages) < FEWEST_WALLS or not messages.any(axis=0).all():
        return None
    found = non_negative(messages, np.maximum(beyond_us, 1.0))
    return {op: float(us) for alike, us in zip(LATENCIES, found, strict=True) for op in alike}


@dataclass(frozen=True)
class _Counts:
    """Ops of TorchRec's stages and of dense layers, iterations, messages of each of `LATENCIES`,
    and the rest of one row."""

    ops: tuple[float, float, float]
    messages: tuple[float, ...]
    kernels_us: float


def _counts(params: dict[str, Any], profile: HardwareProfile) -> _Counts:
    nothing = dict.fromkeys(("op_us", "layer_op_us", "iteration_us", "collective_us"), 0.0)
    embedding = profile.embedding
    if isinstance(embedding, CpuEmbedding):
        # a table with next to no ids is not what its constant was fitted on
        embedding = embedding.model_copy(update={"forward_table_us": 0.0, "backward_table_us": 0.0})
    bare = profile.overheads.model_copy(update={**nothing, "step_us": {}})
    profile = profile.model_copy(update={"overheads": bare, "embedding": embedding})
    host = []
    for name in ("op_us", "layer_op_us", "iteration_us"):
        one = bare.model_copy(update={name: 1.0})
        host.append(_spent(params, profile.model_copy(update={"overheads": one})))
    messages = tuple(_spent(params, _only_latency(profile, ops)).messages_us for ops in LATENCIES)
    return _Counts(
        (host[0].host_us, host[1].host_us, host[2].host_us), messages, host[0].kernels_us
    )


def _only_latency(profile: HardwareProfile, ops: Sequence[Op]) -> HardwareProfile:
    """Every message of these collectives takes a microsecond, all others nothing."""

    def curve(op: Op) -> Curve:
        return Curve(latency_us=float(op in ops), edge_mib=(0.0,), us_per_mib=(1e-9,))

    links = profile.collectives
    only = {name: curve(name) for name in OPS}
    wires = {name: getattr(links, name).model_copy(update=only) for name in ("intra", "inter")}
    return profile.model_copy(update={"collectives": links.model_copy(update=wires)})


@dataclass(frozen=True)
class _Spent:
    """Time of the busiest rank: host, kernels, collectives."""

    host_us: float
    kernels_us: float
    messages_us: float


def _spent(params: dict[str, Any], profile: HardwareProfile) -> _Spent:
    batch, candidate = batch_of(*near_empty(params), profile)
    graph = batch.graph(batch.totals(candidate)[None])
    there = [op for op in graph.ops if op.active is None or op.active.all()]
    spent = {True: 0.0, False: 0.0}
    for op in there:
        spent[op.resource == "collectives"] += float(np.max(op.cost_ms))
    host = sum(op.host_ms for op in there)
    return _Spent(*(ms / units.us(1.0) for ms in (host, spent[False], spent[True])))
