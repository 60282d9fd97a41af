"""Targets that no placement of shards on ranks reaches: a bound for few tables on few ranks.

A model for CP-SAT has every plan that may be as fast as a target, under cuts in which every stretch
takes as long as its slowest rank. Cuts come where they are needed: a plan that the model thinks as
fast as the target has a cycle of its own, which is critical at its uneven loads. That cut is added,
until there is no such plan.

Docs: docs/model.md, chapter 15. Why: docs/decisions/0034-hook.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from predictor.cost.loads import LAUNCH, Load
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.topology import Topology
from search.bound.relaxation import Cut, Relaxation
from search.placements import OptionVariables, PlacementModel, Term, weighted
from search.reproducible import reproducible_solver, run
from search.space.option import Choice, Option, place

Array = NDArray[np.float64]

LEAST_WORK = 0.1
"""Of an attempt: building the model takes time that CP-SAT does not count."""
UNEVEN = (0.1, 0.25, 0.5, 1.0, 2.0)
"""Multiples of what the busiest ranks of a plan have beyond the mean; there cycles are sought."""
RAISED = (0.0, 0.05, 0.2, 0.5)
"""Multiples of the mean that busy ranks are thought to have beyond it, for the first cuts."""
HIGHER = 1e-4
"""A cut that raises the time of a plan by less than this share is no new one."""
UNITS_PER_MS = 1e5
"""Times are whole steps of 10 ns."""
ORDERED = 5
"""Tables with the most work, by whose shards ranks are put in order."""
BASE = 5
"""A table weighs this much more in that order than the next one."""


@dataclass(frozen=True)
class RankCut:
    """A cut for plans whose shards lie on ranks: collectives of all ranks part its cycle, so every
    section between two of them may run on another rank, and each waits for its busiest one.

    ``time >= constant + rest . mean + sum over stretches of max over ranks (work . load)``.

    In every stretch a rank also takes the floors of the groups that it launches. The cut has to
    come from a relaxation whose hulls reach as far as the load of one rank can.

    Args:
        constant: of the cycle in ms.
        rest: slope of what is taken at the mean rank, ``[groups, COLUMNS]``.
        work: slopes of the stretches, ``[stretches, groups, COLUMNS]``.
        floors: of a launch of a group, ``[stretches, groups]``.
    """

    constant: float
    rest: Array
    work: Array
    floors: Array

    @classmethod
    def of(cls, cut: Cut) -> RankCut:
        """The cut with its sections and collectives as stretches."""
        work = np.concatenate([cut.segments + cut.uneven, cut.messages])
        floors = np.zeros(work.shape[:2])
        floors[: len(cut.floors)] = cut.floors
        return cls(cut.constant, cut.slope - work.sum(axis=0), work, floors)

    def at(self, loads: Array, launched: NDArray[np.bool_]) -> float:
        """The least time in ms of a plan.

        Args:
            loads: ``[groups, ranks, COLUMNS]``.
            launched: whether a rank has shards of a group, ``[groups, ranks]``.
        """
        stretches = np.einsum("sgc,grc->sr", self.work, loads) + self.floors @ launched
        rest = float((self.rest * loads.mean(axis=1)).sum())
        return self.constant + rest + float(stretches.max(axis=1).sum())

    def is_like(self, other: RankCut) -> bool:
        """Both are of the same cycle, at loads that make no difference."""
        if self.work.shape != other.work.shape or not np.isclose(self.constant, other.constant):
            return False
        return np.allclose(self.rest, other.rest) and np.allclose(self.work, other.work)


@dataclass(frozen=True)
class RankChoice:
    """An option of a table, by what it puts on ranks.

    Args:
        group: position of its lookup group in the slopes of cuts.
        mean: its load on the mean rank, ``[COLUMNS]``.
        slack_ms: what every plan with it exceeds a proven bound by at least.
        shards: load of every shard at least, ``[shards, COLUMNS]``.
    """

    option: Option
    group: int
    mean: Array
    slack_ms: float
    shards: Array

    @classmethod
    def of(
        cls,
        option: Option,
        group: int,
        mean: Array,
        slack_ms: float,
        shards: Array,
        topology: Topology,
    ) -> RankChoice:
        """Of shards with these loads. Where several are placed together each has the least of
        them: rows of numbers that are alike are proven on sooner."""
        width = len(option.legal_ranks(topology).units[0][0])
        least = shards.reshape(-1, width, shards.shape[1]).min(axis=1)
        return cls(option, group, mean, slack_ms, least.repeat(width, axis=0))


class RankModel(PlacementModel):
    """Plans that are not slower than a target, as a model for CP-SAT.

    If it has no solution, no plan is as fast as the target; so every number is rounded such that a
    plan which is as fast stays a solution. All ranks are on one host, so that any two can change
    their names.

    Args:
        choices: table by table.
        bound_ms: what the slacks of the choices are counted from.
    """

    def __init__(
        self,
        choices: Sequence[RankChoice],
        cuts: Sequence[RankCut],
        topology: Topology,
        bound_ms: float,
        target_ms: float,
    ) -> None:
        self.choices = {choice.option: choice for choice in choices}
        tables: dict[int, list[Option]] = {}
        for option in self.choices:
            tables.setdefault(option.table, []).append(option)
        super().__init__(topology, list(tables.values()))
        self.target_ms = target_ms
        self.launches: dict[tuple[int, int], cp_model.IntVar] = {}
        roomiest = max(topology.hbm_cap_bytes), max(topology.ddr_cap_bytes)
        self.limit_memory(np.repeat(np.array(roomiest)[:, None], topology.world_size, axis=1))
        slacks = self._of_choices(lambda choice: choice.slack_ms)
        self.model.add(weighted(slacks) <= _ceil(target_ms - bound_ms))
        for cut in cuts:
            self._limit_time(cut)
        self._order_ranks()

    def _of_choices(self, ms: Callable[[RankChoice], float]) -> list[Term]:
        """What the options that are chosen add, whichever ranks they are on."""
        return [(_floor(ms(self.choices[p.option])), x) for p in self.placed for x in p.chosen]

    def _limit_time(self, cut: RankCut) -> None:
        """The cut is not above the target."""
        terms = self._of_choices(lambda c: float((cut.rest[c.group] * c.mean).sum()))
        most = _ceil(self.target_ms)
        for work, floors in zip(cut.work, cut.floors, strict=True):

            def taken(placed: OptionVariables, shard: int, work: Array = work) -> int:
                choice = self.choices[placed.option]
                return max(0, _floor(float(work[choice.group] @ choice.shards[shard])))

            ranks = self.per_rank(taken)
            for rank, mine in enumerate(ranks):
                mine += self._floors(floors, rank)
            if not any(ranks):
                continue
            slowest = self.model.new_int_var(0, most, "")
            for mine in ranks:
                self.model.add(weighted(mine) <= slowest)
            # follows from the rows above, but is seen at once
            self.model.add(weighted([t for mine in ranks for t in mine]) <= len(ranks) * slowest)
            terms.append((1, slowest))
        self.model.add(weighted(terms) <= _ceil(self.target_ms - cut.constant))

    def _floors(self, floors: Array, rank: int) -> list[Term]:
        """The floors of what a rank launches."""
        return [
            (_floor(ms), self._launched(group, rank))
            for group, ms in enumerate(floors.tolist())
            if _floor(ms) > 0
        ]

    def _launched(self, group: int, rank: int) -> cp_model.IntVar:
        """Whether a rank has a shard of a lookup group."""
        if (group, rank) not in self.launches:
            self.launches[group, rank] = launched = self.model.new_bool_var("")
            for placed in self.placed:
                choice = self.choices[placed.option]
                # a shard may be empty
                if choice.group != group or not (choice.shards[:, Load.FORWARD_MS] > 0).all():
                    continue
                for unit in placed.units:
                    for ranks, count in unit.placed:
                        if rank in ranks:
                            self.model.add(count <= len(unit.runs) * launched)
        return self.launches[group, rank]

    def _order_ranks(self) -> None:
        """Of plans that differ in the names of their ranks only, keep one."""
        if any(o.ranks is not None or o.pinned is not None for o in self.choices):
            return
        work: dict[int, float] = {}
        for choice in self.choices.values():
            mine = float(choice.mean[[Load.FORWARD_MS, Load.BACKWARD_MS]].sum())
            work[choice.option.table] = max(mine, work.get(choice.option.table, 0.0))
        most = sorted(work, key=lambda t: (-work[t], t))[:ORDERED]
        weight = {table: BASE**i for i, table in enumerate(reversed(most))}
        ranks = self.per_rank(
            lambda p, _: weight.get(p.option.table, 0) if len(p.units[0].alternatives) > 1 else 0
        )
        for rank, following in pairwise(ranks):
            self.model.add(weighted(rank) >= weighted(following))


def _floor(ms: float) -> int:
    return int(np.floor(ms * UNITS_PER_MS))


def _ceil(ms: float) -> int:
    return int(np.ceil(ms * UNITS_PER_MS))


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
        numbers: list[int],
        relaxation: Relaxation,
        topology: Topology,
        mean: Array,
    ) -> None:
        self.choices = choices
        self.scorer = scorer
        self.numbers = numbers
        self.relaxation = relaxation
        self.topology = topology
        self.cuts: list[RankCut] = []
        for share in RAISED:
            self._add(RankCut.of(relaxation.evaluate(mean, share * mean, launched=share > 0)[1]))

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
        cuts = [RankCut.of(cut) for cut in found]
        times = [cut.at(loads, launched) for cut in cuts]
        known = max((cut.at(loads, launched) for cut in self.cuts), default=0.0)
        if max(times) <= max(known * (1 + HIGHER), target_ms):
            return False
        self.cuts.append(cuts[int(np.argmax(times))])
        return True
