"""Errors of the costs put on a graph: what its operations are multiplied by."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from predictor.cost.errors import HOST, CostErrors
from predictor.iteration.graph import Graph, Op
from predictor.model.topology import Topology

SPLITS = "splits all-to-all"
"""Exchanges announce their ids together or one by one; the collective has one error."""


def costs_nothing(op: Op) -> bool:
    """It has no time to be multiplied."""
    return op.cost_ms.size == 1 and not op.cost_ms.any()


def error_of(op: Op, errors: CostErrors, topology: Topology) -> NDArray[np.float64]:
    """What an operation's execution time is multiplied by, ``[draws]``.

    Collectives of all ranks have the error of the slowest link that ranks span.
    """
    name = SPLITS if op.name.endswith(SPLITS) else op.name
    within = topology.groups == 1 or op.scope == "intra"
    return errors.op(op.resource, name, f"collectives.{'intra' if within else 'inter'}")


def draw_graph(graph: Graph, errors: CostErrors, topology: Topology) -> Graph:
    """The graph under one draw of the errors; the host's times have that of the host."""
    host = float(errors.shared(HOST)[0])
    ops = [
        replace(
            op,
            cost_ms=op.cost_ms
            if costs_nothing(op)
            else op.cost_ms * float(error_of(op, errors, topology)[0]),
            host_ms=op.host_ms * host,
        )
        for op in graph.ops
    ]
    return replace(graph, ops=ops, launch_latency_ms=graph.launch_latency_ms * host)
