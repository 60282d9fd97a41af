"""Annealing of plans in the exchange sets of lowest bound; the best of them are annealed again.

The bounds alone do not tell which set holds the best plan: every exchange adds maxima over the
ranks, which the linear program ignores. So many sets are annealed briefly, and the best plans of
those to the end.

The program of a set (`search.bound.exchange_set`) gives each option a reduced cost: an option whose
bound exceeds the incumbent is left out.

Why: docs/decisions/0028-plans-from-the-bound.md.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from search.model.cycle_cut import CycleCut
from search.objective import Assignment
from search.partitioner import GreedyPartitioner
from search.side_by_side import usable_cores
from search.space.option import Option
from search.state import State, Tools
from search.stop import Late

UNEVEN = (0.0, 0.1, 0.3, 0.6)
"""Excess of busy ranks over the mean load, as multiples of it, at which cycles are sought."""
ROOM = (1.0, 0.75, 0.5, 0.25)
"""Fractions of the memory that a set's optimum takes beyond the least possible."""
FOUND_BY = "annealing"

Array = NDArray[np.float64]
Origin = tuple[Candidate, ExchangeSet | None]
"""A plan, and the exchange set that it is from."""


def propose_annealed(state: State) -> Iterator[Candidate]:
    """Anneal plans of the bound's programs, and the incumbent."""
    yield from AnnealedPlans(state.tools).propose(state.incumbents)


