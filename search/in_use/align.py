"""Renames the ranks of a plan such that more of a given plan stays where it is.

A plan is as fast as the same plan with its ranks renamed, if hosts and NVLink domains are kept
together. Of all such renamings, the one that keeps most bytes is a matching at every level: ranks
within a domain, domains within a host, hosts. What depends on rank names (row splits of ids in
frequency order, memory caps, constraints on ranks) is checked afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from ortools.graph.python import linear_sum_assignment

from predictor.model.topology import Topology
from search.in_use.moves import settled
from search.objective import Assignment, Choice, Objective

SAME = 1e-9
"""Relative difference of times that is none."""


def closest(
    objective: Objective, assignment: Assignment, iteration_ms: float
) -> tuple[Assignment, float]:
    """The plan under the names that move fewest tables, and its time; never slower.

    Args:
        iteration_ms: of ``assignment``.
    """
    given, topology = objective.space.given, objective.problem.topology
    if given is None:
        return assignment, iteration_ms
    assignment = settled(given, assignment)
    names = _best_names(_overlaps(objective, assignment), topology)
    renamed = settled(given, tuple(_renamed(objective, choice, names) for choice in assignment))
    legal = all(option.is_legal(ranks, topology) for option, ranks in renamed)
    fewer = len(given.moved(renamed)) < len(given.moved(assignment))
    if not (fewer and legal and objective.fits(renamed)):
        return assignment, iteration_ms
    ms = float(objective.score([renamed])[0])
    return (renamed, ms) if ms <= iteration_ms * (1 + SAME) else (assignment, iteration_ms)


def _renamed(objective: Objective, choice: Choice, names: Sequence[int]) -> Choice:
    """A table's shards on the new names of their ranks; runs over a group keep its order."""
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
    """Tables that both plans have alike on a rank, by rank of the new and of the given plan; those
    counted by their share of the table."""
    world, given = objective.problem.topology.world_size, objective.space.given
    found = np.zeros((world, world))
    assert given is not None
    for (option, ranks), before in zip(assignment, given.choices, strict=True):
        if before is None or before[0] is not option or len(objective.legal(option).units[0]) == 1:
            continue
        share = 1 / option.num_shards
        for new, size in zip(ranks, option.sizes, strict=True):
            for old, old_size in zip(before[1], option.sizes, strict=True):
                found[new, old] += share if size == old_size else 0.0
    return np.rint(found * 1e6).astype(np.int64)


def _best_names(overlaps: NDArray[np.int64], topology: Topology) -> Sequence[int]:
    """The new name of every rank."""
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
    """Best names of blocks of ``parts`` smaller blocks, for every pair of a new and a given one."""
    count = len(values) // parts
    joined = np.zeros((count, count), dtype=np.int64)
    found: list[list[list[int]]] = []
    for new in range(count):
        found.append([])
        for old in range(count):
            rows = slice(new * parts, (new + 1) * parts)
            columns = slice(old * parts, (old + 1) * parts)
            block = values[rows, columns]
            match = _match(block)
            joined[new, old] = block[np.arange(parts), match].sum()
            found[-1].append(
                [n for i, j in enumerate(match) for n in names[rows.start + i][columns.start + j]]
            )
    return joined, found


def _match(values: NDArray[np.int64]) -> list[int]:
    """The column of every row that makes the sum of values largest."""
    size = len(values)
    if not values.any():
        return list(range(size))
    solver = linear_sum_assignment.SimpleLinearSumAssignment()
    rows, columns = np.divmod(np.arange(size * size), size)
    solver.add_arcs_with_cost(rows, columns, (values.max() - values).ravel())
    solver.solve()
    return [solver.right_mate(row) for row in range(size)]
