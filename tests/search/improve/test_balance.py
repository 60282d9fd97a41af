"""Balancing: the slowest ranks of all phases at once, within caps and constraints."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.model.plan import ShardingType
from predictor.model.workload import Constraints
from predictor.units import MIB
from search.improve.balance import balance, refill
from search.objective import Assignment, Objective
from search.partitioner import GreedyPartitioner
from search.surrogate import Surrogate
from tests.search.problems import a_problem, a_table, a_workload, assert_valid, hosts, objective_of


def slowest_ms(surrogate: Surrogate, plan: Assignment) -> float:
    """The sum of phase maxima for plans of one exchange, counted anew."""
    loads, _ = surrogate.standing(plan)
    return float(loads.max(axis=0).sum())


def table_wise(objective: Objective) -> list:  # type: ignore[type-arg]
    return [next(o for o in opts if o.label == "TW/fused") for opts in objective.space.options]


def a_case(count: int, ranks: int = 2, **more: object) -> tuple[Objective, Surrogate]:
    """Tables of all sizes, some busy forward, some in what they put out."""
    tables = [
        a_table(f"t{i}", 50_000 * (i + 1), (32, 64, 128)[i % 3], 1.0 + 7 * (i * i % 5))
        for i in range(count)
    ]
    return objective_of(a_problem(a_workload(*tables), hosts(ranks, **more)))  # type: ignore


@settings(deadline=None, max_examples=15)
@given(count=st.integers(2, 12), ranks=st.sampled_from([2, 3, 4]))
def test_it_never_makes_a_plan_slower(count: int, ranks: int) -> None:
    objective, surrogate = a_case(count, ranks)
    start = tuple((o, (0,)) for o in table_wise(objective))
    found = balance(objective, surrogate, start)
    assert_valid(objective, found)
    assert slowest_ms(surrogate, found) <= slowest_ms(surrogate, start) * (1 + 1e-9)
    assert [o for o, _ in found] == [o for o, _ in start]


def test_it_comes_near_the_best_of_all_placements() -> None:
    objective, surrogate = a_case(8)
    options = table_wise(objective)
    every = (
        tuple(zip(options, ((r,) for r in ranks), strict=True))
        for ranks in itertools.product(range(2), repeat=len(options))
    )
    best = min(slowest_ms(surrogate, plan) for plan in every)
    start = tuple((o, (0,)) for o in options)
    found = balance(objective, surrogate, start)
    assert slowest_ms(surrogate, found) <= best * 1.01


def test_it_beats_greedy_placement_of_many_tables() -> None:
    objective, surrogate = a_case(60, 8)
    greedy = GreedyPartitioner(objective, surrogate).place_all(table_wise(objective))
    assert greedy is not None
    found = balance(objective, surrogate, greedy)
    mean = surrogate.standing(greedy)[0].mean(axis=0).sum()
    assert slowest_ms(surrogate, found) - mean < 0.5 * (slowest_ms(surrogate, greedy) - mean)


def test_shards_placed_anew_lie_better_than_greedily_placed_ones() -> None:
    objective, surrogate = a_case(60, 8)
    greedy = GreedyPartitioner(objective, surrogate).place_all(table_wise(objective))
    assert greedy is not None
    anew = refill(objective, surrogate, greedy)
    assert [o for o, _ in anew] == [o for o, _ in greedy]
    mean = surrogate.standing(greedy)[0].mean(axis=0).sum()
    assert slowest_ms(surrogate, anew) - mean < 0.8 * (slowest_ms(surrogate, greedy) - mean)


def test_caps_hold_while_shards_move() -> None:
    objective, surrogate = a_case(9, 3, hbm=330 * MIB)
    start = GreedyPartitioner(objective, surrogate).place_all(table_wise(objective))
    assert start is not None
    found = balance(objective, surrogate, start)
    assert objective.fits(found)


def test_column_shards_bound_to_a_host_move_within_it() -> None:
    objective, surrogate = a_case(9, 4, local=2)
    whole = table_wise(objective)
    every = [
        next((o for o in opts if o.sharding_type is ShardingType.TABLE_COLUMN_WISE), tw)
        for opts, tw in zip(objective.space.options, whole, strict=True)
    ]
    start = tuple((o, (2,) * o.num_shards) for o in every)
    found = balance(objective, surrogate, start)
    assert_valid(objective, found)
    bound = [set(ranks) for o, ranks in found if o not in whole]
    assert all(ranks <= {2, 3} for ranks in bound)
    assert {2, 3} in bound
    assert slowest_ms(surrogate, found) < 0.7 * slowest_ms(surrogate, start)


def test_what_constraints_bind_stays() -> None:
    tables = [
        a_table("pinned", constraints=Constraints(ranks=(1,))),
        a_table("tied0", constraints=Constraints(co_locate="pair")),
        a_table("tied1", constraints=Constraints(co_locate="pair")),
        *(a_table(f"free{i}", pooling_factor=9.0) for i in range(4)),
    ]
    objective, surrogate = objective_of(a_problem(a_workload(*tables), hosts(2)))
    options = table_wise(objective)
    start = tuple(zip(options, ((1,),) * len(options), strict=True))
    found = balance(objective, surrogate, start)
    assert [ranks for _, ranks in found[:3]] == [(1,)] * 3
    assert {ranks for _, ranks in found[3:]} == {(0,), (1,)}


def test_nothing_to_move_is_no_error() -> None:
    objective, surrogate = a_case(2)
    split = [next(o for o in opts if o.label.startswith("RW")) for opts in objective.space.options]
    start = tuple((o, (0, 1)) for o in split)
    found = balance(objective, surrogate, start)
    assert found == start
