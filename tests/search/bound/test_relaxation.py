"""Hulls lie below their laws, cuts below the relaxed time everywhere."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from predictor.cost.loads import COLUMNS, Load
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.plan_scorer import PlanScorer
from predictor.iteration.torchrec.sparse import Size
from predictor.model.plan import ShardingType
from predictor.model.workload import Constraints
from search.bound.exchange_set import ExchangeSet
from search.bound.lower_bound import LowerBound
from search.bound.relaxation import Hull, Hulls, Relaxation
from tests.quick import quick_only
from tests.search.problems import (
    CPU,
    H100,
    a_problem,
    a_table,
    a_workload,
    copying,
    every_plan,
    hosts,
    objective_of,
    random_plan,
    random_problem,
)


def staircase(size: np.ndarray) -> np.ndarray:
    return np.floor(np.sqrt(size) / 10) + 1.0


LAWS = {
    "linear": lambda size: 2.0 + 3e-6 * size,
    "concave": lambda size: np.sqrt(size),
    "convex": lambda size: 1e-9 * size**2,
    "steps": staircase,
    "constant": lambda size: np.full_like(size, 0.5),
    "from nothing": lambda size: np.where(size > 0, 1.0 + 1e-6 * size, 0.0),
}


@pytest.mark.parametrize("law", LAWS)
@given(st.floats(0, 1e9), st.lists(st.floats(0, 1), min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_supporting_lines_lie_below_the_law(law: str, top: float, at: list[float]) -> None:
    hull = Hull(LAWS[law], top)
    sizes = np.array(at) * top
    for where in sizes:
        value, slope = hull.tangent(float(where))
        line = value + slope * (sizes - where)
        assert (line <= LAWS[law](sizes) * (1 + 1e-9) + 1e-9).all()
        assert slope >= 0


@pytest.mark.parametrize("law", LAWS)
@given(st.floats(0, 1e9), st.floats(0, 1), st.lists(st.floats(0, 1), min_size=1, max_size=20))
@example(720677.0, 0.9999999999999999, [0.0])
@settings(max_examples=20, deadline=None)
def test_from_a_least_size_they_lie_below_the_law_beyond_it(
    law: str, top: float, share: float, at: list[float]
) -> None:
    least = share * top
    hull = Hull(LAWS[law], top, least)
    sizes = least + np.array(at) * (top - least)
    for where in [*sizes, 0.5 * least]:
        value, slope = hull.tangent(float(where))
        line = value + slope * (sizes - where)
        assert (line <= LAWS[law](sizes) * (1 + 1e-9) + 1e-9).all()
        assert slope >= 0


def test_latency_counts_in_full_from_the_least_size() -> None:
    def law(size: np.ndarray) -> np.ndarray:
        return np.where(size > 0, 1.0 + 1e-9 * size, 0.0)

    assert Hull(law, 1e6).tangent(1e3)[0] < 0.01
    assert Hull(law, 1e6, 1e2).tangent(1e3)[0] == pytest.approx(1.0, rel=1e-3)
    assert Hull(law, 1e6, 1e2).tangent(10.0) == (law(np.array(1e2)), 0.0)


def test_the_least_of_a_maximum_is_the_largest_shard_and_of_a_rank_nothing() -> None:
    mean, peak = np.full(COLUMNS, 100.0), np.full(COLUMNS, 800.0)
    hulls = Hulls(20 * peak, np.stack([mean, peak]))
    law = LAWS["linear"]

    def least_of(position: int, size: Size) -> float:
        return float(hulls.get(position, law, size).x[0])

    assert least_of(0, lambda load: load[..., Load.IDS].max(axis=-1, keepdims=True)) == 800.0
    assert least_of(1, lambda load: load[..., Load.IDS].mean(axis=-1, keepdims=True)) == 100.0
    assert least_of(2, lambda load: load[..., Load.IDS]) == 0.0
    tops = [float(hull.x[-1]) for hull in hulls.in_order]
    assert tops == pytest.approx([16000.0, 16000.0, 16000.0]), "one rank may have all there is"


def test_a_convex_law_is_nearly_its_own_hull() -> None:
    hull = Hull(LAWS["convex"], 1e8)
    value, _ = hull.tangent(5e7)
    assert value == pytest.approx(1e-9 * 5e7**2, rel=0.05)


def tops_of(totals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest mean over ranks and the largest value of a rank, ``[groups, columns]``.

    Args:
        totals: loads ``[plans, groups, ranks, columns]``.
    """
    loads = totals.copy()
    loads[..., Load.SHARDS] = 0.0
    return loads.mean(axis=2).max(axis=0), loads.max(axis=(0, 2))


