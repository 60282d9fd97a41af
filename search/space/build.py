"""The options of a problem: all that may be used, and those worth trying first."""

from __future__ import annotations

from collections.abc import Callable

from search.problem import Problem
from search.space.enumerate import enumerate_space
from search.space.filters import deduplicate, drop_unsound, drop_uvm, prune
from search.space.option import Space


def whole_space(problem: Problem, check: Callable[[], None] = lambda: None) -> Space:
    """Every option that is legal, fits, and is computed right by TorchRec.

    Args:
        check: called before every table; raises where it takes too long.

    Raises:
        InfeasibleError: a table has no option left.
    """
    device = problem.hardware.device
    space = enumerate_space(problem.workload, problem.topology, device, check=check)
    check()
    space = drop_unsound(space, problem.workload, device)
    return prune(deduplicate(space, problem.topology), problem.topology)


def reduced_space(problem: Problem) -> Space:
    """The options worth trying: no host memory where device memory is ample."""
    return drop_uvm(whole_space(problem), problem.topology)
