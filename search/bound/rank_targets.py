"""Targets that no placement of shards on ranks reaches: a bound for few tables on few ranks.

Cuts come where they are needed: a plan that the model thinks as fast as the target has a cycle of
its own, which is critical at its uneven loads. That cut is added, until there is no such plan.

Docs: docs/model.md, chapter 15. Why: docs/decisions/0076.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from predictor.cost.loads import LAUNCH, Load
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.topology import Topology
from search.bound.rank_cut import RankCut
from search.bound.rank_model import RankChoice, RankModel
from search.bound.relaxation import Relaxation
from search.reproducible import reproducible_solver, run
from search.space.option import Choice, place

Array = NDArray[np.float64]

LEAST_WORK = 0.1
"""Of an attempt: building the model takes time that CP-SAT does not count."""
UNEVEN = (0.1, 0.25, 0.5, 1.0, 2.0)
"""Multiples of what the busiest ranks of a plan have beyond the mean; there cycles are sought."""
RAISED = (0.0, 0.05, 0.2, 0.5)
"""Multiples of the mean that busy ranks are thought to have beyond it, for the first cuts."""
HIGHER = 1e-4
"""A cut that raises the time of a plan by less than this share is no new one."""


class RankTargets:
    """Refutes targets for the plans of one set of exchanges.

    Args:
        numbers: of the lookup groups of the set in the scorer, in the order of the slopes.
        relaxation: of the set; its hulls reach as far as the load of one rank can.
        mean: load where the first cuts are tight, ``[groups, COLUMNS]``.
    """

    def __init__(
        self,
        choices: Sequence[RankChoice],
        scorer: PlanScorer,
        numbers: Sequence[int],
        relaxation: Relaxation,
        topology: Topology,
        mean: Array,
    ) -> None:
        self.choices = choices
        self.scorer = scorer
        self.numbers = list(numbers)
        self.relaxation = relaxation
        self.topology = topology
        self.cuts: list[RankCut] = []
        for share in RAISED:
            cut = relaxation.evaluate(mean, share * mean, launched=share > 0)[1]
            if cut is not None:
                self._add(RankCut.of(cut))

    def refute(
        self, target_ms: float, bound_ms: float, work: float, seconds: Callable[[], float]
    ) -> tuple[bool, float]:
        """Whether it is proven that no plan is as fast as a target, and the deterministic time that
        took, about seconds on one core.

        Args:
            bound_ms: what the slacks of the choices are counted from.
            work: deterministic time that may be spent.
            seconds: wall time left.
        """
        left = work
        able = [c for c in self.choices if c.slack_ms <= target_ms - bound_ms]
        if {c.option.table for c in able} != {c.option.table for c in self.choices}:
            return True, LEAST_WORK
        while left > 0 and seconds() > 0:
            made = RankModel(able, self.cuts, self.topology, bound_ms, target_ms)
            solver = reproducible_solver(left, 0, seconds())
            status = run(solver, made.model)
            left -= max(LEAST_WORK, solver.response_proto.deterministic_time)
            if status == cp_model.INFEASIBLE:
                return True, work - left
            if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
                break
            if not self._learn(made.read(solver), target_ms):
                break
        return False, work - left

    def _add(self, cut: RankCut) -> None:
        """A new cut, unless it is known."""
        if not any(cut.is_like(one) for one in self.cuts):
            self.cuts.append(cut)

    def _learn(self, plan: Sequence[Choice], target_ms: float) -> bool:
        """Add the cut that a plan violates most; whether it is then above the target."""
        plans = [place(option, ranks) for option, ranks in plan]
        loads = self.scorer.totals(plans)[self.numbers]
        launched = loads[..., Load.SHARDS] > 0
        loads[..., LAUNCH] = 0.0
        mean = loads.mean(axis=1)
        more = loads.max(axis=1) - mean
        found = [self.relaxation.evaluate(mean, share * more, launched=True)[1] for share in UNEVEN]
        cuts = [RankCut.of(cut) for cut in found if cut is not None]
        times = [cut.at(loads, launched) for cut in cuts]
        known = max((cut.at(loads, launched) for cut in self.cuts), default=0.0)
        if not cuts or max(times) <= max(known * (1 + HIGHER), target_ms):
            return False
        self.cuts.append(cuts[int(np.argmax(times))])
        return True
