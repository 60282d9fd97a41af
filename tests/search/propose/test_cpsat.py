"""LNS on a few ranks: never slower, within memory and the limit on moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.model.workload import Constraints
from search.objective import Assignment, Objective
from search.propose.cpsat import Neighbourhoods
from search.space.option import ChoicesInUse
from search.surrogate import Surrogate
from tests.search.problems import (
    a_problem,
    a_table,
    a_workload,
    assert_valid,
    every_plan,
    hosts,
    objective_of,
)

WHOLE = Constraints(sharding_types=("table_wise", "row_wise"), compute_kernels=("fused",))


def setting() -> tuple[Objective, Surrogate]:
    lookups = (60.0, 55.0, 40.0, 30.0, 20.0)
    tables = [a_table(f"t{i}", 200_000, 64, n, constraints=WHOLE) for i, n in enumerate(lookups)]
    return objective_of(a_problem(a_workload(*tables, batch_size=32768), hosts(3)))


def all_on_the_first_rank(objective: Objective) -> Assignment:
    unsharded = [next(o for o in t if o.num_shards == 1) for t in objective.space.options]
    return tuple((option, (0,)) for option in unsharded)


def test_it_ends_at_the_best_plan_where_all_ranks_are_free() -> None:
    objective, surrogate = setting()
    start = all_on_the_first_rank(objective)
    plan, ms = Neighbourhoods(objective, surrogate, 0).improve(start, 2.0)
    assert_valid(objective, plan)
    assert ms == pytest.approx(float(objective.score([plan])[0]))
    best = float(objective.score(list(every_plan(objective))).min())
    assert best * (1 - 1e-9) <= ms <= best * 1.002
    assert ms < 0.8 * float(objective.score([start])[0])


def test_it_finds_what_is_faster_only_with_an_exchange_that_the_plan_lacks() -> None:
    """One rank does nearly all work while its tables stay whole."""
    tables = [a_table("hot", 200_000, 64, 400.0, constraints=WHOLE)]
    tables += [a_table(f"t{i}", 200_000, 64, 10.0, constraints=WHOLE) for i in range(3)]
    objective, surrogate = objective_of(a_problem(a_workload(*tables, batch_size=32768), hosts(3)))
    start = all_on_the_first_rank(objective)
    plan, ms = Neighbourhoods(objective, surrogate, 0).improve(start, 3.0)
    assert any(option.num_shards == 3 for option, _ in plan)
    best = float(objective.score(list(every_plan(objective))).min())
    assert ms == pytest.approx(best, rel=2e-3)


def test_no_more_tables_move_than_may() -> None:
    objective, surrogate = setting()
    start = all_on_the_first_rank(objective)
    limit = ChoicesInUse(start, 1)
    near = objective.over(replace(objective.space, in_use=limit))
    plan, ms = Neighbourhoods(near, surrogate, 0).improve(start, 2.0)
    assert len(limit.moved(plan)) == 1
    assert ms < float(objective.score([start])[0])


def test_it_ends_once_its_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    objective, surrogate = setting()
    calls: list[Assignment] = []

    def find(self: Neighbourhoods, base: Assignment, *_: object) -> tuple[None, float]:
        calls.append(base)
        return None, 1.0

    monkeypatch.setattr(Neighbourhoods, "find", find)
    Neighbourhoods(objective, surrogate, 0).improve(all_on_the_first_rank(objective), 20.0)
    assert len(calls) == 20
