"""What limits the speed of a plan, as a sum of maxima over ranks that nearby plans share.

The critical cycle of a plan's timeline runs along one rank until a collective, where it may pass
to the last rank that arrives. So the period is at least a constant, plus the work of the slowest
rank in every segment between two collectives, plus the collectives at their busiest ranks. At the
plan itself that is its period (`predictor.iteration.critical_path`); of other plans that use the
same exchanges it is a lower estimate, exact where costs are linear in the loads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from predictor.cost.loads import COLUMNS, LONGEST, Load
from predictor.iteration.critical_path import critical_cycle
from predictor.iteration.graph import Graph
from predictor.iteration.timeline import simulate
from search.model.cut_model import CycleCut
from search.objective import Assignment, Objective

Array = NDArray[np.float64]

STEP = 1e-3
"""Of the mean rank's load, by which loads change to see what that costs."""
PROBED = [c for c in range(LONGEST.start) if c not in (Load.SHARDS, Load.ROWS)]
"""Columns that costs rise with steadily."""


def critical_cut(objective: Objective, assignment: Assignment) -> CycleCut | None:
    """The cut that is tight at a plan; None if nothing but the host sets its pace."""
    scorer = objective.scorer
    totals = scorer.totals(objective.table_plans(assignment))
    graph = scorer.graph(totals[None])
    found = critical_cycle(graph, simulate(graph, keep_steps=True))
    if found is None or not found[0]:
        return None
    ops, length, iterations = found
    used = np.flatnonzero(totals[..., Load.SHARDS].any(axis=1))
    slopes, at = _slopes(objective, totals, used)
    shape = (len(scorer.groups), COLUMNS)
    even = np.zeros(shape)
    segments = []
    for run in _runs(graph, ops):
        segment = np.zeros(shape)
        for op in run:
            per_rank = graph.ops[op].cost_ms.shape[-1] > 1 or _is_collective(graph, op)
            target = segment if per_rank else even
            np.add.at(target, at, slopes[:, op] / iterations)
        if segment.any():
            segments.append(segment)
    many = np.array(segments).reshape(-1, *shape)
    times = np.einsum("sgc,grc->sr", many, totals)
    constant = length / iterations - float(times.max(axis=1).sum())
    constant -= float((even * totals.mean(axis=1)).sum())
    floors = np.zeros(many.shape[:2])  # the constant has those of groups that the plan launches
    return CycleCut(constant, even, many, floors, frozenset(used.tolist()))


def _runs(graph: Graph, ops: Sequence[int]) -> list[list[int]]:
    """The cycle's operations parted at its collectives, which stand alone."""
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


def _slopes(
    objective: Objective, totals: Array, used: NDArray[np.intp]
) -> tuple[Array, tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """What every operation takes more of per unit of load on every rank, mean over the ranks that
    have any, ``[probes, ops]``, and which group and column each probe raises."""
    sizes = totals.mean(axis=1)
    pairs = [(g, c) for g in used.tolist() for c in PROBED if sizes[g, c] > 0]
    steps = np.array([STEP * sizes[pair] for pair in pairs])
    probes = np.repeat(totals[None], 1 + len(pairs), axis=0)
    there = totals[..., Load.SHARDS] > 0
    for i, (group, column) in enumerate(pairs):
        probes[1 + i, group, there[group], column] += steps[i]
    costs = [op.cost_ms for op in objective.scorer.graph(probes).ops]
    slopes = np.empty((len(pairs), len(costs)))
    for op, cost in enumerate(costs):
        found = np.broadcast_to(cost, (len(probes), cost.shape[-1]))
        slopes[:, op] = (found[1:] - found[0]).sum(axis=1) / steps / cost.shape[-1]
        if cost.shape[-1] > 1:
            slopes[:, op] /= np.maximum(there[[g for g, _ in pairs]].mean(axis=1), 1e-9)
    groups, columns = np.array(pairs, dtype=np.intp).reshape(-1, 2).T
    return slopes, (groups, columns)
