"""Target times that no placement of shards on ranks reaches: a bound for small problems.

A CP-SAT model holds every plan that may be as fast as a target, under cuts in which each stretch
takes as long as its slowest rank. Cuts are generated lazily: if the model finds a plan as fast as
the target, the cut of that plan's critical cycle is added, until the model is infeasible.

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
from search.model.cut_model import CutModel, OptionLoads
from search.model.cycle_cut import CycleCut
from search.model.placements import weighted
from search.reproducible import reproducible_solver, run
from search.space.option import Choice, Option, place

Array = NDArray[np.float64]

LEAST_WORK = 0.1
"""Least work counted for an attempt: CP-SAT does not count the time to build the model."""
UNEVEN = (0.1, 0.25, 0.5, 1.0, 2.0)
"""Multiples of a plan's excess over the mean load at which cycles are sought."""
RAISED = (0.0, 0.05, 0.2, 0.5)
"""Excess of busy ranks over the mean load, as multiples of it, for the first cuts."""
HIGHER = 1e-4
"""Fraction by which a cut must raise the time of a plan to count as new."""
ORDERED = 5
"""Number of tables with the most work whose shards order the ranks."""
BASE = 5
"""Ratio of the weights of two successive tables in that order."""


@dataclass(frozen=True)
class RankChoice:
    """Option of a table and its reduced cost: least excess of its plans over a proven bound."""

    option: Option
    loads: OptionLoads
    reduced_cost_ms: float

    @classmethod
    def of(
        cls,
        option: Option,
        group: int,
        mean: Array,
        reduced_cost_ms: float,
        shards: Array,
        topology: Topology,
    ) -> RankChoice:
        """Make a choice from the loads of its shards.

        Shards that are placed together all get the least load among them: CP-SAT proves sooner
        with equal coefficients.
        """
        width = len(option.legal_ranks(topology).units[0][0])
        least = shards.reshape(-1, width, shards.shape[1]).min(axis=1)
        return cls(option, OptionLoads(group, mean, least.repeat(width, axis=0)), reduced_cost_ms)


def _order_ranks(model: CutModel) -> None:
    """Break the symmetry of rank names: keep one of the plans that differ only by them."""
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
    """Refuter of target times for the plans of one exchange set.

    Args:
        numbers: lookup groups of the set in the scorer, in the order of the slopes.
        relaxation: relaxation of the set; its hulls reach to the largest load of a single rank.
        mean: load at which the first cuts are tight, ``[groups, COLUMNS]``.
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
        self,
        target_ms: float,
        allowed: NDArray[np.bool_],
        bound_ms: float,
        work: float,
        seconds: Callable[[], float],
    ) -> tuple[bool, float]:
        """Try to prove that no plan is as fast as a target.

        Args:
            allowed: mask of the choices that such a plan can have, ``[choices]``.
            bound_ms: bound that the reduced costs of the choices refer to.
            work: deterministic time that may be spent, about seconds on one core.
            seconds: returns the wall time left.

        Returns:
            True if it is proven, and the deterministic time spent.
        """
        work_left = work
        candidates = [self.choices[i] for i in np.flatnonzero(allowed).tolist()]
        if {c.option.table for c in candidates} != {c.option.table for c in self.choices}:
            return True, LEAST_WORK
        while work_left > 0 and seconds() > 0:
            model = self.model(candidates, bound_ms, target_ms)
            solver = reproducible_solver(work_left, 0, seconds())
            status = run(solver, model.model)
            work_left -= max(LEAST_WORK, solver.response_proto.deterministic_time)
            if status == cp_model.INFEASIBLE:
                return True, work - work_left
            if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
                break
            if not self._learn(model.read(solver), target_ms):
                break
        return False, work - work_left

    def model(self, choices: Sequence[RankChoice], bound_ms: float, target_ms: float) -> CutModel:
        """Build the model of all plans that are not slower than a target.

        All ranks are on one host, so any two can swap names.

        Args:
            choices: choices that such a plan can have, table by table.
            bound_ms: bound that the reduced costs of the choices refer to.
        """
        topology, by_option = self.topology, {choice.option: choice for choice in choices}
        tables: dict[int, list[Option]] = {}
        for option in by_option:
            tables.setdefault(option.table, []).append(option)
        fixed_loads = np.zeros((len(self.numbers), topology.world_size, COLUMNS))
        options = [*tables.values()]
        model = CutModel(
            topology, options, lambda o: by_option[o].loads, fixed_loads, target_ms, proving=True
        )
        roomiest = max(topology.hbm_cap_bytes), max(topology.ddr_cap_bytes)
        model.limit_memory(np.repeat(np.array(roomiest)[:, None], topology.world_size, axis=1))
        reduced_costs = model.of_options(lambda option: by_option[option].reduced_cost_ms)
        model.model.add(weighted(reduced_costs) <= model.most - model.units(bound_ms))
        for cut in self.cuts:
            model.add_cut(cut)
        _order_ranks(model)
        return model

    def _add(self, cut: CycleCut) -> None:
        """Add a cut unless one like it is known."""
        if not any(cut.is_like(known_cut) for known_cut in self.cuts):
            self.cuts.append(cut)

    def _learn(self, plan: Sequence[Choice], target_ms: float) -> bool:
        """Add the cut that a plan violates most; return False if none takes it above the target."""
        plans = [place(option, ranks) for option, ranks in plan]
        loads = self.scorer.totals(plans)[self.numbers]
        launched = loads[..., Load.SHARDS] > 0
        loads[..., LAUNCH] = 0.0
        mean = loads.mean(axis=1)
        more = loads.max(axis=1) - mean
        relaxed_cuts = [
            self.relaxation.evaluate(mean, share * more, launched=True)[1] for share in UNEVEN
        ]
        cuts = [cut.of_ranks() for cut in relaxed_cuts]
        times = [cut.at(loads, launched) for cut in cuts]
        known_ms = max((cut.at(loads, launched) for cut in self.cuts), default=0.0)
        if max(times) <= max(known_ms * (1 + HIGHER), target_ms):
            return False
        self.cuts.append(cuts[int(np.argmax(times))])
        return True
