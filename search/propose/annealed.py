"""Plans of the sets of exchanges with the lowest bounds, annealed; the best of them once more.

Which set holds the best plan the bounds alone do not tell: every exchange adds maxima over the
ranks, which its program knows nothing of. So many sets are annealed for a while, and the best of
what that gives to the end.

A set's program (`search.bound.exchange_set`) says what a plan with an option takes at least: where
that is more than a plan that is known, the option is left out.

Why: docs/decisions/0028-plans-from-the-bound.md.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, zip_longest

import numpy as np
from numpy.typing import NDArray

from predictor.cost.loads import COLUMNS
from search.bound.choices import GIB
from search.bound.exchange_set import ExchangeSet
from search.bound.lower_bound import LowerBound
from search.candidate import Candidate, rank_distinct
from search.improve.annealing import Annealer, AnnealingTask, load_kernel
from search.model.cut_model import CycleCut
from search.objective import Assignment, Objective
from search.params import DEFAULT, SearchParams
from search.partitioner import GreedyPartitioner
from search.space.option import Option
from search.stop import Stop
from search.surrogate import Surrogate

UNEVEN = (0.0, 0.1, 0.3, 0.6)
"""Multiples of the mean that busy ranks are thought to have beyond it; there cycles are sought."""
ROOM = (1.0, 0.75, 0.5, 0.25)
"""Parts of what a set's optimum takes beyond the least of memory."""
FOUND_BY = "annealing"

Array = NDArray[np.float64]


