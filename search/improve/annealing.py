"""Simulated annealing of placed plans on cycle cuts, with the timeline as the judge.

Tables change options and ranks; shards and blocks of a host move and swap. A maximum over ranks is
flat almost everywhere: it ignores a change that leaves the slowest rank as it is. So norms over the
ranks replace maxima, with an order that rises from round to round. After every round the plan is
scored on the full timeline, and its critical cycle joins the cuts; the next round continues from
the last plan, not from the best one (annealing: Kirkpatrick et al. 1983).

Excess memory is penalised, little at first, so annealing may pass through plans that do not fit;
only plans that fit are kept.

Why: docs/decisions/0028-plans-from-the-bound.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from search.improve.cycle_cuts import judge, time_of
from search.model.cycle_cut import CycleCut
from search.model.shard_costs import ShardCosts, ShardModel, ShardSpace
from search.objective import Assignment, Objective
from search.params import DEFAULT, SearchParams
from search.space.option import Option
from search.surrogate import Surrogate


@dataclass(frozen=True)
class AnnealingTask:
    """One run of annealing.

    Args:
        start: first plan; it need not fit.
        options: options of every table, beside the one in ``start``.
        moves: number of proposals.
        rounds: number of rounds that share them; fewer if each had less than
            `SearchParams.round_moves`.
        seed: seed of the random generator.
        cuts: cuts that hold for plans of these options, beside those found while annealing.
        heat, wall: temperature and memory penalty of the first round; see `SearchParams`.
    """

    start: Assignment
    options: Sequence[Sequence[Option]]
    moves: int
    rounds: int
    seed: int
    cuts: Sequence[CycleCut] = ()
    heat: float | None = None
    wall: float | None = None


class Annealer:
    """Annealer of the plans of one problem."""

    def __init__(
        self, objective: Objective, surrogate: Surrogate, params: SearchParams = DEFAULT
    ) -> None:
        self.objective, self.surrogate, self.params = objective, surrogate, params
        for option in objective.space.every_option:  # cuts are over all lookup groups
            surrogate.group(option)
        tied = {table for group in objective.space.co_locate for table in group}
        self.free = [t for t in range(len(objective.space.options)) if t not in tied]

    def improve(
        self, task: AnnealingTask, stop: Callable[[float], bool] = lambda best: False
    ) -> list[tuple[Assignment, float]]:
        """Return the plans of all rounds that fit, with their predicted times in ms, fastest first.

        Args:
            stop: called after every round with the best time so far.
        """
        from search.improve.kernel import anneal

        objective, params, surrogate = self.objective, self.params, self.surrogate
        plan = task.start
        options = self._options(task)
        within = objective.beside(plan)
        ms, cut = judge(surrogate, plan)
        fitting = {plan: ms} if objective.fits(plan) else {}
        recent_cuts: list[CycleCut] = []
        model: ShardModel | None = None
        rounds = max(1, min(task.rounds, task.moves // params.round_moves))
        for number in range(rounds):
            if cut is None or not self.free or stop(min(fitting.values(), default=math.inf)):
                break
            groups = cut.groups
            if model is None or not recent_cuts or recent_cuts[-1].groups != groups:
                in_groups = [
                    [o for o in table if surrogate.group(o) in groups] for table in options
                ]
                model = ShardModel(within, in_groups, surrogate.shard_loads, self.free)
            # cuts do not hold for plans with other exchanges
            same_groups = [known for known in recent_cuts if known.groups == groups]
            recent_cuts = [*same_groups[1 - params.cuts :], cut] if params.cuts > 1 else [cut]
            given_cuts = [known for known in task.cuts if known.groups == groups]
            chosen, where = model.numbers(plan)
            part = number / max(1, rounds - 1)
            _, fitting_chosen, fitting_where = anneal(
                model.space,
                model.costs([*given_cuts, *recent_cuts]),
                chosen,
                where,
                task.moves // rounds,
                ms * _between(task.heat or params.heat, params.last_heat, part),
                round(params.squares + part * (params.last_squares - params.squares)),
                ms * _between(task.wall or params.wall, params.last_wall, part),
                task.seed * rounds + number,
            )
            if fitting_chosen[0] >= 0:
                on_the_way = model.plan(fitting_chosen, fitting_where)
                if on_the_way not in fitting and objective.fits(on_the_way):
                    fitting[on_the_way] = time_of(surrogate, on_the_way)
            plan = model.plan(chosen, where)
            ms, cut = judge(surrogate, plan)
            fits = objective.fits(plan)
            if fits:
                fitting[plan] = ms
            if not fits and (within.memory(plan) <= within.caps).all():
                # the shards fit, but the peak does not: lower the caps
                within, model = within.beside(plan), None
        return sorted(fitting.items(), key=lambda item: item[1])

    def _options(self, task: AnnealingTask) -> list[list[Option]]:
        """Return the options of every table, its present one first."""
        options = []
        space = self.objective.space.beside([option for option, _ in task.start])
        each = zip(task.start, task.options, space.options, strict=True)
        for (now, _), offered, sound in each:
            sound_ids = {*map(id, sound)}
            usable = [o for o in offered if o is not now and id(o) in sound_ids]
            usable = [o for o in usable if not self.objective.legal(o).is_empty]
            options.append([now, *usable])
            self.surrogate.group(now)
        return options


def _between(first: float, last: float, part: float) -> float:
    """Interpolate geometrically from the first to the last."""
    return float(first * (last / first) ** part)


def load_kernel() -> None:
    """Compile the inner loop or load it from the cache: once, before processes fork."""
    from search.improve.kernel import anneal

    zeros, ones = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    ends, sides = np.array([0, 1]), np.ones((1, 2))
    space = ShardSpace(
        **dict.fromkeys(["first_option", "first_unit"], ends),
        **dict.fromkeys(
            ["free", "first_shard", "group", "pool", "first_rank", "ranks", "distinct"], zeros
        ),
        **dict.fromkeys(["units", "alternatives", "width"], ones),
        together=np.zeros(1, dtype=np.bool_),
        at_rank=np.zeros((1, 1), dtype=np.int64),
        memory=sides,
        caps=sides,
        local=1,
        unit=1.0,
        home=zeros,
        home_where=zeros,
        arriving=np.ones(1),
        max_moves=1,
        max_bytes=-1.0,
    )
    square = np.ones((1, 1))
    costs = ShardCosts(square, square, square, square, np.ones(1))
    anneal(space, costs, zeros.copy(), zeros.copy(), 1, 1.0, 1, 1.0, 0)
