"""What would help most: the same iteration with one thing better, simulated again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from predictor.graph import Graph, Op
from predictor.predict import Prediction
from predictor.timeline import simulate
from shardopt.report.words import phase_words

SPEED_UP = 2.0
MIN_SAVING = 1e-3
"""Savings below this share of the iteration are not worth a line."""


@dataclass(frozen=True)
class WhatIf:
    """A change and the iteration time under it."""

    change: str
    iteration_ms: float
    saving_ms: float


def what_if(prediction: Prediction) -> list[WhatIf]:
    """Changes that shorten the iteration, the most helpful first.

    Each phase twice as fast; work spread evenly over the ranks; no host overhead. Effects do not
    add up: once one thing is faster, another chain of work sets the time.
    """
    graph = prediction.graph
    changes: dict[str, Callable[[Op], Op]] = {
        f"{phase_words(phase)} {SPEED_UP:g}x as fast": _faster(phase)
        for phase in dict.fromkeys(op.phase for op in graph.ops)
    }
    if graph.world_size > 1:
        changes["the same work spread evenly over the ranks"] = _even
    found = [_try(name, prediction, _changed(graph, change)) for name, change in changes.items()]
    free_host = replace(_changed(graph, _no_host), launch_latency_ms=0.0)
    found.append(_try("no host overhead (such as CUDA graphs)", prediction, free_host))
    worth = [w for w in found if w.saving_ms > MIN_SAVING * prediction.iteration_ms]
    return sorted(worth, key=lambda w: (-w.saving_ms, w.change))


def _try(change: str, prediction: Prediction, graph: Graph) -> WhatIf:
    after = float(simulate(graph).iteration_ms[0])
    return WhatIf(change, after, prediction.iteration_ms - after)


def _changed(graph: Graph, change: Callable[[Op], Op]) -> Graph:
    return replace(graph, ops=[change(op) for op in graph.ops])


def _faster(phase: str) -> Callable[[Op], Op]:
    def change(op: Op) -> Op:
        return replace(op, cost_ms=op.cost_ms / SPEED_UP) if op.phase == phase else op

    return change


def _even(op: Op) -> Op:
    mean = op.cost_ms.mean(axis=-1, keepdims=True)
    return replace(op, cost_ms=np.broadcast_to(mean, op.cost_ms.shape))


def _no_host(op: Op) -> Op:
    return replace(op, host_ms=0.0)
