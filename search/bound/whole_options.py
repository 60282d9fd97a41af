"""A set's bound where every table has one option: an integer program under the set's cuts.

The program of `search.bound.exchange_set` lets tables mix their options: half of a table whole and
half of it in columns has half a longest shard, and sends half a message. Here a table has one
option. Which ranks its shards lie on stays open and memory is pooled, so the model for CP-SAT is
small: in every stretch of a cycle the slowest rank takes at least what the mean rank takes, and at
least what the rank with the longest shard of a table does, which has its part of the tables that
all ranks share, too. What CP-SAT proves of the model counts, never the plan that it finds; that one
tells the next cut.

Docs: docs/model.md, chapter 15. Why: docs/decisions/0027-bound-by-rank.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from predictor.cost.loads import COLUMNS
from search.bound.choices import BoundChoices
from search.bound.relaxation import Cut, Relaxation
from search.model.cut_model import UNITS_PER_MS
from search.model.placements import Term, weighted
from search.reproducible import reproducible_solver, run

Array = NDArray[np.float64]
Ints = NDArray[np.intp]

ROWS = 16
"""Tables whose longest shard counts in a stretch: those with the longest ones."""
UNEVEN = (0.0, 0.1, 0.3, 1.0)
"""Multiples of the mean that busy ranks are thought to have beyond it; there cycles are sought."""
HIGHER = 1e-4
"""A cut that raises the time of a plan by less than this share is no new one."""
WORTH, FLAT = 1e-3, 2
"""Programs one after the other that raise the bound by less than this share: then it ends."""
LEAST_WORK = 0.05
"""Of one program: building it takes time that CP-SAT does not count."""
STEPS = 1 << 30
"""Of all memory: what options need is rounded down to them."""
TINY, TOO_MUCH = 1e-9, 2.0
ABOVE = 1e-4
"""Share of the time of the best plan that plans in the model may take beyond it; so a bound above
that plan, which would be an error, is seen."""


@dataclass(frozen=True)
class _Times:
    """What options take under a cut in ms.

    Args:
        constant: of the cycle.
        rest: at the mean rank, ``[choices]``.
        mean: on the mean rank in every stretch, ``[stretches, choices]``.
        longest: on the rank with the longest shard, with the floor of its launch, likewise.
        even: on every rank at least, likewise.
        floor: of a launch on the ranks that launch anything, at least, ``[stretches]``; 0 where
            none is sure to.
        launching: what these ranks have on their mean at least, as ``even``.
    """

    constant: float
    rest: Array
    mean: Array
    longest: Array
    even: Array
    floor: Array
    launching: Array

    def of(self, kept: Ints) -> _Times:
        """For some of the choices."""
        mean, longest, even, launching = (
            each[:, kept] for each in (self.mean, self.longest, self.even, self.launching)
        )
        return _Times(self.constant, self.rest[kept], mean, longest, even, self.floor, launching)

    def at(self, chosen: Ints) -> float:
        """The least time of a plan with these options, one of every table."""
        even = self.even[:, chosen]
        longest = (self.longest[:, chosen] - even).max(axis=1) + even.sum(axis=1)
        launching = self.floor + self.launching[:, chosen].sum(axis=1)
        slowest = np.max([self.mean[:, chosen].sum(axis=1), longest, launching], axis=0)
        return float(self.constant + self.rest[chosen].sum() + slowest.sum())


class WholeOptions:
    """The integer program of plans that use some exchanges, and may use some others.

    Args:
        index: positions in `BoundChoices.all`, table by table.
        group: position of every choice's lookup group in the slopes of cuts, ``[choices]``.
        relaxation: its hulls reach as far as the load of one rank can.
        load: where the first cut is tight, ``[groups, COLUMNS]``.
        floor_of: see `search.bound.rank_excess.RankExcess.floor`.
        larger: the program of a set that has all of these plans.
    """

    def __init__(
        self,
        known: BoundChoices,
        index: Ints,
        group: Ints,
        relaxation: Relaxation,
        load: Array,
        floor_of: Callable[[Array], float],
        larger: WholeOptions | None = None,
    ) -> None:
        self.index, self.group, self.relaxation = index, group, relaxation
        self.table, self.loads = known.table[index], known.loads[index]
        # shares of the caps; nothing fits where there is none
        needs = known.needs[index].T / np.maximum(known.caps, TINY)[:, None]
        self.needs = np.minimum(needs, TOO_MUCH)
        self.ranks = known.problem.topology.world_size
        shards = [known.shards_of[i] for i in index.tolist()]
        sizes = [len(of_choice) for of_choice in shards]
        self.starts = np.cumsum([0, *sizes[:-1]])
        self.shards = np.concatenate(shards)
        self.groups = np.repeat(group, sizes)
        self.everywhere = known.even[index].any(axis=1)
        self.floor_of = floor_of
        self.best, self.flat = 0.0, 0
        self.times: list[_Times] = []
        if larger is not None:
            kept = np.searchsorted(larger.index, index)
            self.times += [times.of(kept) for times in larger.times]
        self.times.append(self._times(self.relaxation.evaluate(load)[1]))

    def bound(
        self, slack: Array, priced_ms: float, upper_ms: float, work: float, seconds: float
    ) -> tuple[float, bool, float]:
        """A bound in ms of all plans of the set, whether no further call will raise it, and the
        deterministic time that took, about seconds on one core.

        Args:
            slack: what plans with a choice exceed ``priced_ms`` by at least in ms, ``[choices]``.
            upper_ms: a plan with this time is known; higher bounds are not looked for.
            work: deterministic time that may be spent.
            seconds: wall time left.
        """
        limit = upper_ms * (1 + ABOVE)
        able = np.flatnonzero(slack <= limit - priced_ms)
        if len(np.unique(self.table[able])) < len(np.unique(self.table)):
            return limit, True, LEAST_WORK
        made = _Model(self, able, slack[able], priced_ms, limit)
        solver = reproducible_solver(work, 0, seconds)
        status = run(solver, made.model)
        used = max(LEAST_WORK, solver.response_proto.deterministic_time)
        if status == cp_model.INFEASIBLE:
            return limit, True, used
        # what is proven, not what was found: plans in between may exist
        proven = solver.best_objective_bound / UNITS_PER_MS
        if status != cp_model.OPTIMAL:
            return proven, True, used
        self.flat = 0 if proven > self.best * (1 + WORTH) else self.flat + 1
        self.best = max(self.best, proven)
        chosen = able[[solver.boolean_value(x) for x in made.taken]]
        return proven, self.flat >= FLAT or not self._learn(chosen, proven), used

    def _cuts(self, load: Array) -> list[Cut]:
        """Of the cycles that are critical at a mean load ``[groups, COLUMNS]`` and above it."""
        evaluate = self.relaxation.evaluate
        return [evaluate(load, more * load, launched=more > 0)[1] for more in UNEVEN]

    def _times(self, cut: Cut) -> _Times:
        ranked = cut.of_ranks()
        of_rank = np.concatenate([cut.segments, cut.messages])
        each, own = (
            np.maximum(0.0, np.einsum("hc,shc->sh", self.shards, work[:, self.groups]))
            for work in (ranked.segments, of_rank)
        )
        longest = own + np.where(own > 0, ranked.floors[:, self.groups], 0.0)
        even = np.where(self.everywhere, np.minimum.reduceat(own, self.starts, axis=1), 0.0)
        mean = np.add.reduceat(each, self.starts, axis=1) / self.ranks
        # nothing else is known of ranks that launch nothing
        paid = ranked.floors > 0
        paid[: len(cut.uneven)] &= ~np.any(cut.uneven, axis=2)
        return _Times(
            cut.constant,
            np.einsum("nc,nc->n", self.loads, ranked.even[self.group]),
            mean,
            np.maximum.reduceat(longest, self.starts, axis=1),
            even,
            np.array([self.floor_of(of_groups) for of_groups in ranked.floors]),
            np.where(paid[:, self.group], mean, even),
        )

    def _learn(self, chosen: Ints, known_ms: float) -> bool:
        """Add the cut that is highest at these options; False if none is above what is known."""
        load = np.zeros((len(self.relaxation.groups), COLUMNS))
        np.add.at(load, self.group[chosen], self.loads[chosen])
        times = [self._times(cut) for cut in self._cuts(load)]
        best = max(times, key=lambda one: one.at(chosen))
        if best.at(chosen) <= known_ms * (1 + HIGHER):
            return False
        self.times.append(best)
        return True


class _Model:
    """The integer program for CP-SAT. Every number is rounded such that plans only get faster and
    smaller, so what it proves holds for all plans up to the limit.

    Args:
        able: choices that such a plan can have.
        slack: of those.
        limit_ms: time of the plans that are looked at.

    Attributes:
        taken: whether a plan has each of ``able``.
    """

    def __init__(
        self, of: WholeOptions, able: Ints, slack: Array, priced_ms: float, limit_ms: float
    ) -> None:
        self.model = model = cp_model.CpModel()
        self.taken = [model.new_bool_var("") for _ in able]
        self.most = int(np.ceil(limit_ms * UNITS_PER_MS))
        ends = [*np.flatnonzero(np.diff(of.table[able], prepend=-1)).tolist(), len(able)]
        self.tables = [range(*pair) for pair in pairwise(ends)]
        for mine in self.tables:
            model.add_exactly_one([self.taken[i] for i in mine])
        for needs in np.floor(of.needs[:, able] * STEPS):
            model.add(weighted(self._terms(needs)) <= STEPS)
        time = model.new_int_var(0, self.most, "")
        model.add(weighted(self._terms(_units(slack))) + int(_units(priced_ms)) <= time)
        for times in of.times:
            kept = times.of(able)
            each = kept.mean, kept.longest, kept.even, kept.floor, kept.launching
            stretches = zip(*map(_units, each), strict=True)
            terms = self._terms(_units(kept.rest))
            terms += [(1, self._slowest(*stretch)) for stretch in stretches]
            model.add(weighted(terms) + int(_units(kept.constant)) <= time)
        model.minimize(time)

    def _terms(self, values: Array, some: Sequence[int] | None = None) -> list[Term]:
        """What the options that are taken have, or some of them."""
        found = np.flatnonzero(values).tolist() if some is None else some
        return [(int(values[i]), self.taken[i]) for i in found]

    def _slowest(
        self, mean: Array, longest: Array, even: Array, floor: float, launching: Array
    ) -> cp_model.IntVar:
        """What the slowest rank takes in a stretch at least."""
        model, terms = self.model, self._terms
        slowest, shared = (model.new_int_var(0, self.most, "") for _ in range(2))
        model.add(weighted(terms(mean)) <= slowest)
        model.add(weighted(terms(even)) == shared)
        if floor > 0:
            model.add(weighted(terms(launching)) + int(floor) <= slowest)
        peaks = [longest[mine].max() for mine in self.tables]
        for table in np.argsort(peaks, kind="stable")[::-1][:ROWS].tolist():
            mine = terms(longest - even, self.tables[table])
            model.add(weighted([*mine, (1, shared)]) <= slowest)
        return slowest


def _units(ms: Array | float) -> Array:
    """Whole steps, rounded down."""
    return np.asarray(np.floor(np.asarray(ms) * UNITS_PER_MS))
