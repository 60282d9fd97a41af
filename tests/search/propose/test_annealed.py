"""Annealed plans: of known ones where no set makes any, and with fewer exchanges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from search.bound.exchange_set import ExchangeSet
from search.candidate import Candidate
from search.improve.merges import ExchangeMerges
from search.propose.annealed import AnnealedPlans
from search.stages import with_bound
from search.state import State
from tests.search.problems import (
    a_problem,
    a_table,
    a_workload,
    assert_valid,
    hosts,
    random_problem,
    tools_of,
)


def test_where_no_set_makes_a_plan_known_plans_are_annealed() -> None:
    tables = [a_table(f"t{i}", 100_000, 64, 40.0 + i) for i in range(6)]
    tools = tools_of(a_problem(a_workload(*tables, batch_size=32768), hosts(2)), 0.2)
    objective = tools.objective
    unsharded = [next(o for o in table if o.num_shards == 1) for table in objective.space.options]
    crowded = tuple((option, (0,)) for option in unsharded)
    baseline = Candidate(crowded, float(objective.score([crowded])[0]), "a baseline")
    alone = replace(tools, params=replace(tools.params, sets=0))
    proposals = list(AnnealedPlans(alone).propose([baseline]))
    for candidate in proposals:
        assert_valid(objective, candidate.assignment)
    assert min(c.iteration_ms for c in proposals) < baseline.iteration_ms


def test_many_sets_are_refined_only_as_often_as_the_effort_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tools = tools_of(random_problem(3), 0.002)
    state, refined, refine = with_bound(State(tools)), [], ExchangeSet.refine

    def counted(exchange_set: ExchangeSet) -> tuple[float, bool]:
        refined.append(exchange_set)
        return refine(exchange_set)

    assert len(tools.bound.promising(1000)) > 100
    monkeypatch.setattr(ExchangeSet, "refine", counted)
    assert list(AnnealedPlans(tools).propose(state.incumbents))
    assert 0 < len(refined) <= 2 * max(tools.params.sets, tools.params.bound_steps)


def test_whole_exchanges_merge_as_long_as_that_is_faster() -> None:
    tables = [a_table(f"t{i}", 1_000, 64, 2.0) for i in range(6)]
    tools = tools_of(a_problem(a_workload(*tables, batch_size=1024), hosts(2)))
    objective = tools.objective
    by_type = [{o.sharding_type: o for o in table} for table in objective.space.options]
    kinds = ["table_wise", "row_wise", "column_wise"]
    chosen = [table[kinds[i % 3]] for i, table in enumerate(by_type)]
    start = tuple((option, tuple(range(option.num_shards))) for option in chosen)
    ms = float(objective.score([start])[0])
    steps = list(ExchangeMerges(objective, tools.surrogate).descend(start, ms))
    exchanges = [len({o.sharding_type for o, _ in plan}) for plan, _ in steps]
    assert exchanges[-1] == 1
    times = [ms, *(after for _, after in steps)]
    assert times == sorted(times, reverse=True)
    for plan, _ in steps:
        assert_valid(objective, plan)


def test_with_many_choices_few_programs_are_solved_before_plans_are_made() -> None:
    tables = [a_table(f"t{i}", 10_000 * (i + 1), 64, 4.0 + i) for i in range(6)]
    refined = []
    for set_choices in (1, 400_000):
        tools = tools_of(a_problem(a_workload(*tables), hosts(4)))
        tools.bound.solve(3)
        params = replace(tools.params, sets=2, set_choices=set_choices)
        chosen = AnnealedPlans(replace(tools, params=params))._sets(float("inf"))
        assert len(chosen) == 2
        refined.append(sum(each.relaxation is not None for each in tools.bound.sets))
    assert refined[0] <= 4 < refined[1]
