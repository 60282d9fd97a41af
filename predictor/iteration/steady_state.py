"""The period of a repeated iteration for many plans at once: a compiled `timeline.simulate`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from predictor.iteration.graph import Graph, Op
from predictor.iteration.max_plus import Cost, steady
from predictor.iteration.timeline import MAX_ITERATIONS, PERIOD_TOLERANCE

Array = NDArray[np.float64]


class CompiledTimeline:
    """Repeats the iterations of graphs that have the same structure.

    Args:
        graph: one of them, without operations that only some ranks have. A cost given as a single
            number must be the same in all graphs that the program runs.
        whole: all plans have all operations.
    """

    def __init__(self, graph: Graph, *, whole: bool) -> None:
        for op in graph.ops:
            if op.ranks is not None or op.fills or isinstance(op.scope, tuple):
                raise ValueError(f"operation '{op.name}' is not the same on all ranks")
        trace = steady(graph, whole)
        self.world_size, self.width = graph.world_size, graph.intra_group_size
        self.alike = [trace.alike[v] for v in trace.inputs.values()]
        last = trace.finish()
        self.instructions = trace.instructions
        self.costs = [i.cost for i in trace.instructions if i.cost is not None]
        self.inputs, self.outputs = [*trace.inputs.values()], [*last.values()]
        self.size = len(trace.alike)
        # state that advances together by construction is compared once
        paced = dict.fromkeys(v for s, v in last.items() if s[0] != "end")
        self.paced = [self.outputs.index(v) for v in paced]

    def iteration_ms(self, graph: Graph, plans: int) -> Array:
        """Predicted iteration time in ms, ``[plans]``; as `timeline.simulate`."""
        costs = {cost: _cost(cost[0], graph.ops[cost[1]]) for cost in self.costs}
        state = [np.zeros((1 if alike else self.world_size, 1)) for alike in self.alike]
        past = [[state[i] for i in self.paced]]
        advances: list[list[Array]] = []
        settled = np.full(plans, np.nan)
        for iteration in range(MAX_ITERATIONS):
            state = self._iterate(state, costs)
            past.append([state[i] for i in self.paced])
            advances.append(_advances(past[-2], past[-1]))
            if iteration > 1:
                period = _most(advances[-1])
                off = _most([np.abs(d) for d in _advances(advances[-2], advances[-1])])
                now = np.where(off <= PERIOD_TOLERANCE * period, period, np.nan)
                settled = np.where(np.isnan(settled), now, settled)
                if not np.isnan(settled).any():
                    return settled
        half = len(past) // 2
        mean = _most(_advances(past[half], past[-1])) / (len(past) - 1 - half)
        return np.where(np.isnan(settled), mean, settled)

    def _iterate(self, state: list[Array], costs: Mapping[Cost, Array]) -> list[Array]:
        values: list[Array] = [_NONE] * self.size
        for variable, given in zip(self.inputs, state, strict=True):
            values[variable] = given
        for variable, terms, scope, cost in self.instructions:
            (first, offset), *others = terms
            value = values[first] + offset if offset else values[first]
            for other, offset in others:
                value = np.maximum(value, values[other] + offset if offset else values[other])
            if scope is not None:
                value = self._last(value, scope)
            values[variable] = value if cost is None else value + costs[cost]
        return [values[variable] for variable in self.outputs]

    def _last(self, arrival: Array, scope: str) -> Array:
        """Last arrivals ``[ranks or 1, plans]`` of arrivals ``[ranks, plans]``."""
        if scope == "world":
            return np.asarray(arrival.max(axis=0, keepdims=True))
        grouped = arrival.reshape(-1, self.width, arrival.shape[-1])
        last = grouped.max(axis=1 if scope == "intra" else 0, keepdims=True)
        return np.broadcast_to(last, grouped.shape).reshape(arrival.shape)


_NONE = np.zeros((1, 1))


def _cost(kind: str, op: Op) -> Array:
    """A cost ``[ranks or 1, plans or 1]`` in ms."""
    if kind == "cost" or op.active is None:
        return np.atleast_2d(op.cost_ms).T
    if kind == "issue":
        return np.where(op.active, op.host_ms, 0.0)[None]
    if kind == "launch":
        return np.where(op.active, 0.0, -np.inf)[None]
    return np.where(op.active, np.atleast_2d(op.cost_ms).T, -np.inf)


def _advances(before: list[Array], after: list[Array]) -> list[Array]:
    return [b - a for a, b in zip(before, after, strict=True)]


def _most(found: list[Array]) -> Array:
    """The largest over all arrays ``[ranks or 1, plans or 1]``, by plan."""
    most: Array = found[0].max(axis=0)
    for other in found[1:]:
        most = np.maximum(most, other.max(axis=0))
    return most