class AnnealedPlans:
    """Proposer of annealed plans of one space.

    Without a bound, for which a short time limit leaves no time, the incumbent alone is annealed.
    """

    def __init__(self, tools: Tools) -> None:
        self.objective, self.surrogate, self.bound = tools.objective, tools.surrogate, tools.bound
        self.stop, self.seed, self.params = tools.stop, tools.seed, tools.params
        self.time_is_up = tools.stop.part(tools.params.annealing_time)
        self.annealer = Annealer(tools.objective, tools.surrogate, tools.params)
        self.placer = GreedyPartitioner(tools.objective, tools.surrogate)
        self.tables = len(tools.objective.space.options)
        self.moves = tools.params.moves_of(self.tables)

    def propose(self, incumbents: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield the plans of all annealing rounds that fit.

        Args:
            incumbents: known plans, best first; the first one is annealed, too.
        """
        params = self.params
        load_kernel()
        best_ms = min((c.iteration_ms for c in incumbents), default=math.inf)
        sets = self._sets(best_ms) if self.bound.has_begun else []
        origins: list[Origin] = [(c, None) for c in incumbents[:1]]
        each = round(params.first_share * self.moves / max(1, len(sets)))
        pieces = [
            partial(self._of_set, exchange_set, each, number, len(sets) - number)
            for number, exchange_set in enumerate(sets)
        ]
        for exchange_set, plans in zip(sets, self.objective.side_by_side(pieces), strict=False):
            origins += [(c, exchange_set) for c in plans[:1]]
            yield from plans
        fastest = min((c for c, _ in origins), key=lambda c: c.iteration_ms, default=None)
        if fastest is not None:
            merged = [Candidate(plan, ms, FOUND_BY) for plan, ms in self._merged(fastest)]
            origins += [(c, None) for c in merged[-1:]]
            yield from merged
        moves = (1 - params.first_share) * self.moves / max(1, params.finalists)
        enough = int(moves / (params.final_moves * self.tables))
        generations = max(1, min(params.generations, enough))
        finals, each = generations * params.finalists, round(moves / generations)
        for first in range(len(sets), len(sets) + finals, max(1, params.finalists)):
            best_ms = min((c.iteration_ms for c, _ in origins), default=math.inf)
            if self._ended(best_ms):
                return
            finalists = self._finalists(origins, best_ms)
            pieces = [
                partial(self._finish, *finalist, best_ms, each, number)
                for number, finalist in enumerate(finalists, first)
            ]
            all_plans = self.objective.side_by_side(pieces)
            for (_, origin), plans in zip(finalists, all_plans, strict=False):
                origins += [(c, origin) for c in plans[:1]]
                yield from plans

    def _finalists(self, origins: Sequence[Origin], best_ms: float) -> list[Origin]:
        """Return the plans to anneal to the end: the fastest ones, in turns if there are few, but
        none of a set whose bound excludes a better plan."""
        origin = {id(c): s for c, s in origins if s is None or s.proven < best_ms}
        ranked = rank_distinct([c for c, _ in origins if id(c) in origin])[: self.params.finalists]
        apart = 1 + self.params.apart
        near = [c for c in ranked if c.iteration_ms <= apart * ranked[0].iteration_ms]
        return [(c, origin[id(c)]) for c in islice(cycle(near), self.params.finalists)]

    def _merged(self, start: Candidate) -> Iterator[tuple[Assignment, float]]:
        """Yield faster plans with fewer exchanges, which the bounds rank poorly with many sets."""
        merges = ExchangeMerges(self.objective, self.surrogate)
        return islice(merges.descend(start.assignment, start.iteration_ms), self.params.merges)

    def _ended(self, best_ms: float) -> bool:
        closed = best_ms <= self.bound.proven_ms * (1 + self.params.closed)
        return closed or self.stop.reached(best_ms, self.bound.proven_ms) or self.time_is_up()

    def _of_set(
        self, exchange_set: ExchangeSet, moves: int, number: int, left: int
    ) -> list[Candidate]:
        """Anneal the rounded plan of a set's program.

        Args:
            left: sets that share the time for sets, this one included; under a time limit only the
                first one is begun late.
        """
        params = self.params
        share = params.annealing_time * params.first_share * usable_cores() / left
        late = self.stop.part(min(1.0, share))
        start = None if number and self.time_is_up() else self._start(exchange_set)
        if start is None:
            return []
        scarce = self._is_scarce(exchange_set.memory @ exchange_set.shares)
        placing = 0 if scarce else round(params.placing * moves)
        fixed: list[list[Option]] = [[] for _ in start]
        heat, cuts = self._heat(scarce=scarce), self.cuts_of(exchange_set)
        task = AnnealingTask(start, fixed, placing, params.rounds, self.seed + number, cuts, heat)
        placed = self._annealed(task, late) if placing else []
        if placed:
            task = replace(task, start=placed[0].assignment, heat=heat * params.warm)
        window = params.window_of(self.tables) * exchange_set.priced_ms
        task = replace(task, options=self._near(exchange_set, window), moves=moves - placing)
        return sorted([*placed, *self._annealed(task, late)], key=lambda c: c.iteration_ms)

    def _finish(
        self,
        finalist: Candidate,
        exchange_set: ExchangeSet | None,
        best_ms: float,
        moves: int,
        number: int,
    ) -> list[Candidate]:
        """Anneal a finalist with the options that a better plan can have."""
        params = self.params
        options: Sequence[Sequence[Option]] = self.objective.space.options
        cuts: list[CycleCut] = []
        if exchange_set is not None:
            window = params.window_of(self.tables) * exchange_set.priced_ms
            options = self._near(exchange_set, min(window, best_ms - exchange_set.priced_ms))
            cuts = self.cuts_of(exchange_set)
        strict = number % 2 == 1  # with full ranks some plans must nearly fit from the start
        needs = self.objective.memory(finalist.assignment).sum(axis=1) / GIB
        task = AnnealingTask(
            finalist.assignment,
            options,
            moves,
            params.rounds,
            self.seed + number,
            cuts,
            self._heat(scarce=self._is_scarce(needs)) * (0.5 if strict else 1.0),
            params.strict_wall if strict else params.wall,
        )
        return self._annealed(task)

    def _is_scarce(self, needs: Array) -> bool:
        """Return True if a plan that takes so many GiB of all ranks nearly fills them."""
        caps = self.objective.caps.sum(axis=1) / GIB
        return bool((needs[:2] > self.params.scarce * caps).any())

    def _heat(self, *, scarce: bool) -> float:
        """Return the first temperature."""
        return self.params.scarce_heat if scarce else self.params.heat

    def _annealed(self, task: AnnealingTask, late: Late = lambda *_: False) -> list[Candidate]:
        plans = self.annealer.improve(task, lambda best_ms: self._ended(best_ms) or late())
        return [Candidate(plan, ms, FOUND_BY) for plan, ms in plans]

    def _start(self, exchange_set: ExchangeSet) -> Assignment | None:
        """Round and place the optimum of a set's program.

        Shards do not fill ranks as evenly as the program assumes, so its memory is reduced until
        they can be placed; if that fails, the plan returned does not fit.
        """
        for part in ROOM:
            options = exchange_set.rounded(part)
            plan = None if options is None else self._fitting(options)
            if plan is not None:
                return plan
        options = exchange_set.rounded()
        return None if options is None else self._anywhere(options)

    def _fitting(self, options: Sequence[Option]) -> Assignment | None:
        """Place options within memory; None if no such placement was found."""
        plan, objective = self.placer.place_all(options), self.objective
        if plan is None or objective.fits(plan):
            return plan
        placer = GreedyPartitioner(objective.beside(plan), self.surrogate)
        plan = placer.place_all(options)
        return plan if plan is not None and objective.fits(plan) else None

    def _anywhere(self, options: Sequence[Option]) -> Assignment:
        """Return a plan of these options, regardless of memory."""
        places = [self.objective.legal(option).units for option in options]
        ranks = [tuple(chain.from_iterable(unit[0] for unit in units)) for units in places]
        return tuple(zip(options, ranks, strict=True))

    def _near(self, exchange_set: ExchangeSet, window: float) -> list[list[Option]]:
        """Return every table's options with a reduced cost of at most ``window`` ms."""
        options: list[list[Option]] = [[] for _ in range(self.tables)]
        for i in np.flatnonzero(exchange_set.reduced_costs <= window).tolist():
            option = exchange_set.choices[i].option
            options[option.table].append(option)
        return options

    def cuts_of(self, exchange_set: ExchangeSet) -> list[CycleCut]:
        """Return the cuts that are critical at the optimum of a set's program, and at less even
        ranks, in the lookup groups of the space."""
        relaxation, load, groups = (
            exchange_set.relaxation_of_ranks(),
            exchange_set.mean_load(),
            exchange_set.numbers,
        )
        cuts = []
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
            cuts.append(CycleCut(cut.constant, even, segments, floors, frozenset(groups)))
        return cuts

    def _sets(self, best_ms: float) -> list[ExchangeSet]:
        """Return the sets that may hold a better plan, lowest bound first, alternating between all
        sets and those with few exchanges."""
        if not self.params.sets:
            return []
        sets = self.bound.promising(len(self.bound.sets) or self.params.sets)
        sets = [exchange_set for exchange_set in sets if exchange_set.proven < best_ms]
        few = [
            exchange_set
            for exchange_set in sets
            if _most_exchanges(exchange_set) <= self.params.few
        ]
        chosen: list[ExchangeSet] = []
        late = self.stop.part(self.params.sets_time)
        many = self.params.set_choices // len(self.bound.choices.all)
        most, steps = max(self.params.sets, many), min(self.params.set_steps, max(2, many // 4))
        turns = zip_longest(
            *(self._cheapest(part[:most], best_ms, steps, late) for part in (sets, few))
        )
        for exchange_set in chain.from_iterable(turns):
            if exchange_set is not None and exchange_set not in chosen:
                chosen.append(exchange_set)
            if len(chosen) == self.params.sets:
                break
        return chosen

    def _cheapest(
        self, sets: Sequence[ExchangeSet], best_ms: float, steps: int, is_late: Late
    ) -> Iterator[ExchangeSet]:
        """Yield sets by the bounds of their own programs, refined here as needed.

        Before that a set has the bound of its family, which hardly tells sets apart. With many sets
        and little effort, not all of them are refined.

        Args:
            steps: most refinements of a set.
            is_late: returns True once the time for this is up.
        """
        refinements = max(self.params.sets, self.params.bound_steps)
        waiting = [(exchange_set.proven, number, steps) for number, exchange_set in enumerate(sets)]
        heapq.heapify(waiting)
        ended = False
        while waiting:
            _, number, steps_left = heapq.heappop(waiting)
            exchange_set = sets[number]
            ended = ended or not refinements or is_late()
            if not steps_left or ended:
                if exchange_set.relaxation is not None:
                    yield exchange_set
                continue
            done = exchange_set.refine()[1]
            refinements -= 1
            if exchange_set.proven < best_ms:
                heapq.heappush(
                    waiting, (exchange_set.proven, number, 0 if done else steps_left - 1)
                )


def _most_exchanges(exchange_set: ExchangeSet) -> int:
    """Return the number of exchanges of the module that has the most."""
    modules = [module for module, _ in exchange_set.exchanges]
    return max(map(modules.count, modules))
