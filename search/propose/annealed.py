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
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, cycle, islice, zip_longest

import numpy as np
from numpy.typing import NDArray

from predictor.cost.loads import COLUMNS
from search.bound.choices import GIB
from search.bound.exchange_set import ExchangeSet
from search.candidate import Candidate, rank_distinct
from search.improve.annealing import Annealer, AnnealingTask, load_kernel
from search.improve.merges import ExchangeMerges
from search.model.cut_model import CycleCut
from search.objective import Assignment
from search.partitioner import GreedyPartitioner
from search.space.option import Option
from search.state import State, Tools

UNEVEN = (0.0, 0.1, 0.3, 0.6)
"""Multiples of the mean that busy ranks are thought to have beyond it; there cycles are sought."""
ROOM = (1.0, 0.75, 0.5, 0.25)
"""Parts of what a set's optimum takes beyond the least of memory."""
REFINED = 60
"""Refinements of the program of a set at most."""
FOUND_BY = "annealing"

Array = NDArray[np.float64]


def propose_annealed(state: State) -> Iterator[Candidate]:
    """Anneal plans of the bound's programs, and the best known one."""
    if state.tools.bound.has_begun:
        yield from AnnealedPlans(state.tools).propose(state.incumbents)


class AnnealedPlans:
    """Makes plans of one space, whose bound has begun, so that its sets have optima."""

    def __init__(self, tools: Tools) -> None:
        self.objective, self.surrogate, self.bound = tools.objective, tools.surrogate, tools.bound
        self.stop, self.seed, self.params = tools.stop, tools.seed, tools.params
        self.late = tools.stop.part(tools.params.annealing_time)
        self.annealer = Annealer(tools.objective, tools.surrogate, tools.params)
        self.placer = GreedyPartitioner(tools.objective, tools.surrogate)
        self.tables = len(tools.objective.space.options)
        self.moves = tools.params.moves_of(self.tables)

    def propose(self, known: Sequence[Candidate]) -> Iterator[Candidate]:
        """Every plan that annealing went through.

        Args:
            known: plans, best first; the first one is annealed, too.
        """
        params = self.params
        load_kernel()
        best_ms = min((c.iteration_ms for c in known), default=math.inf)
        sets = self._sets(best_ms)
        origins: list[tuple[Candidate, ExchangeSet | None]] = [(c, None) for c in known[:1]]
        each = round(params.first_share * self.moves / max(1, len(sets)))
        pieces = [partial(self._of_set, one, each, number) for number, one in enumerate(sets)]
        for one, found in zip(sets, self.objective.side_by_side(pieces), strict=False):
            origins += [(c, one) for c in found[:1]]
            yield from found
        fastest = min((c for c, _ in origins), key=lambda c: c.iteration_ms, default=None)
        if fastest is not None:
            merged = [Candidate(plan, ms, FOUND_BY) for plan, ms in self._merged(fastest)]
            origins += [(c, None) for c in merged[-1:]]
            yield from merged
        best_ms = min((c.iteration_ms for c, _ in origins), default=math.inf)
        if self._ended(best_ms):
            return
        # no plan of a set is better than what is proven of it
        origin = {id(c): one for c, one in origins if one is None or one.proven < best_ms}
        able = [c for c, _ in origins if id(c) in origin]
        finalists = rank_distinct(able)[: params.finalists]
        each = round((1 - params.first_share) * self.moves / max(1, params.finalists))
        numbered = enumerate(islice(cycle(finalists), params.finalists), len(sets))
        pieces = [
            partial(self._finish, c, origin[id(c)], best_ms, each, number) for number, c in numbered
        ]
        for found in self.objective.side_by_side(pieces):
            yield from found

    def _merged(self, start: Candidate) -> Iterator[tuple[Assignment, float]]:
        """The plan with fewer exchanges, which the bounds of sets say little of where there are
        many sets."""
        merges = ExchangeMerges(self.objective, self.surrogate)
        return islice(merges.descend(start.assignment, start.iteration_ms), self.params.merges)

    def _ended(self, best_ms: float) -> bool:
        closed = best_ms <= self.bound.proven_ms * (1 + self.params.closed)
        return closed or self.stop.reached(best_ms, self.bound.proven_ms) or self.late()

    def _of_set(self, one: ExchangeSet, moves: int, number: int) -> list[Candidate]:
        """The plan of a set's program, annealed."""
        start = self._start(one)
        if start is None:
            return []
        window = self.params.window_of(self.tables) * one.priced_ms
        task = AnnealingTask(
            start,
            self._near(one, window),
            moves,
            self.params.rounds,
            self.seed + number,
            self.cuts_of(one),
            heat=self._heat(one.memory @ one.shares),
        )
        return self._annealed(task)

    def _finish(
        self,
        known: Candidate,
        one: ExchangeSet | None,
        best_ms: float,
        moves: int,
        number: int,
    ) -> list[Candidate]:
        """A plan annealed to the end, with the options that a better one can have."""
        params = self.params
        options: Sequence[Sequence[Option]] = self.objective.space.options
        cuts: list[CycleCut] = []
        if one is not None:
            window = params.window_of(self.tables) * one.priced_ms
            options = self._near(one, min(window, best_ms - one.priced_ms))
            cuts = self.cuts_of(one)
        strict = number % 2 == 1  # of full ranks some want plans that nearly fit from the start
        task = AnnealingTask(
            known.assignment,
            options,
            moves,
            params.rounds,
            self.seed + number,
            cuts,
            self._heat(self.objective.memory(known.assignment).sum(axis=1) / GIB)
            * (0.5 if strict else 1.0),
            params.strict_wall if strict else params.wall,
        )
        return self._annealed(task)

    def _heat(self, needs: Array) -> float:
        """Return the heat of a first round, by the GiB that plans take of all ranks."""
        caps, params = self.bound.choices.caps, self.params
        scarce = bool((needs[:2] > params.scarce * caps[:2]).any())
        return params.scarce_heat if scarce else params.heat

    def _annealed(self, task: AnnealingTask) -> list[Candidate]:
        found = self.annealer.improve(task, self._ended)
        return [Candidate(plan, ms, FOUND_BY) for plan, ms in found]

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

    def _sets(self, best_ms: float) -> list[ExchangeSet]:
        """The sets that may hold a better plan, by their bounds: the first of all, and the first
        with few exchanges, in turns."""
        if not self.params.sets:
            return []
        sets = self.bound.promising(len(self.bound.sets) or self.params.sets)
        sets = [one for one in sets if one.proven < best_ms]
        few = [one for one in sets if _most_exchanges(one) <= self.params.few]
        some: list[ExchangeSet] = []
        turns = zip_longest(*(self._cheapest(part, best_ms) for part in (sets, few)))
        for one in chain.from_iterable(turns):
            if one is not None and one not in some:
                some.append(one)
            if len(some) == self.params.sets:
                break
        return some

    def _cheapest(self, sets: Sequence[ExchangeSet], best_ms: float) -> Iterator[ExchangeSet]:
        """Sets in the order of what their programs prove. Before a set is solved it has the bound
        of a family, which says little of one set."""
        waiting = [(one.proven, number, REFINED) for number, one in enumerate(sets)]
        heapq.heapify(waiting)
        ended = False
        while waiting:
            _, number, left = heapq.heappop(waiting)
            one = sets[number]
            ended = ended or self.late()
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
