"""Packs shards under the critical cycle: tables change options and ranks, shards move and swap.

Plans near the current one are compared by the cuts of `search.improve.cycle_cuts`: each is a sum of
maxima over ranks. After every round the plan is scored on the full timeline, and its own critical
cycle joins the cuts, until that no longer helps.

Why: docs/decisions/0028-plans-from-the-bound.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from search.improve.cycle_cuts import critical_cut
from search.improve.placed_plan import GAIN, Columns, PlacedPlan
from search.improve.shard_moves import Array
from search.model.cut_model import CycleCut
from search.objective import Assignment, Objective
from search.space.option import Option
from search.surrogate import Surrogate

SQUARES = (5, 6, 7)
"""Of the loads: the 32nd, 64th and 128th power, whose roots are the norms."""
ROUNDS = 4
"""Rounds that share the budget, at least: each new cut is worth more than a longer descent."""
PATIENCE = 3
"""Rounds in a row that do not help before packing ends."""


class Packer:
    """Packs plans of one problem."""

    def __init__(self, objective: Objective, surrogate: Surrogate) -> None:
        self.objective = objective
        self.surrogate = surrogate
        for option in objective.space.every_option:  # cuts are over all lookup groups
            surrogate.shard_loads(option)
        tied = {table for group in objective.space.co_locate for table in group}
        limited = objective.space.in_use is not None and objective.space.in_use.is_limited
        self.staying = set(range(len(objective.space.options))) if limited else tied

    def pack(
        self,
        start: Assignment,
        steps: int,
        stop: Callable[[float], bool] = lambda best: False,
    ) -> tuple[Assignment, float]:
        """The best plan found and its predicted time in ms.

        Args:
            start: fits, and so does the result.
            steps: budget of joint changes.
            stop: asked after every round with the best time so far.
        """
        best, best_ms = start, float(self.objective.score([start])[0])
        space = self.objective.space.beside([option for option, _ in start])
        within = self.objective.beside(start).over(space)
        each = -(-steps // ROUNDS)
        cuts: list[CycleCut] = []
        current, failed = start, 0
        while steps > 0 and failed < PATIENCE and not stop(best_ms):
            cut = critical_cut(self.objective, current)
            if cut is None or not len(cut.segments):
                break
            cuts = [*(c for c in cuts if c.groups == cut.groups), cut]
            # the current plan may have lost an exchange of the best one, of which cuts say nothing
            used = {self.surrogate.shard_loads(option)[0] for option, _ in best}
            first = best if used <= cut.groups else current
            columns = self.columns(cuts)
            plan = PlacedPlan(within, columns, first, self.staying)
            plan.lower(min(steps, each), SQUARES, partial(stop, best_ms))
            steps -= plan.steps + 1
            current = plan.assignment
            ms = float(self.objective.score([current])[0])
            if not self.objective.fits(current):
                within, current, ms = within.beside(current), best, math.inf
            failed = 0 if ms < best_ms * (1 - GAIN) else failed + 1
            # what tables of unlike width add by sharing a cache is not among the bytes of shards
            if ms < best_ms and self.objective.fits(current):
                best, best_ms = current, ms
        return best, best_ms

    def columns(self, cuts: Sequence[CycleCut]) -> Columns:
        """The segments of cuts; those that several cuts share are one column."""
        slopes: list[Array] = []
        member = np.zeros((len(cuts), sum(len(c.segments) for c in cuts)))
        for row, cut in enumerate(cuts):
            for segment in cut.segments:
                same = [i for i, s in enumerate(slopes) if np.allclose(s, segment, 1e-2, 0.0)]
                if not same:
                    slopes.append(segment)
                member[row, same[0] if same else len(slopes) - 1] += 1.0
        of_groups = np.array(slopes)
        even_of_groups = np.array([cut.even for cut in cuts])
        even_of_groups /= self.objective.problem.topology.world_size

        def work(option: Option) -> Array:
            group, loads = self.surrogate.shard_loads(option)
            return np.asarray(loads @ of_groups[:, group].T)

        def even(option: Option) -> Array:
            group, loads = self.surrogate.shard_loads(option)
            return np.asarray(even_of_groups[:, group] @ loads.sum(axis=0))

        def knows(option: Option) -> bool:
            return self.surrogate.shard_loads(option)[0] in cuts[-1].groups

        constants = np.array([cut.constant for cut in cuts])
        return Columns(work, even, member[:, : len(slopes)], constants, knows)
