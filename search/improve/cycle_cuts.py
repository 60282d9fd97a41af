"""Critical cycle of a plan as a cut: a sum of maxima over ranks that holds for nearby plans too.

The critical cycle of a plan's timeline runs along one rank until a collective, where it may pass
to the last rank that arrives. So the period is at least a constant, plus the work of the slowest
rank in every segment between two collectives, plus the collectives at their busiest ranks. For the
plan itself this equals its period (`predictor.iteration.steady_state`); for other plans with the
same exchanges it is a low estimate, exact where costs are linear in the loads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from predictor.cost.loads import COLUMNS, LONGEST, Load
from predictor.iteration.graph import Graph
from predictor.iteration.steady_state import CompiledTimeline
from search.model.cycle_cut import CycleCut
from search.objective import Assignment, Objective
from search.surrogate import Surrogate

Array = NDArray[np.float64]

STEP = 1e-3
"""Step of a finite difference, as a fraction of the mean rank's load."""
PROBED = [c for c in range(LONGEST.start) if c not in (Load.SHARDS, Load.ROWS)]
"""Load columns in which costs rise continuously."""


def critical_cut(surrogate: Surrogate, assignment: Assignment) -> CycleCut | None:
    """Return the cut that is tight at a plan; None if only the host sets its pace."""
    return judge(surrogate, assignment)[1]


def time_of(surrogate: Surrogate, assignment: Assignment) -> float:
    """Return the time of a plan in ms."""
    return _run(surrogate, surrogate.totals(assignment))[0]


def _run(surrogate: Surrogate, totals: Array) -> tuple[float, Graph, CompiledTimeline]:
    """Return the time in ms, the graph and its timeline of loads ``[groups, ranks, COLUMNS]``."""
    surrogate.objective.evaluations += 1
    graph, program = surrogate.objective.scorer.compile(totals)
    return float(program.iteration_ms(graph, 1)[0]), graph, program


def judge(surrogate: Surrogate, assignment: Assignment) -> tuple[float, CycleCut | None]:
    """Return the time of a plan in ms and its `critical_cut`."""
    totals = surrogate.totals(assignment)
    ms, graph, program = _run(surrogate, totals)
    ops, length, iterations = program.critical_cycle(
        [np.atleast_2d(o.cost_ms).T for o in graph.ops]
    )
    if not ops:
        return ms, None
    used = np.flatnonzero(totals[..., Load.SHARDS].any(axis=1))
    slopes, launches, at = _probed(surrogate.objective, totals, used)
    shape = (len(totals), COLUMNS)
    even = np.zeros(shape)
    segments, floors = [], []
    for run in _runs(graph, ops):
        segment, floor = np.zeros(shape), np.zeros(shape[0])
        for op in run:
            per_rank = graph.ops[op].cost_ms.shape[-1] > 1 or _is_collective(graph, op)
            target = segment if per_rank else even
            np.add.at(target, at, slopes[:, op] / iterations)
            floor[used] += launches[:, op] / iterations
        if segment.any():
            segments.append(segment)
            floors.append(floor)
    many = np.array(segments).reshape(-1, *shape)
    launching = np.array(floors).reshape(many.shape[:2])
    times = np.einsum("sgc,grc->sr", many, totals) + launching @ (totals[..., Load.SHARDS] > 0)
    constant = length / iterations - float(times.max(axis=1).sum())
    constant -= float((even * totals.mean(axis=1)).sum())
    return ms, CycleCut(constant, even, many, launching, frozenset(used.tolist()))


def _runs(graph: Graph, ops: Sequence[int]) -> list[list[int]]:
    """Split a cycle's operations at its collectives, each of which is a run of its own."""
    runs: list[list[int]] = [[]]
    for op in ops:
        if _is_collective(graph, op):
            runs += [[op], []]
        else:
            runs[-1].append(op)
    if len(runs) > 1:  # the cycle is closed
        runs[0] = runs.pop() + runs[0]
    return runs


def _is_collective(graph: Graph, op: int) -> bool:
    return graph.ops[op].resource == "collectives"


def _probed(
    objective: Objective, totals: Array, used: NDArray[np.intp]
) -> tuple[Array, Array, tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Differentiate the costs of operations by the loads.

    Returns:
        Cost of each operation per unit of load, mean over the ranks that have any,
        ``[probes, ops]``; launch floor of each operation: the cost it loses on a rank without a
        group, less the cost of that group's loads, where ranks differ, ``[used, ops]``; group and
        column of each probe.
    """
    sizes = totals.mean(axis=1)
    pairs = [(g, c) for g in used.tolist() for c in PROBED if sizes[g, c] > 0]
    steps = np.array([STEP * sizes[pair] for pair in pairs])
    probes = np.repeat(totals[None], 1 + len(pairs) + len(used), axis=0)
    there = totals[..., Load.SHARDS] > 0
    for i, (group, column) in enumerate(pairs, 1):
        probes[i, group, there[group], column] += steps[i - 1]
    rid = totals[used, :, Load.SHARDS].argmax(axis=1)
    last = 1 + len(pairs)
    probes[last + np.arange(len(used)), used, rid] = 0.0
    graph = objective.scorer.graph(probes)
    slopes = np.empty((len(pairs), len(graph.ops)))
    floors = np.zeros((len(used), len(graph.ops)))
    groups, columns = np.array(pairs, dtype=np.intp).reshape(-1, 2).T
    share = np.maximum(there[groups].mean(axis=1), 1e-9)
    here = [groups == group for group in used.tolist()]
    loads = [totals[groups[m], rank, columns[m]] for m, rank in zip(here, rid, strict=True)]
    for op, operation in enumerate(graph.ops):
        costs = np.broadcast_to(operation.cost_ms, (len(probes), operation.cost_ms.shape[-1]))
        slopes[:, op] = (costs[1:last] - costs[0]).sum(axis=1) / steps / costs.shape[1]
        if costs.shape[1] > 1:
            slopes[:, op] /= share
        if costs.shape[1] > 1 and not _is_collective(graph, op):
            for row, (mine, load, rank) in enumerate(zip(here, loads, rid, strict=True)):
                less = costs[0, rank] - costs[last + row, rank]
                floors[row, op] = max(0.0, less - float(slopes[mine, op] @ load))
    return slopes, floors, (groups, columns)
