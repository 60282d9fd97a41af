"""One notion of what fits: the simulated peak, in plans, proofs and refusals."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from predictor.errors import InfeasibleError
from predictor.model.memory.peak import leave_for_shards, memory_of_plan
from predictor.model.memory.ranks import fits
from predictor.model.plan import ShardingPlan, ShardingType
from predictor.model.workload import Constraints, Workload
from search.objective import Objective
from search.problem import PlanInUse, Problem, Result
from search.solve import solve
from search.space.enumerate import enumerate_space
from search.space.filters import deduplicate
from search.stop import Stop
from tests.quick import quick_first
from tests.search.problems import CPU, H100, a_table, a_workload, hosts, placements

WORKLOAD = a_workload(
    *(a_table(f"t{i}", 100_000 * (i + 1), 128, 4.0 + 10 * i) for i in range(4)), batch_size=2048
)
TOPOLOGY = leave_for_shards(WORKLOAD, hosts(2), 0.0)


def a_search(problem: Problem, **more: object) -> Result:
    return solve(problem, Stop(effort=0.005), 0, **more)  # type: ignore[arg-type]


def with_limit(size: int) -> Problem:
    """Caps that let more in than there is, as sums of parts may."""
    return Problem(WORKLOAD, replace(TOPOLOGY, limit_bytes=(size, size)), H100)


def most_reserved(plan: ShardingPlan) -> int:
    memory = memory_of_plan(WORKLOAD, TOPOLOGY, plan)
    return max(rank.peak.reserved_bytes for rank in memory if rank.peak is not None)


@pytest.fixture(scope="module")
def first() -> Result:
    return a_search(Problem(WORKLOAD, TOPOLOGY, H100), tolerance=0.0)


def test_a_plan_that_does_not_fit_at_its_peak_gives_way(first: Result) -> None:
    limit = most_reserved(first.best.plan) - 1
    problem = with_limit(limit)
    assert not problem.fits(first.best.plan)
    result = a_search(problem, tolerance=0.0)
    assert all(most_reserved(p.plan) <= limit for p in result.plans)
    assert result.lower_bound_ms <= result.best.iteration_ms
    assert result.evaluations > first.evaluations


def test_a_plan_that_fits_is_searched_once(first: Result) -> None:
    result = a_search(with_limit(most_reserved(first.best.plan)), tolerance=0.0)
    assert result.best == first.best
    assert result.evaluations == first.evaluations


def test_an_unmeetable_limit_is_said_to_be_missed_but_not_proven() -> None:
    with pytest.raises(InfeasibleError, match=r"no plan was found.*\n.*rank . is short of \d+"):
        a_search(with_limit(1000))


def test_a_plan_in_use_that_fits_but_for_its_peak_cannot_stay(first: Result) -> None:
    plan = first.best.plan
    problem = with_limit(most_reserved(plan) - 1)
    result = a_search(replace(problem, in_use=PlanInUse(plan)))
    assert result.in_use is not None
    assert "lacks" in result.in_use.misfits[0]


def small_model(rng: random.Random) -> Workload:
    """Two or three tables of few options, large beside what else is in memory or not."""
    kinds = [
        ShardingType.TABLE_WISE,
        ShardingType.COLUMN_WISE,
        ShardingType.ROW_WISE,
        ShardingType.DATA_PARALLEL,
    ]
    tables = []
    for i in range(rng.choice([2, 3])):
        wants = Constraints(
            sharding_types=tuple(rng.sample(kinds, 2)),
            compute_kernels=rng.choice([("fused", "dense"), ("fused", "dense", "fused_uvm")]),
            min_partition=64,
        )
        size = rng.choice([100_000, 400_000]), rng.choice([64, 128]), rng.choice([1.0, 20.0])
        tables.append(a_table(f"t{i}", *size, constraints=wants))
    pipeline = rng.choice(["base", "sparse_dist", "prefetch_sparse_dist"])
    return a_workload(*tables, batch_size=rng.choice([64, 4096]), train_pipeline=pipeline)


@pytest.mark.parametrize("seed", quick_first(6, range(60)))
def test_proofs_are_true_of_every_plan_that_fits_at_its_peak(seed: int) -> None:
    """All plans of small models, under limits that some of them meet, or that none meets."""
    rng = random.Random(seed)
    workload, hardware = small_model(rng), rng.choice([H100, H100, CPU])
    device = hardware.device
    roomy = Problem(workload, leave_for_shards(workload, hosts(2), 0.0, device), hardware)
    space = deduplicate(enumerate_space(workload, roomy.topology, device), roomy.topology)
    objective = Objective(roomy, space)
    plans = list(
        itertools.islice(
            itertools.product(
                *(
                    [(o, ranks) for o in options for ranks in placements(o, roomy.topology)]
                    for options in space.options
                )
            ),
            1500,
        )
    )
    sharding_plans = [objective.sharding_plan(plan) for plan in plans]
    needs = sorted(
        max(p.reserved_bytes for p in roomy.peaks.peaks(plan)) for plan in sharding_plans
    )
    # below all, at the least of them and just above it, in the midst of them
    size = rng.choice([needs[0] - 1, needs[0], needs[len(needs) // 50], needs[len(needs) // 4]])
    caps = hosts(2, hbm=size) if device != "cpu" else hosts(2, ddr=size)
    try:
        topology = leave_for_shards(workload, caps, 0.0, device)
    except InfeasibleError:
        assert needs[0] > size
        return
    problem = Problem(workload, topology, hardware)
    there = [fits(memory_of_plan(workload, topology, plan, device)) for plan in sharding_plans]
    times = np.where(there, objective.score(plans), np.inf)
    if not any(there):
        with pytest.raises(InfeasibleError):
            solve(replace(problem, scenarios=()), Stop(effort=0.01), seed, tolerance=0.0)
        return
    result = solve(replace(problem, scenarios=()), Stop(effort=0.01), seed, tolerance=0.0)
    assert result.lower_bound_ms <= times.min() * (1 + 1e-9)
    assert problem.fits(result.best.plan)
    assert result.best.iteration_ms <= 1.1 * times.min()


@pytest.mark.parametrize("seed", quick_first(3, range(30)))
def test_a_plan_fits_where_the_peak_of_every_rank_does(seed: int) -> None:
    """Simulated from the options' bytes as from the plan itself."""
    rng = random.Random(seed)
    workload, hardware = small_model(rng), rng.choice([H100, CPU])
    device = hardware.device
    roomy = Problem(workload, leave_for_shards(workload, hosts(2), 0.0, device), hardware)
    space = deduplicate(enumerate_space(workload, roomy.topology, device), roomy.topology)
    plans = [
        tuple((o, rng.choice(list(placements(o, roomy.topology)))) for o in chosen)
        for chosen in ([rng.choice(options) for options in space.options] for _ in range(60))
    ]
    needs = [
        max(p.reserved_bytes for p in roomy.peaks.peaks(Objective(roomy, space).sharding_plan(p)))
        for p in plans
    ]
    size = sorted(needs)[30]
    caps = hosts(2, hbm=size) if device != "cpu" else hosts(2, ddr=size)
    topology = leave_for_shards(workload, caps, 0.0, device)
    objective = Objective(Problem(workload, topology, hardware, thorough=True), space)
    right = [space.divides_right([option for option, _ in plan]) for plan in plans]
    expected = [need <= size and ok for need, ok in zip(needs, right, strict=True)]
    assert [objective.fits(plan) for plan in plans] == expected
    assert 0 < sum(expected) < len(plans)
