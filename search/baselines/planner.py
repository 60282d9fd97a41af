"""What a rival planner is, and its best plan under a judge.

A rival proposes plans by its own rule and its own cost. Whoever compares takes the best by the
judge of all it proposes: no rival is held to a cost model that is not the judge's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from search.baselines.torchrec_objective import TorchRecObjective
from search.objective import Assignment, Objective
from search.problem import Problem
from search.space.build import reduced_space
from search.space.enumerate import enumerate_space
from search.space.filters import deduplicate, drop_uvm, prune
from search.space.option import Option, Space
from search.stop import Stop
from search.surrogate import Surrogate

BATCH = 32
"""Plans that are judged together."""


class Field:
    """What a rival may know: the problem's options, their memory, and costs of shards.

    Args:
        judge: whose count of memory holds; shardopt's if None.
    """

    def __init__(self, problem: Problem, judge: TorchRecObjective | None = None) -> None:
        self.problem = problem
        space = reduced_space(problem) if judge is None else _counted(problem, judge)
        self.objective = Objective(problem, space)
        self.surrogate = Surrogate(self.objective)

    @property
    def options(self) -> Sequence[Sequence[Option]]:
        """Options of every table."""
        return self.objective.space.options


def _counted(problem: Problem, judge: TorchRecObjective) -> Space:
    workload, topology = problem.workload, problem.topology
    space = judge.counted(enumerate_space(workload, topology, problem.hardware.device))
    return drop_uvm(prune(deduplicate(space, topology), topology), topology)


class Rival(Protocol):
    """A planner."""

    name: str

    def propose(self, field: Field, seed: int, stop: Stop) -> Iterator[Assignment]:
        """Plans worth judging, which need not fit; ends by itself or once ``stop`` is reached."""
        ...


def compete(
    rival: Rival,
    field: Field,
    judged: Callable[[Sequence[Assignment]], Sequence[float]],
    seed: int,
    stop: Stop,
) -> float | None:
    """Let a rival plan; the least that its plans which fit are worth, None if none fits.

    Args:
        judged: what plans are worth, in ms.
    """
    best: float | None = None
    proposals = rival.propose(field, seed, stop)
    while batch := list(islice(proposals, BATCH)):
        fitting = [plan for plan in batch if field.objective.fits(plan)]
        if fitting:
            least = float(min(judged(fitting)))
            best = least if best is None else min(best, least)
    return best