def scored_plans(
    seed: int, profile: HardwareProfile, rng: random.Random
) -> tuple[PlanScorer, np.ndarray, np.ndarray, np.ndarray]:
    """Plans of a random problem: who scores them, their times ``[plans]``, their loads
    ``[plans, groups, ranks, columns]``, and which lookup groups each uses ``[plans, groups]``."""
    objective, _ = objective_of(replace(random_problem(seed), hardware=profile))
    plans = [random_plan(objective, rng) for _ in range(150)]
    # scoring them finds all lookup groups, which their loads then have
    times, scorer = objective.score(plans), objective.scorer
    totals = np.stack([scorer.totals(objective.table_plans(p)) for p in plans])
    return scorer, times, totals, totals[..., Load.SHARDS].any(axis=-1)


@pytest.mark.parametrize(
    ("seed", "profile"),
    quick_only(
        [(1, H100), (2, H100), (0, CPU)],
        [*((seed, H100) for seed in range(6)), *((seed, CPU) for seed in range(3))],
    ),
)
def test_cuts_bound_every_plan_of_their_exchanges(seed: int, profile: HardwareProfile) -> None:
    """A cut taken at one plan's loads is below the predicted time of all plans like it."""
    scorer, times, totals, used = scored_plans(seed, profile, random.Random(seed))
    kinds = [
        {(g.module, g.sharding_type) for g, u in zip(scorer.groups, one, strict=True) if u}
        for one in used
    ]
    for first in range(3):
        like = [i for i, kind in enumerate(kinds) if kind == kinds[first]]
        groups = np.flatnonzero(used[like].any(axis=0))
        loads = totals[like][:, groups].mean(axis=2)
        loads[..., Load.SHARDS] = 0.0
        certain = used[like][:, groups].all(axis=0).tolist()
        of_like = [scorer.groups[g] for g in groups]
        present = [True] * len(groups)
        relaxed = Relaxation(
            scorer.costs, of_like, *tops_of(totals[like][:, groups]), present, certain, {}
        )
        assert loads.shape[-1] == COLUMNS
        ms, cut = relaxed.evaluate(loads[0])
        assert ms <= times[like[0]] * (1 + 1e-9)
        for one in filter(None, [cut, relaxed.evaluate(loads[0], launched=True)[1]]):
            below = one.constant + (one.slope * loads).sum(axis=(1, 2))
            assert (below <= times[like] * (1 + 1e-9)).all()


@pytest.mark.parametrize(
    ("seed", "profile"),
    quick_only(
        [(1, H100), (4, H100), (0, CPU)],
        [*((seed, H100) for seed in range(12)), *((seed, CPU) for seed in range(4))],
    ),
)
def test_cuts_bound_every_plan_that_may_do_without_some_exchanges(
    seed: int, profile: HardwareProfile
) -> None:
    rng = random.Random(seed)
    scorer, times, totals, used = scored_plans(seed, profile, rng)
    loads = totals.mean(axis=2)
    loads[..., Load.SHARDS] = 0.0
    names = [(g.module, g.sharding_type) for g in scorer.groups]
    for _ in range(4):
        all_use = {name for name in sorted(set(names)) if rng.random() < 0.4}
        of_plan = [{n for n, u in zip(names, one, strict=True) if u} for one in used]
        allowed = np.array([all_use <= found for found in of_plan])
        offered = rng.sample(range(len(names)), min(3, len(names)))
        allowed &= np.array(used)[:, offered].any(axis=1)
        present = [name in all_use for name in names]
        certain = [p and names.count(n) == 1 for p, n in zip(present, names, strict=True)]
        tops, some = tops_of(totals), [frozenset(offered)]
        relaxed = Relaxation(scorer.costs, scorer.groups, *tops, present, certain, {}, offered=some)
        for at in loads[rng.sample(range(len(times)), 4)]:
            for more, launched in ((0.0, False), (0.0, True), (0.5, False)):
                cut = relaxed.evaluate(at, more * at, launched=launched)[1]
                if cut is not None:
                    below = cut.constant + (cut.slope * loads[allowed]).sum(axis=(1, 2))
                    assert (below <= times[allowed] * (1 + 1e-9)).all()


