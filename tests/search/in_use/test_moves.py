"""Plans near one in use: limits hold, the bound stays a bound, what stays stays as it is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from predictor.errors import InfeasibleError, InputError, PlanError
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import Constraints
from predictor.predict import predict
from predictor.units import GIB, MIB
from search.bound.lower_bound import LowerBound
from search.candidate import Candidate
from search.in_use.align import rename_ranks
from search.in_use.moves import moved_tables
from search.in_use.price import MovePrice
from search.problem import PlanInUse, Problem
from search.solve import solve
from search.stop import Stop
from tests.quick import quick_first, quick_only
from tests.search.problems import (
    H100,
    a_problem,
    a_table,
    a_workload,
    assert_valid,
    copying,
    every_plan,
    hosts,
    objective_near,
    random_problem,
    some_plan,
)

QUICK = 0.01


def small(seed: int = 0, tables: int = 3, world: tuple[int, int | None] = (2, None)) -> Problem:
    rng = random.Random(seed)
    built = [
        a_table(f"t{i}", int(10 ** rng.uniform(4, 6)), 64, rng.choice([1.0, 8.0, 30.0]), 1.05)
        for i in range(tables)
    ]
    # without the host's costs, which hide what lookups and exchanges take in models so small
    return a_problem(a_workload(*built, batch_size=8192), hosts(*world), copying(H100))


@pytest.mark.parametrize("moves", quick_first(1, [1, 2]))
@pytest.mark.parametrize("seed", quick_first(1, range(4)))
def test_the_search_holds_the_limit_and_finds_the_best(seed: int, moves: int) -> None:
    """Against every plan that differs from the given one in so many tables."""
    problem = small(seed)
    placed = PlanInUse(some_plan(problem, seed), moves)
    result = solve(replace(problem, in_use=placed), Stop(effort=0.05), 0, top_k=5)
    for ranked in result.plans:
        assert len(moved_tables(placed.plan, ranked.plan)) <= moves
    objective = objective_near(problem, placed)
    times = objective.score(list(every_plan(objective)))
    assert result.lower_bound_ms <= times.min() * (1 + 1e-9)
    assert result.best.iteration_ms == pytest.approx(times.min(), rel=1e-9)


@pytest.mark.parametrize("seed", quick_only((4,), range(5)))
def test_random_problems_with_constraints(seed: int) -> None:
    problem = random_problem(seed, tables=4)
    try:
        plan = some_plan(problem, seed)
    except (InfeasibleError, StopIteration):
        pytest.skip("no random plan fits")
    moves = 1 + seed % 3
    result = solve(replace(problem, in_use=PlanInUse(plan, moves)), Stop(effort=QUICK), 0, top_k=5)
    in_use = result.in_use
    assert in_use is not None
    assert not in_use.misfits
    assert in_use.iteration_ms >= result.best.iteration_ms * (1 - 1e-9)
    assert result.lower_bound_ms <= result.best.iteration_ms * (1 + 1e-9)
    objective = objective_near(problem, PlanInUse(plan, moves))
    for ranked in result.plans:
        assert len(moved_tables(plan, ranked.plan)) <= moves
        options = [
            objective.space.option_of(i, ranked.plan.tables[key])
            for i, key in enumerate(objective.space.keys)
        ]
        pairs = zip(
            options, (ranked.plan.tables[k].ranks for k in objective.space.keys), strict=True
        )
        assert_valid(objective, tuple((o, ranks) for o, ranks in pairs if o is not None))


@pytest.mark.parametrize("seed", range(2))
def test_fewer_moves_never_lower_the_bound(seed: int) -> None:
    problem = small(seed, 3, (2, None))
    plan = some_plan(problem, seed)
    bounds = []
    for moves in (1, 3):
        objective = objective_near(problem, PlanInUse(plan, moves))
        bounds.append(LowerBound(problem, objective.space, objective.scorer).solve(500))
    assert bounds[0] > bounds[1] * (1 + 1e-3)


def test_no_move_only_rates() -> None:
    problem = small(1, 4, (4, None))
    plan = some_plan(problem, 1)
    result = solve(replace(problem, in_use=PlanInUse(plan, 0)), Stop(effort=QUICK), 0)
    assert [p.plan.tables for p in result.plans] == [plan.tables]
    time = predict(problem.workload, problem.topology, problem.hardware, plan).iteration_ms
    assert result.best.iteration_ms == pytest.approx(time, rel=1e-9)
    free = solve(problem, Stop(effort=QUICK), 0)
    assert result.lower_bound_ms <= free.best.iteration_ms, "the bound is that of all plans"
    assert result.best.found_by == "given plan"


@pytest.mark.slow
def test_a_warm_start_is_never_worse_than_what_is_given() -> None:
    problem = small(2, 6, (4, 2))
    best = solve(problem, Stop(effort=0.05), 0).best
    again = solve(
        replace(problem, in_use=PlanInUse(best.plan)), Stop(effort=1e-3), 0, searchers=["optuna"]
    )
    assert again.best.iteration_ms <= best.iteration_ms * (1 + 1e-9)


def test_what_stays_keeps_every_field() -> None:
    problem = small(0, 3)
    plan = some_plan(problem, 0)
    fields = {"stochastic_rounding": True, "bounds_check_mode": "warning"}
    marked = replace(
        plan, tables={k: replace(t, parameters=fields) for k, t in plan.tables.items()}
    )
    result = solve(replace(problem, in_use=PlanInUse(marked, 1)), Stop(effort=QUICK), 0)
    moved = moved_tables(marked, result.best.plan)
    assert len(moved) <= 1
    for key in set(plan.tables) - set(moved):
        assert result.best.plan.tables[key].parameters == fields


# --- given plans that cannot stay, or are none ---------------------------------------------------


def tight(count: int = 4) -> tuple[Problem, ShardingPlan]:
    """Two ranks with room for half of the tables each, all of which lie on rank 0."""
    only = Constraints(sharding_types=(ShardingType.TABLE_WISE,), compute_kernels=("fused",))
    tables = [a_table(f"t{i}", 400_000, 64, constraints=only) for i in range(count)]
    caps = (int(count / 2 * 130 * MIB),) * 2
    problem = a_problem(a_workload(*tables, batch_size=64), Topology(2, 2, caps, (0, 0)))
    shard = (Shard(0, (0, 0), (400_000, 64)),)
    placed = TablePlan(ShardingType.TABLE_WISE, ComputeKernel.FUSED, shard)
    return problem, ShardingPlan({t.name: placed for t in tables}, 2, 2)


def test_too_few_moves_say_how_many_would_do() -> None:
    problem, plan = tight(4)
    for moves in (0, 1):
        with pytest.raises(InfeasibleError) as raised:
            solve(replace(problem, in_use=PlanInUse(plan, moves)), Stop(effort=QUICK), 0)
        text = str(raised.value)
        assert "rank 0 lacks" in text
        assert "at least 2 must" in text
        assert "allow 2 moves" in text
        assert raised.value.inputs == ("max_moves",)
        assert raised.value.exit_code == 3
    result = solve(replace(problem, in_use=PlanInUse(plan, 2)), Stop(effort=QUICK), 0)
    assert len(moved_tables(plan, result.best.plan)) == 2
    assert result.in_use is not None
    assert "rank 0 lacks" in result.in_use.misfits[0]


def test_what_constraints_forbid_must_move() -> None:
    problem, plan = tight(2)
    roomy = replace(problem, topology=hosts(2))
    first, second = roomy.workload.tables
    pinned = replace(first, constraints=replace(first.constraints, ranks=(1,)))
    problem = replace(roomy, workload=replace(roomy.workload, tables=(pinned, second)))
    with pytest.raises(InfeasibleError, match=r"'t0' cannot stay: constraints.ranks allows 1"):
        solve(replace(problem, in_use=PlanInUse(plan, 0)), Stop(effort=QUICK), 0)
    result = solve(replace(problem, in_use=PlanInUse(plan, 1)), Stop(effort=QUICK), 0)
    assert moved_tables(plan, result.best.plan) == ["t0"]
    assert result.best.plan.tables["t0"].ranks == (1,)


def test_a_table_of_another_storage_must_move() -> None:
    """The plan is from before a table became a hash table."""
    table = a_table("t", 400_000, 64)
    problem = a_problem(a_workload(table, batch_size=64), hosts(2), H100)
    plan = some_plan(problem, 0)
    hashed = a_workload(replace(table, storage="dynamicemb"), batch_size=64)
    problem = replace(problem, workload=hashed)
    with pytest.raises(InfeasibleError, match=r"'t' cannot stay: storage is dynamicemb"):
        solve(replace(problem, in_use=PlanInUse(plan, 0)), Stop(effort=QUICK), 0)
    result = solve(replace(problem, in_use=PlanInUse(plan, 1)), Stop(effort=QUICK), 0)
    assert result.best.plan.tables["t"].compute_kernel.is_hashed


@pytest.mark.slow
def test_a_split_that_no_option_has_may_stay() -> None:
    """Columns 48 + 16: rated as `predict` does, and left alone where moves are limited."""
    problem = small(0, 3)
    plan = some_plan(problem, 0)
    rows = problem.workload.tables[0].num_embeddings
    shards = (Shard(1, (0, 0), (rows, 48)), Shard(0, (0, 48), (rows, 16)))
    uneven = TablePlan(ShardingType.COLUMN_WISE, ComputeKernel.FUSED, shards)
    plan = replace(plan, tables={**plan.tables, "t0": uneven})
    time = predict(problem.workload, problem.topology, problem.hardware, plan).iteration_ms
    rated = solve(replace(problem, in_use=PlanInUse(plan, 0)), Stop(effort=QUICK), 0)
    assert rated.best.iteration_ms == pytest.approx(time, rel=1e-9)
    assert rated.best.plan.tables["t0"] == uneven
    for moves in (1, 2, None):
        result = solve(
            replace(problem, in_use=PlanInUse(plan, moves)), Stop(effort=QUICK), 0, top_k=4
        )
        assert result.best.iteration_ms <= time * (1 + 1e-9)
        for ranked in result.plans:
            again = predict(problem.workload, problem.topology, problem.hardware, ranked.plan)
            assert again.iteration_ms == pytest.approx(ranked.iteration_ms, rel=1e-9)


def test_plans_that_are_not_of_this_problem() -> None:
    problem = small(0, 3)
    plan = some_plan(problem, 0)
    of_more_tables = replace(plan, tables={**plan.tables, "elsewhere": plan.tables["t0"]})
    with pytest.raises(PlanError, match="elsewhere"):
        solve(replace(problem, in_use=PlanInUse(of_more_tables)), Stop(effort=QUICK), 0)
    with pytest.raises(PlanError, match="no shards for"):
        solve(replace(problem, in_use=PlanInUse(replace(plan, tables={}))), Stop(effort=QUICK), 0)
    with pytest.raises(InputError, match="on 2 ranks, the new one is for 4"):
        solve(replace(small(0, 3, (4, None)), in_use=PlanInUse(plan)), Stop(effort=QUICK), 0)
    with pytest.raises(InputError, match="max_moves is -1"):
        solve(replace(problem, in_use=PlanInUse(plan, -1)), Stop(effort=QUICK), 0)


# --- names of ranks, bytes ------------------------------------------------------------------------


@pytest.mark.parametrize("world", [(4, 4), (8, 4), (8, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_renamed_ranks_are_named_back(seed: int, world: tuple[int, int]) -> None:
    """A plan whose hosts, and ranks within hosts, are shuffled, is the given plan again."""
    rng = random.Random(seed)
    only = Constraints(sharding_types=(ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE))
    tables = [a_table(f"t{i}", 1000 * (i + 1), 64, constraints=only) for i in range(24)]
    problem = a_problem(a_workload(*tables), hosts(*world))
    plan = some_plan(problem, seed)
    objective = objective_near(problem, PlanInUse(plan))
    in_use = objective.space.in_use
    assert in_use is not None
    ranks, local = world
    order = rng.sample(range(ranks // local), ranks // local)
    names = [host * local + r for host in order for r in rng.sample(range(local), local)]
    shuffled = tuple(
        (option, tuple(names[r] for r in where)) for option, where in filter(None, in_use.choices)
    )
    ms = float(objective.score([shuffled])[0])
    renamed = rename_ranks(objective, Candidate(shuffled, ms, "shuffled"))
    assert in_use.moved(renamed.assignment) == []
    assert renamed.iteration_ms <= ms * (1 + 1e-9)


def test_names_that_constraints_fix_stay() -> None:
    tables = [
        a_table(f"t{r}", 10_000 * (r + 1), constraints=Constraints(ranks=(r,))) for r in (0, 1)
    ]
    problem = a_problem(a_workload(*tables), hosts(2))
    plan = some_plan(problem, 0)
    objective = objective_near(problem, PlanInUse(plan))
    for assignment in every_plan(objective):
        ms = float(objective.score([assignment])[0])
        assert_valid(objective, rename_ranks(objective, Candidate(assignment, ms, "")).assignment)


def test_a_large_problem_moves_few_tables_in_little_time() -> None:
    tables = [a_table(f"t{i}", 50_000 * (i + 1), 64, 5.0) for i in range(20)]
    shards = [(Shard(0, (0, 0), (t.num_embeddings, 64)),) for t in tables]
    plan = ShardingPlan(
        {
            t.name: TablePlan(ShardingType.TABLE_WISE, ComputeKernel.FUSED, s)
            for t, s in zip(tables, shards, strict=True)
        },
        4,
        4,
    )
    problem = a_problem(a_workload(*tables), hosts(4, hbm=5 * GIB), copying(H100))
    result = solve(replace(problem, in_use=PlanInUse(plan, 3)), Stop(effort=QUICK), 0)
    assert len(moved_tables(plan, result.best.plan)) <= 3
    assert result.in_use is not None
    assert result.best.iteration_ms < result.in_use.iteration_ms


@pytest.mark.parametrize("seed", quick_first(1, range(6)))
def test_the_search_keeps_to_a_limit_on_bytes(seed: int) -> None:
    problem = small(seed, tables=6)
    plan = some_plan(problem, seed)
    free = solve(replace(problem, in_use=PlanInUse(plan)), Stop(effort=QUICK), 0)
    price = MovePrice(problem, plan)
    most = price.of(free.best.plan).bytes / 2
    limited = solve(replace(problem, in_use=PlanInUse(plan, max_bytes=most)), Stop(effort=QUICK), 0)
    for ranked in limited.plans:
        assert price.of(ranked.plan).bytes <= most
    assert limited.in_use is not None
    assert limited.best.iteration_ms <= limited.in_use.iteration_ms * (1 + 1e-9)
    assert limited.lower_bound_ms <= limited.best.iteration_ms * (1 + 1e-9)