class AnnealedPlans:
    """Makes plans of one problem.

    Args:
        bound: solved, so that its sets have optima.
    """

    def __init__(
        self,
        objective: Objective,
        surrogate: Surrogate,
        bound: LowerBound,
        stop: Stop,
        seed: int,
        params: SearchParams = DEFAULT,
    ) -> None:
        self.objective, self.surrogate, self.bound = objective, surrogate, bound
        self.stop, self.seed, self.params = stop, seed, params
        self.annealer = Annealer(objective, surrogate, params)
        self.placer = GreedyPartitioner(objective, surrogate)
        self.tables = len(objective.space.options)
        self.moves = stop.work(params.moves_of(self.tables))

    def propose(self, known: Sequence[Candidate], late: Callable[..., bool]) -> Iterator[Candidate]:
        """Annealed plans, one by one.

        Args:
            known: plans, the best of which is annealed, too.
            late: whether time is up.
        """
        params = self.params
        load_kernel()
        best_ms = min((c.iteration_ms for c in known), default=math.inf)
        sets = self._sets(best_ms, late)
        first: list[tuple[Candidate, ExchangeSet | None]] = []
        each = round(params.first_share * self.moves / max(1, len(sets)))
        pieces = [partial(self._of_set, one, each, number, late) for number, one in enumerate(sets)]
        for one, found in zip(sets, self.objective.side_by_side(pieces), strict=False):
            if found is not None:
                first.append((found, one))
                yield found
        first += [(c, None) for c in rank_distinct(known)[:1]]
        ranked = rank_distinct([c for c, _ in first])[: params.finalists]
        origin = {id(c): one for c, one in first}
        best_ms = min((c.iteration_ms for c in ranked), default=math.inf)
        if self._ended(late)(best_ms):
            return
        each = round((1 - params.first_share) * self.moves / max(1, len(ranked)))
        pieces = [
            partial(self._finish, c, origin[id(c)], best_ms, each, number, late)
            for number, c in enumerate(ranked, len(sets))
        ]
        for found in self.objective.side_by_side(pieces):
            if found is not None:
                yield found

    def _ended(self, late: Callable[..., bool]) -> Callable[[float], bool]:
        closed = self.bound.proven_ms * (1 + self.params.closed)
        return lambda ms: ms <= closed or self.stop.reached(ms, self.bound.proven_ms) or late()

    def _of_set(
        self, one: ExchangeSet, moves: int, number: int, late: Callable[..., bool]
    ) -> Candidate | None:
        """The plan of a set's program, annealed."""
        start = self._start(one)
        if start is None:
            return None
        window = self.params.window_of(self.tables) * one.priced_ms
        task = AnnealingTask(
            start,
            self._near(one, window),
            moves,
            self.params.first_rounds,
            self.seed + number,
            self.cuts_of(one),
            heat=self._heat(one.memory @ one.shares),
        )
        return self._annealed(task, late)

    def _finish(
        self,
        known: Candidate,
        one: ExchangeSet | None,
        best_ms: float,
        moves: int,
        number: int,
        late: Callable[..., bool],
    ) -> Candidate | None:
        """A plan annealed to the end, with the options that a better one can have."""
        params = self.params
        options: Sequence[Sequence[Option]] = self.objective.space.options
        cuts: list[CycleCut] = []
        if one is not None:
            window = params.window_of(self.tables) * one.priced_ms
            options = self._near(one, min(window, best_ms - one.priced_ms))
            cuts = self.cuts_of(one)
        task = AnnealingTask(
            known.assignment,
            options,
            moves,
            params.rounds,
            self.seed + number,
            cuts,
            params.tight_wall,
            self._heat(self.objective.memory(known.assignment).sum(axis=1) / GIB),
        )
        return self._annealed(task, late)

    def _heat(self, needs: Array) -> float:
        """That of the first round, of plans that take so many GiB of all ranks."""
        caps, params = self.bound.choices.caps, self.params
        scarce = bool((needs[:2] > params.scarce * caps[:2]).any())
        return params.scarce_heat if scarce else params.heat

    def _annealed(self, task: AnnealingTask, late: Callable[..., bool]) -> Candidate | None:
        plan, ms = self.annealer.improve(task, self._ended(late))
        return None if plan is None else Candidate(plan, ms, FOUND_BY)

    def _start(self, one: ExchangeSet) -> Assignment | None:
        """The options of a set's program, placed: with less memory, as shards do not fill ranks as
        the program does, where they cannot be placed otherwise; whatever fits where that does not
        help."""
        for part in ROOM:
            options = one.rounded(part)
            plan = None if options is None else self._fitting(options)
            if plan is not None:
                return plan
        options = one.rounded()
        return None if options is None else self._anywhere(options)

    def _fitting(self, options: Sequence[Option]) -> Assignment | None:
        """These options where they fit; None if no such place was found."""
        plan, objective = self.placer.place_all(options), self.objective
        if plan is None or objective.fits(plan):
            return plan
        placer = GreedyPartitioner(objective.beside(plan), self.surrogate)
        plan = placer.place_all(options)
        return plan if plan is not None and objective.fits(plan) else None

    def _anywhere(self, options: Sequence[Option]) -> Assignment:
        """A plan of these options, whatever fits."""
        places = [self.objective.legal(option).units for option in options]
        ranks = [tuple(chain.from_iterable(unit[0] for unit in units)) for units in places]
        return tuple(zip(options, ranks, strict=True))

    def _near(self, one: ExchangeSet, window: float) -> list[list[Option]]:
        """The options of every table that may cost no more than a window beyond its best."""
        found: list[list[Option]] = [[] for _ in range(self.tables)]
        for i in np.flatnonzero(one.slack <= window).tolist():
            option = one.choices[i].option
            found[option.table].append(option)
        return found

    def cuts_of(self, one: ExchangeSet) -> list[CycleCut]:
        """Cuts of the cycles that are critical at the optimum of a set's program, and where ranks
        are less even, in the lookup groups of the space."""
        relaxation, load, groups = one.relaxation_of_ranks(), one.mean_load(), one.numbers
        found = []
        for more in UNEVEN:
            cut = relaxation.evaluate(load, more * load)[1].of_ranks()
            shape = len(self.objective.scorer.groups), COLUMNS
            even, floors = np.zeros(shape), np.zeros((len(cut.floors), shape[0]))
            segments = np.zeros((len(cut.segments), *shape))
            even[groups], floors[:, groups], segments[:, groups] = (
                cut.even,
                cut.floors,
                cut.segments,
            )
            found.append(CycleCut(cut.constant, even, segments, floors, frozenset(groups)))
        return found

    def _sets(self, best_ms: float, late: Callable[..., bool]) -> list[ExchangeSet]:
        """The sets that may hold a better plan, by their bounds: the first of all, and the first
        with few exchanges, in turns."""
        sets = self.bound.promising(len(self.bound.sets) or self.params.sets)
        sets = [one for one in sets if one.proven < best_ms]
        few = [one for one in sets if _most_exchanges(one) <= self.params.few]
        some: list[ExchangeSet] = []
        turns = zip_longest(*(self._cheapest(part, best_ms, late) for part in (sets, few)))
        for one in chain.from_iterable(turns):
            if one is not None and one not in some:
                some.append(one)
            if len(some) == self.params.sets:
                break
        return some

    def _cheapest(
        self, sets: Sequence[ExchangeSet], best_ms: float, late: Callable[..., bool]
    ) -> Iterator[ExchangeSet]:
        """Sets in the order of what their programs prove. Before a set is solved it has the bound
        of a family, which says little of one set."""
        waiting = [(one.proven, number, self.params.refined) for number, one in enumerate(sets)]
        heapq.heapify(waiting)
        ended = False
        while waiting:
            _, number, left = heapq.heappop(waiting)
            one = sets[number]
            ended = ended or late()
            if not left or ended:
                if one.relaxation is not None:
                    yield one
                continue
            done = one.refine()[1]
            if one.proven < best_ms:
                heapq.heappush(waiting, (one.proven, number, 0 if done else left - 1))


def _most_exchanges(one: ExchangeSet) -> int:
    """Exchanges of the module that has the most."""
    modules = [module for module, _ in one.exchanges]
    return max(map(modules.count, modules))