@pytest.mark.parametrize("other", [ShardingType.COLUMN_WISE, ShardingType.DATA_PARALLEL])
def test_what_every_option_of_a_table_brings_is_not_optional(other: ShardingType) -> None:
    """Ids of all exchanges are announced together; those of data-parallel tables stay."""
    wants = Constraints(sharding_types=(ShardingType.TABLE_WISE, other), min_partition=32)
    table = a_table("t", 50_000, 64, constraints=wants)
    workload = a_workload(table, train_pipeline="sparse_dist")
    objective, _ = objective_of(a_problem(workload, hosts(2)))
    choices = LowerBound(objective.problem, objective.space, objective.scorer).choices
    family = ExchangeSet(choices, np.arange(len(choices.all)), frozenset())
    family.refine()
    assert family.relaxation is not None
    ops = family.relaxation._operations
    announced = [
        o for o, phase in zip(ops.optional, ops.phases, strict=True) if phase == "input_dist"
    ]
    assert all(announced) == (other is ShardingType.DATA_PARALLEL)


@pytest.mark.parametrize("pipeline", ["base", "sparse_dist"])
@pytest.mark.parametrize(
    "profile",
    [CPU, H100, copying(CPU), copying(H100, 0.002)],
    ids=["cpu", "gpu", "cpu, slow copies", "gpu, slow copies"],
)
def test_cuts_of_any_exchanges_bound_plans_of_one_and_of_two(
    profile: HardwareProfile, pipeline: str
) -> None:
    """Only outputs of plans with two types in the module are copied once more."""
    kinds = (ShardingType.TABLE_WISE, ShardingType.ROW_WISE)
    either = Constraints(sharding_types=kinds, compute_kernels=("fused",))
    tables = [a_table(n, 50_000, 64, 4.0, constraints=either) for n in "abc"]
    workload = a_workload(*tables, batch_size=2048, train_pipeline=pipeline)
    objective, _ = objective_of(a_problem(workload, hosts(2), profile))
    plans = list(every_plan(objective))
    times, scorer = objective.score(plans), objective.scorer
    totals = np.stack([scorer.totals(objective.table_plans(p)) for p in plans])
    assert {len(np.flatnonzero(t[..., Load.SHARDS].any(axis=-1))) for t in totals} == {1, 2}
    loads = totals.mean(axis=2)
    loads[..., Load.SHARDS] = 0.0
    for present in ([False, False], [True, False], [False, True], [True, True]):
        used = totals[..., Load.SHARDS].any(axis=-1)
        allowed = (used | ~np.array(present)).all(axis=1)
        tops = tops_of(totals)
        relaxed = Relaxation(scorer.costs, scorer.groups, *tops, present, present, {})
        for at, time in zip(loads[allowed], times[allowed], strict=True):
            ms, cut = relaxed.evaluate(at)
            assert ms <= time * (1 + 1e-9)
            assert cut is not None
            below = cut.constant + (cut.slope * loads[allowed]).sum(axis=(1, 2))
            assert (below <= times[allowed] * (1 + 1e-9)).all()


def test_a_lookup_that_costs_less_than_nothing_costs_nothing() -> None:
    """Tables that lend more of a shared cache than they need can have negative loads."""
    only = Constraints(sharding_types=(ShardingType.ROW_WISE,), compute_kernels=("fused",))
    workload = a_workload(a_table("a", 50_000, 64, 4.0, constraints=only), batch_size=65536)
    objective, _ = objective_of(a_problem(workload, hosts(2), copying(H100)))
    (plan,) = every_plan(objective)
    scorer = objective.scorer
    load = scorer.totals(objective.table_plans(plan)).mean(axis=1)
    load[..., Load.SHARDS] = 0.0
    lent, free = load.copy(), load.copy()
    lent[..., Load.FORWARD_MS], free[..., Load.FORWARD_MS] = -50.0, 0.0
    for present in ([True], [False]):
        relaxed = Relaxation(scorer.costs, scorer.groups, load, load, present, [True], {})
        # the launch's floor is not paid either
        assert relaxed.evaluate(lent)[0] <= relaxed.evaluate(free)[0]
        cut = relaxed.evaluate(lent)[1]
        assert cut is not None
        assert not cut.slope[..., Load.FORWARD_MS].any()
        below = cut.constant + float((cut.slope * load).sum())
        assert 0 <= below <= objective.score([plan])[0]
