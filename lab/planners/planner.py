"""A baseline planner, and the best of its plans under an objective.

A planner proposes plans by its own rule and its own cost. Its result is the best of all that it
proposes under the objective of the comparison, so none suffers from a different cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from lab.planners.torchrec_objective import TorchRecObjective
from search.objective import Assignment, Objective
from search.problem import Problem
from search.space.enumerate import enumerate_space, reduced_space
from search.space.filters import deduplicate, drop_uvm, prune
from search.space.option import Option, Space
from search.stop import Stop
from search.surrogate import Surrogate

SCORED_TOGETHER = 32


class PlannerInputs:
    """What a planner may know: the problem's options, their memory, and costs of shards.

    Args:
        torchrec: count memory as TorchRec does; as shardopt does if None.
    """

    def __init__(self, problem: Problem, torchrec: TorchRecObjective | None = None) -> None:
        self.problem = problem
        space = reduced_space(problem) if torchrec is None else _torchrec_space(problem, torchrec)
        self.objective = Objective(problem, space)
        self.surrogate = Surrogate(self.objective)

    @property
    def options(self) -> Sequence[Sequence[Option]]:
        """Options of every table."""
        return self.objective.space.options


def _torchrec_space(problem: Problem, torchrec: TorchRecObjective) -> Space:
    workload, topology = problem.workload, problem.topology
    space = enumerate_space(workload, topology, problem.hardware.device)
    space = torchrec.with_torchrec_memory(space)
    return drop_uvm(prune(deduplicate(space, topology), topology), topology)


class BaselinePlanner(Protocol):
    """Proposes plans by a rule of its own."""

    name: str

    def propose(self, inputs: PlannerInputs, seed: int, stop: Stop) -> Iterator[Assignment]:
        """Plans worth scoring, which need not fit; ends by itself or once ``stop`` is reached."""
        ...


def find_best_ms(
    planner: BaselinePlanner,
    inputs: PlannerInputs,
    score: Callable[[Sequence[Assignment]], Sequence[float]],
    seed: int,
    stop: Stop,
) -> float | None:
    """Run a planner; the lowest score of its plans that fit, None if none fits.

    Args:
        score: what plans cost, in ms.
    """
    best: float | None = None
    proposals = planner.propose(inputs, seed, stop)
    while proposed := list(islice(proposals, SCORED_TOGETHER)):
        fitting = [plan for plan in proposed if inputs.objective.fits(plan)]
        if fitting:
            least = float(min(score(fitting)))
            best = least if best is None else min(best, least)
    return best
