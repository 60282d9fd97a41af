"""Simulated annealing of placed plans on cycle cuts, with the timeline as the judge.

Tables change options and ranks, shards and blocks of a host move and swap. A maximum over ranks is
flat almost everywhere: it says nothing of a change that leaves the slowest rank as it is. So norms
over the ranks stand in for maxima, of a power that rises from round to round. After every round the
plan is scored on the full timeline, and its critical cycle joins the cuts; the next round goes on
from where this one ended, not from the best plan (annealing: Kirkpatrick et al. 1983).

Memory that a plan exceeds costs time, little at first, so that annealing passes through plans that
do not fit; only those that do are kept.

Why: docs/decisions/0028-plans-from-the-bound.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from search.improve.cycle_cuts import judge
from search.model.cut_model import CycleCut
from search.model.shard_costs import ShardCosts, ShardModel, ShardSpace
from search.objective import Assignment, Objective
from search.params import DEFAULT, SearchParams
from search.space.option import Option
from search.surrogate import Surrogate

ROUND_MOVES = 100
"""Fewest proposals of a round; asking the timeline takes as long as thousands of them."""


@dataclass(frozen=True)
class AnnealingTask:
    """One run of annealing.

    Args:
        start: it need not fit.
        options: what every table may have, beside what it has.
        moves: proposals.
        rounds: that share them; fewer where each had less than `ROUND_MOVES`.
        seed: of the random numbers.
        cuts: that hold for plans of these options, beside those that are found.
        heat, wall: of the first round; see `SearchParams`.
    """

    start: Assignment
    options: Sequence[Sequence[Option]]
    moves: int
    rounds: int
    seed: int
    cuts: Sequence[CycleCut] = ()
    heat: float | None = None
    wall: float | None = None

    def __post_init__(self) -> None:
        """Have no more rounds than `ROUND_MOVES` allows: asking the timeline takes longer."""
        rounds = max(1, min(self.rounds, self.moves // ROUND_MOVES))
        object.__setattr__(self, "rounds", rounds)


class Annealer:
    """Anneals plans of one problem."""

    def __init__(
        self, objective: Objective, surrogate: Surrogate, params: SearchParams = DEFAULT
    ) -> None:
        self.objective, self.surrogate, self.params = objective, surrogate, params
        for option in objective.space.every_option:  # cuts are over all lookup groups
            surrogate.shard_loads(option)
        tied = {table for group in objective.space.co_locate for table in group}
        self.free = [t for t in range(len(objective.space.options)) if t not in tied]

    def improve(
        self, task: AnnealingTask, stop: Callable[[float], bool] = lambda best: False
    ) -> list[tuple[Assignment, float]]:
        """Return the plans that the timeline judged and that fit, with their predicted times in ms,
        fastest first.

        Args:
            stop: asked after every round with the best time so far.
        """
        from search.improve.kernel import anneal

        objective, params, surrogate = self.objective, self.params, self.surrogate
        plan = task.start
        some = self._options(task)
        within = objective.beside(plan)
        ms, cut = judge(objective, plan)
        best_ms, fitting = float("inf"), [plan] if objective.fits(plan) else []
        if fitting:
            best_ms = ms
        known: list[CycleCut] = []
        model: ShardModel | None = None
        for number in range(task.rounds):
            if cut is None or not self.free or stop(best_ms):
                break
            groups = cut.groups
            if model is None or not known or known[-1].groups != groups:
                able = [
                    [o for o in table if surrogate.shard_loads(o)[0] in groups] for table in some
                ]
                model = ShardModel(within, able, surrogate.shard_loads, self.free)
            # of plans with other exchanges the cuts say nothing
            alike = [one for one in known if one.groups == groups]
            known = [*alike[1 - params.cuts :], cut] if params.cuts > 1 else [cut]
            base = [one for one in task.cuts if one.groups == groups]
            chosen, where = model.numbers(plan)
            part = number / max(1, task.rounds - 1)
            _, fitting_chosen, fitting_where = anneal(
                model.space,
                model.costs([*base, *known]),
                chosen,
                where,
                task.moves // task.rounds,
                ms * _between(task.heat or params.heat, params.last_heat, part),
                round(params.squares + part * (params.last_squares - params.squares)),
                ms * _between(task.wall or params.wall, params.last_wall, part),
                task.seed * task.rounds + number,
            )
            if fitting_chosen[0] >= 0:
                on_the_way = model.plan(fitting_chosen, fitting_where)
                if objective.fits(on_the_way):
                    fitting.append(on_the_way)
            plan = model.plan(chosen, where)
            ms, cut = judge(objective, plan)
            fits = objective.fits(plan)
            if fits:
                best_ms = min(best_ms, ms)
                fitting.append(plan)
            if not fits and (within.memory(plan) <= within.caps).all():
                # sums of bytes do not tell: its peak is beyond them
                within, model = within.beside(plan), None
        different = [*dict.fromkeys(fitting)]
        times = objective.score(different).tolist()
        return sorted(zip(different, times, strict=True), key=lambda found: found[1])

    def _options(self, task: AnnealingTask) -> list[list[Option]]:
        """The options of every table, with what it has."""
        found = []
        space = self.objective.space.beside([option for option, _ in task.start])
        each = zip(task.start, task.options, space.options, strict=True)
        for (now, _), others, sound in each:
            known = {*map(id, sound)}
            able = [o for o in others if o is not now and id(o) in known]
            able = [o for o in able if not self.objective.legal(o).is_empty]
            found.append([now, *able])
            self.surrogate.shard_loads(now)
        return found


def _between(first: float, last: float, part: float) -> float:
    """Geometric from the first to the last."""
    return float(first * (last / first) ** part)


def load_kernel() -> None:
    """Compile the inner loop, or read what was compiled before: once, before processes fork."""
    from search.improve.kernel import anneal

    none, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    ends, sides = np.array([0, 1]), np.ones((1, 2))
    space = ShardSpace(
        **dict.fromkeys(["first_option", "first_unit"], ends),
        **dict.fromkeys(["free", "first_shard", "group", "pool", "first_rank", "ranks"], none),
        **dict.fromkeys(["units", "alternatives", "width"], one),
        together=np.zeros(1, dtype=np.bool_),
        at_rank=np.zeros((1, 1), dtype=np.int64),
        memory=sides,
        caps=sides,
        local=1,
        unit=1.0,
        home=none,
        home_where=none,
        arriving=np.ones(1),
        max_moves=1,
        max_bytes=-1.0,
    )
    square = np.ones((1, 1))
    costs = ShardCosts(square, square, square, square, np.ones(1))
    anneal(space, costs, none.copy(), none.copy(), 1, 1.0, 1, 1.0, 0)
