"""Targets that no placement of shards on ranks reaches: a bound for few tables on few ranks.

A model for CP-SAT has every plan that may be as fast as a target, under cuts in which every stretch
takes as long as its slowest rank. Cuts come where they are needed: a plan that the model thinks as
fast as the target has a cycle of its own, which is critical at its uneven loads. That cut is added,
until there is no such plan.

Docs: docs/model.md, chapter 15. Why: docs/decisions/0027-bound-by-rank.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from predictor.cost.loads import COLUMNS, LAUNCH, Load
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.topology import Topology
from search.bound.relaxation import Relaxation
from search.model.cut_model import CutModel, CycleCut, OptionLoads
from search.model.placements import weighted
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
ORDERED = 5
"""Tables with the most work, by whose shards ranks are put in order."""
BASE = 5
"""A table weighs this much more in that order than the next one."""


@dataclass(frozen=True)
class RankChoice:
    """An option of a table, and what every plan with it exceeds a proven bound by at least."""

    option: Option
    loads: OptionLoads
    slack_ms: float

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
        return cls(option, OptionLoads(group, mean, least.repeat(width, axis=0)), slack_ms)


def _order_ranks(model: CutModel) -> None:
    """Of plans that differ in the names of their ranks only, keep one."""
    if any(o.ranks is not None or o.pinned is not None for o in model.loads):
        return
    work: dict[int, float] = {}
    for option, loads in model.loads.items():
        mine = float(loads.mean[[Load.FORWARD_MS, Load.BACKWARD_MS]].sum())
        work[option.table] = max(mine, work.get(option.table, 0.0))
    most = sorted(work, key=lambda t: (-work[t], t))[:ORDERED]
    weight = {table: BASE**i for i, table in enumerate(reversed(most))}
    ranks = model.per_rank(
        lambda p, _: weight.get(p.option.table, 0) if len(p.units[0].alternatives) > 1 else 0
    )
    for rank, following in pairwise(ranks):
        model.model.add(weighted(rank) >= weighted(following))


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
        self.cuts: list[CycleCut] = []
        for share in RAISED:
            cut = relaxation.evaluate(mean, share * mean, launched=share > 0)[1]
            self._add(cut.of_ranks())

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
            made = self.model(able, bound_ms, target_ms)
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

    def model(self, choices: Sequence[RankChoice], bound_ms: float, target_ms: float) -> CutModel:
        """Plans that are not slower than a target; if the model has no solution, there is none. All
        ranks are on one host, so that any two can change their names.

        Args:
            choices: that such a plan can have, table by table.
            bound_ms: what the slacks of the choices are counted from.
        """
        topology, known = self.topology, {choice.option: choice for choice in choices}
        tables: dict[int, list[Option]] = {}
        for option in known:
            tables.setdefault(option.table, []).append(option)
        kept = np.zeros((len(self.numbers), topology.world_size, COLUMNS))
        options = [*tables.values()]
        model = CutModel(topology, options, lambda o: known[o].loads, kept, target_ms, proving=True)
        roomiest = max(topology.hbm_cap_bytes), max(topology.ddr_cap_bytes)
        model.limit_memory(np.repeat(np.array(roomiest)[:, None], topology.world_size, axis=1))
        slacks = model.of_options(lambda option: known[option].slack_ms)
        model.model.add(weighted(slacks) <= model.most - model.units(bound_ms))
        for cut in self.cuts:
            model.add_cut(cut)
        _order_ranks(model)
        return model

    def _add(self, cut: CycleCut) -> None:
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
        cuts = [cut.of_ranks() for cut in found]
        times = [cut.at(loads, launched) for cut in cuts]
        known = max((cut.at(loads, launched) for cut in self.cuts), default=0.0)
        if max(times) <= max(known * (1 + HIGHER), target_ms):
            return False
        self.cuts.append(cuts[int(np.argmax(times))])
        return True
