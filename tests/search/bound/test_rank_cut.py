"""Cuts with stretches at the slowest rank stay below every plan of their exchanges."""

from __future__ import annotations

import pytest

from search.bound.rank_targets import RankCut
from tests.quick import quick_first
from tests.search.bound.plans_of_sets import rank_loads, roomy_objective, sets_with_plans


@pytest.mark.parametrize("seed", quick_first(3, range(12)))
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_no_plan_is_faster_than_a_cut_at_its_loads(seed: int, share: float) -> None:
    """Also than the cuts that are critical at the loads of other plans."""
    objective = roomy_objective(seed)
    found = sets_with_plans(objective, seed)
    for one, plan, ms in found:
        relaxation = one.relaxation_of_ranks()
        loads, launched = rank_loads(objective, one, plan)
        for other in (p for s, p, _ in found if s is one):
            theirs = rank_loads(objective, one, other)[0]
            mean = theirs.mean(axis=1)
            more = share * (theirs.max(axis=1) - mean)
            cut = relaxation.evaluate(mean, more, launched=share > 0)[1]
            if cut is not None:
                assert RankCut.of(cut).at(loads, launched) <= ms * (1 + 1e-9)
