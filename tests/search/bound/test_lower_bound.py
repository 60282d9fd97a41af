"""No plan is ever predicted below the bound."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from predictor.cost.loads import LONGEST, SHARED, Load
from predictor.model.workload import Workload
from predictor.units import GIB, MIB
from search.bound import lower_bound as bounds
from search.bound.exchange_set import ExchangeSet
from search.bound.lower_bound import FLOOR_STEPS, FLOOR_WORK, LowerBound, UnsoundBoundError
from search.objective import Objective
from search.solve import solve
from search.stop import Stop
from tests.quick import quick_first, quick_only
from tests.search.problems import (
    a_problem,
    a_table,
    a_workload,
    hosts,
    objective_of,
    random_plan,
    random_problem,
)

PIPELINES = ("base", "sparse_dist", "prefetch_sparse_dist")


def bound_of(objective: Objective, steps: int = 3000) -> float:
    return LowerBound(objective.problem, objective.space, objective.scorer).solve(steps)


def unlimited(seed: int, tables: int = 6) -> Objective:
    problem = random_problem(seed, tables=tables)
    workload = replace(problem.workload, batch_size=65536, train_pipeline=PIPELINES[seed % 3])
    ranks = problem.topology.world_size
    topology = replace(problem.topology, hbm_cap_bytes=(1000 * GIB,) * ranks)
    return objective_of(replace(problem, workload=workload, topology=topology))[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", quick_only((1, 2, 4), range(12)))
def test_random_plans_of_random_problems(seed: int) -> None:
    objective = unlimited(seed)
    rng = random.Random(seed)
    times = objective.score([random_plan(objective, rng) for _ in range(300)])
    bound = bound_of(objective)
    assert 0 < bound <= times.min() * (1 + 1e-9)
    few = bound_of(objective, steps=1)
    assert 0 < few <= bound * (1 + 1e-9), "stopped early, it is lower, but still a bound"


@pytest.mark.parametrize("batch_size", [16, 256, 4096])
def test_what_a_launch_adds_to_its_shards_is_above_the_bound(batch_size: int) -> None:
    """Small batches of long bags: tables share the L2, and latencies outlast the bytes."""
    tables = [a_table(f"t{i}", 10 ** (4 + i % 4), 64, 300.0 / (i + 1)) for i in range(5)]
    objective, _ = objective_of(a_problem(a_workload(*tables, batch_size=batch_size), hosts(2)))
    rng = random.Random(batch_size)
    plans = [random_plan(objective, rng) for _ in range(300)]
    totals = [objective.scorer.totals(objective.table_plans(plan)) for plan in plans[:20]]
    assert any(total[..., LONGEST].any() for total in totals)
    assert batch_size != 256 or any(total[..., SHARED].any() for total in totals)
    assert 0 < bound_of(objective) <= objective.score(plans).min() * (1 + 1e-9)


@pytest.mark.parametrize("seed", quick_first(1, range(4)))
@pytest.mark.parametrize("dedup", [True, False])
def test_ids_that_vary_or_are_sent_once_are_above_the_bound(seed: int, dedup: bool) -> None:
    kind = {"pooling": "none", "index_dedup": dedup}
    tables = [a_table(f"t{i}", 10 ** (4 + i % 4), 64, 60.0 / (i + 1), **kind) for i in range(4)]
    varying = [
        replace(t, features=tuple(replace(f, pooling_factor_std=90.0) for f in t.features))
        for t in tables
    ]
    loads, scores = [], []
    for batch in (tables, varying):
        problem = a_problem(a_workload(*batch, batch_size=64), hosts(4))
        objective, _ = objective_of(problem)
        rng = random.Random(seed)
        plans = [random_plan(objective, rng) for _ in range(100)]
        times = objective.score(plans)
        loads.append(objective.scorer.totals(objective.table_plans(plans[0])))
        scores.append(times)
        assert 0 < bound_of(objective) <= times.min() * (1 + 1e-9)
    assert (scores[1] >= scores[0]).all(), "waiting for the slowest rank saves nothing"
    assert scores[1].max() > scores[0].max()
    assert loads[0][..., Load.EXPANDED].any() == dedup
    assert loads[1][..., Load.FORWARD_VARIANCE].any()


@pytest.mark.parametrize("seed", quick_first(1, range(4)))
def test_feature_processors_are_above_the_bound(seed: int) -> None:
    tables = [
        a_table(f"t{i}", 10 ** (4 + i % 4), 64, 60.0 / (i + 1), weighted=True) for i in range(4)
    ]
    processed = [
        replace(t, features=tuple(replace(f, position_weights=100) for f in t.features))
        for t in tables
    ]
    times = []
    for variant in (tables, processed):
        objective, _ = objective_of(a_problem(a_workload(*variant, batch_size=64), hosts(4)))
        rng = random.Random(seed)
        times.append(objective.score([random_plan(objective, rng) for _ in range(100)]))
        assert 0 < bound_of(objective) <= times[-1].min() * (1 + 1e-9)
    assert (times[1] != times[0]).all()


def mid_size(tables: int, seed: int, **more: str) -> Workload:
    rng = random.Random(seed)
    return a_workload(
        *(
            a_table(
                f"t{i}",
                int(10 ** rng.uniform(3, 7)),
                rng.choice([32, 64, 128]),
                rng.choice([1.0, 5.0, 20.0]),
                rng.choice([None, 1.05]),
                rng.choice(["random", "frequency"]),
            )
            for i in range(tables)
        ),
        batch_size=16384,
        **more,
    )


@pytest.mark.parametrize(
    ("ranks", "pipeline"),
    quick_first(1, [(8, "base"), (8, "sparse_dist"), (16, "prefetch_sparse_dist")]),
)
def test_thousands_of_random_plans_on_real_sizes(ranks: int, pipeline: str) -> None:
    problem = a_problem(mid_size(20, ranks, train_pipeline=pipeline), hosts(ranks))
    objective, _ = objective_of(problem)
    rng = random.Random(0)
    times = objective.score([random_plan(objective, rng) for _ in range(2000)])
    assert bound_of(objective, 400) <= times.min() * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_dividing_the_plans_proves_what_every_set_alone_does(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = unlimited(seed, tables=4)
    full = LowerBound(objective.problem, objective.space, objective.scorer)
    ends = [full.solve(steps) for steps in (1, 5, 20, 3000)]
    assert ends == sorted(ends), "it only rises"
    least = np.inf
    for member in full.sets:
        alone = ExchangeSet(full.choices, member.index)  # with no cuts but its own
        for _ in range(60):
            if alone.refine()[1]:
                break
        least = min(least, alone.proven)
    assert ends[-1] == pytest.approx(least, rel=3e-4)
    assert {member.exchanges for member in full.promising(1)} <= {
        member.exchanges for member in full.sets
    }
    monkeypatch.setattr(bounds, "MAX_SETS", 1)
    many = LowerBound(objective.problem, objective.space, objective.scorer)
    assert many.solve(3000) == pytest.approx(ends[-1], rel=3e-4)
    assert many.promising(1)


@pytest.mark.slow
def test_the_only_plan_is_its_own_bound() -> None:
    """One rank, one option: all ranks are alike, so nothing is lost but the curves' hulls."""
    from predictor.model.plan import ShardingType
    from predictor.model.workload import Constraints

    only = Constraints(sharding_types=(ShardingType.ROW_WISE,), compute_kernels=("fused",))
    workload = a_workload(a_table("a", 10_000_000, 128, 50.0, constraints=only), batch_size=65536)
    result = solve(a_problem(workload, hosts(4)), Stop(effort=0.05), 0)
    assert result.gap < 0.01


