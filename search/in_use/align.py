"""Renaming of a plan's ranks such that more of the plan in use stays.

A plan is as fast as the same plan with its ranks renamed, if hosts and NVLink domains are kept
together. Of all such renamings, the one that keeps most bytes is a matching at every level: ranks
within a domain, domains within a host, hosts. What depends on rank names (row splits of ids in
frequency order, memory caps, constraints on ranks) is checked afterwards.

Why: docs/decisions/0031-plan-in-use.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from ortools.graph.python import linear_sum_assignment

from predictor.model.topology import Topology
from search.candidate import Candidate
from search.in_use.moves import keep_shards_in_place
from search.objective import Assignment, Objective
from search.space.option import Choice

SAME = 1e-9
"""Relative difference below which two times count as equal."""


def rename_ranks(objective: Objective, candidate: Candidate) -> Candidate:
    """Rename the plan's ranks to move the fewest tables; the result is never slower."""
    in_use, topology = objective.space.in_use, objective.problem.topology
    if in_use is None:
        return candidate
    assignment = keep_shards_in_place(in_use, candidate.assignment)
    candidate = replace(candidate, assignment=assignment)
    names = _best_names(_overlaps(objective, assignment), topology)
    renamed = keep_shards_in_place(
        in_use, tuple(_renamed(objective, choice, names) for choice in assignment)
    )
    legal = all(option.is_legal(ranks, topology) for option, ranks in renamed)
    fewer = len(in_use.moved(renamed)) < len(in_use.moved(assignment))
    if not (fewer and legal and objective.fits(renamed)):
        return candidate
    ms = float(objective.score([renamed])[0])
    if ms > candidate.iteration_ms * (1 + SAME):
        return candidate
    return replace(candidate, assignment=renamed, iteration_ms=ms)


def _renamed(objective: Objective, choice: Choice, names: Sequence[int]) -> Choice:
    """Rename the ranks of a table's shards; runs over a group keep its order."""
    option, ranks = choice
    units = objective.legal(option).units
    if all(len(alternatives) == 1 for alternatives in units):
        return choice
    renamed: list[int] = []
    for alternatives in units:
        run = ranks[len(renamed) : len(renamed) + len(alternatives[0])]
        renamed += sorted(names[rank] for rank in run)
    return option, tuple(renamed)


def _overlaps(objective: Objective, assignment: Assignment) -> NDArray[np.int64]:
    """Return the overlap of both plans, ``[rank of the new plan, rank of the plan in use]``.

    A shard that is alike in both plans counts by its share of the table, in millionths.
    """
    world, in_use = objective.problem.topology.world_size, objective.space.in_use
    overlaps = np.zeros((world, world))
    assert in_use is not None
    for (option, ranks), before in zip(assignment, in_use.choices, strict=True):
        if before is None or before[0] is not option or len(objective.legal(option).units[0]) == 1:
            continue
        share = 1 / option.num_shards
        for new, size in zip(ranks, option.sizes, strict=True):
            for old, old_size in zip(before[1], option.sizes, strict=True):
                overlaps[new, old] += share if size == old_size else 0.0
    return np.rint(overlaps * 1e6).astype(np.int64)


def _best_names(overlaps: NDArray[np.int64], topology: Topology) -> Sequence[int]:
    """Return the new name of every rank."""
    sizes = {topology.nvlink_domain, topology.local_world_size, topology.intra_group_size}
    levels = [1, *sorted(sizes - {1, topology.world_size}), topology.world_size]
    values: NDArray[np.int64] = overlaps
    names: list[list[list[int]]] = [
        [[old] for old in range(len(overlaps))] for _ in range(len(overlaps))
    ]
    for small, large in pairwise(levels):
        values, names = _joined(values, names, large // small)
    return names[0][0]


def _joined(
    values: NDArray[np.int64], names: list[list[list[int]]], parts: int
) -> tuple[NDArray[np.int64], list[list[list[int]]]]:
    """Join blocks of ``parts`` smaller blocks: the best value and names for every pair of a new
    block and one of the plan in use."""
    count = len(values) // parts
    best_values = np.zeros((count, count), dtype=np.int64)
    best_names: list[list[list[int]]] = []
    for new in range(count):
        best_names.append([])
        for old in range(count):
            rows = slice(new * parts, (new + 1) * parts)
            columns = slice(old * parts, (old + 1) * parts)
            block = values[rows, columns]
            match = _match(block)
            best_values[new, old] = block[np.arange(parts), match].sum()
            best_names[-1].append(
                [n for i, j in enumerate(match) for n in names[rows.start + i][columns.start + j]]
            )
    return best_values, best_names


def _match(values: NDArray[np.int64]) -> list[int]:
    """Return the column of every row that makes the sum of values largest."""
    size = len(values)
    if not values.any():
        return list(range(size))
    solver = linear_sum_assignment.SimpleLinearSumAssignment()
    rows, columns = np.divmod(np.arange(size * size), size)
    solver.add_arcs_with_cost(rows, columns, (values.max() - values).ravel())
    solver.solve()
    return [solver.right_mate(row) for row in range(size)]