def test_less_memory_never_lowers_the_bound() -> None:
    workload = mid_size(6, 1)
    need = sum(t.weight_bytes for t in workload.tables)
    loose, tight = (
        bound_of(objective_of(a_problem(workload, hosts(4, hbm=caps)))[0])
        for caps in (80 * GIB, need // 5 + 64 * MIB)
    )
    assert tight >= loose * (1 - 1e-9)


def test_a_large_problem_out_of_time_is_refined_less_often() -> None:
    many = (a_table(f"t{i}", 1000 * (i + 1), 64, 5.0) for i in range(400))
    objective = objective_of(a_problem(a_workload(*many), hosts(16)))[0]
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    assert bound.solve(3000, stop=lambda _: True) > 0
    assert bound._refined == math.ceil(FLOOR_WORK / len(bound.choices.all)) < FLOOR_STEPS


@pytest.mark.slow
def test_upper_and_stop_end_early_and_stay_valid() -> None:
    objective = unlimited(3)
    full = bound_of(objective)
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    incumbent_ms = 1.02 * full
    assert bound.solve(3000, upper_ms=incumbent_ms) <= incumbent_ms
    with pytest.raises(UnsoundBoundError):  # no such plan can be known
        LowerBound(objective.problem, objective.space, objective.scorer).solve(3000, 0.5 * full)
    bounds: list[float] = []

    def at_once(so_far: float) -> bool:
        bounds.append(so_far)
        return True

    fresh = LowerBound(objective.problem, objective.space, objective.scorer)
    assert 0 < fresh.solve(3000, stop=at_once) <= full * (1 + 1e-9)
    assert len(bounds) == 1
    assert np.isfinite(bounds[0])


def test_notes_say_what_the_bound_did_not_do() -> None:
    objective = unlimited(2)

    def notes(steps: int) -> str:
        bound = LowerBound(objective.problem, objective.space, objective.scorer)
        assert not bound.notes(np.inf), "nothing was asked for yet"
        bound.solve(steps)
        assert not bound.notes(bound.proven_ms), "it is closed"
        return "; ".join(bound.notes(1e6))

    assert notes(3000) == ""
    assert "cut short" in notes(1)


def test_before_any_set_is_solved_those_with_what_the_optimum_uses_come_first() -> None:
    tables = [a_table(f"t{i}", 200_000 * (i + 1), 64, 3.0 * (i + 1)) for i in range(6)]
    problem = a_problem(a_workload(*tables, batch_size=32768), hosts(4))
    objective, _ = objective_of(problem)
    bound = LowerBound(problem, objective.space, objective.scorer)
    steps = 0
    while len(bound._open or ()) < 2:  # until all plans are divided
        bound.solve(1)
        steps += 1
    assert steps < 60
    assert bound._solved == []
    shares = bound._exchange_shares
    assert sum(shares.values()) == pytest.approx(len(tables))
    first, *_, last = bound.promising(len(bound.sets))

    def elsewhere(exchange_set: ExchangeSet) -> float:
        return sum(share for name, share in shares.items() if name not in exchange_set.exchanges)

    assert elsewhere(first) <= 0.05 * len(tables)
    assert elsewhere(last) > elsewhere(first)
    assert len(first.exchanges) < len({name for member in bound.sets for name in member.exchanges})
