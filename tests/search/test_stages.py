"""Each stage of a search by itself: what it adds to a state, and what it does not let in."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from predictor.model.workload import Constraints, Table
from predictor.units import MIB
from search import stages
from search.candidate import Candidate
from search.objective import Assignment, Objective
from search.problem import PlanInUse, Problem
from search.stages import (
    choose,
    first_with_plans,
    with_any_plan,
    with_baselines,
    with_bound,
    with_full_bound,
    with_plan_in_use,
    with_proposals,
)
from search.state import State
from tests.search.problems import (
    H100,
    a_problem,
    a_table,
    a_workload,
    copying,
    hosts,
    tools_of,
)

WHOLE = Constraints(sharding_types=("table_wise",), compute_kernels=("fused",))


def whole_tables(count: int = 4, mib: int = 4096) -> Problem:
    tables = [
        a_table(f"t{i}", 200_000, 128, 5.0 * (i + 1), constraints=WHOLE) for i in range(count)
    ]
    workload = a_workload(*tables, batch_size=32_768)
    return a_problem(workload, hosts(2, hbm=mib * MIB), copying(H100))


def on(objective: Objective, *ranks: int) -> Assignment:
    options = [table[0] for table in objective.space.options]
    return tuple((option, (rank,)) for option, rank in zip(options, ranks, strict=True))


def timed(objective: Objective, *ranks: int) -> Candidate:
    plan = on(objective, *ranks)
    return Candidate(plan, float(objective.score([plan])[0]), "x")


def test_plans_that_do_not_fit_are_no_incumbents() -> None:
    tools = tools_of(whole_tables(mib=300))
    crowded, spread = (timed(tools.objective, *ranks) for ranks in ((0,) * 4, (0, 1, 1, 0)))
    state = State(tools).adding([crowded, spread])
    assert state.incumbents == (spread,)
    assert state.best_ms == spread.iteration_ms


def test_incumbents_are_ranked_and_renamed_ranks_are_one_plan() -> None:
    tools = tools_of(whole_tables())
    candidates = [timed(tools.objective, *r) for r in ((0, 0, 0, 1), (0, 1, 1, 0), (1, 0, 0, 1))]
    state = State(tools).adding(candidates[:1]).adding(candidates[1:])
    assert state.incumbents == (candidates[1], candidates[0])


@pytest.mark.parametrize("outside", ["memory", "ranks"])
def test_baselines_outside_the_space_are_shown_but_never_incumbents(
    outside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tools_of(whole_tables(mib=300))
    plan = on(tools.objective, 0, 0, 0, 0)
    if outside == "ranks":  # a sharding that the space has not
        elsewhere = tools_of(a_problem(a_workload(*_free()), hosts(2, hbm=300 * MIB)))
        options = elsewhere.objective.space.options
        by_row = [next(o for o in table if o.num_shards == 2) for table in options]
        plan = tuple((option, (0, 1)) for option in by_row)
    monkeypatch.setattr(stages, "plan_baselines", lambda *_: {"theirs": plan})
    state = with_baselines(State(tools))
    assert [c.found_by for c in state.baselines] == ["theirs"]
    assert state.usable == state.incumbents == ()


def test_a_baseline_that_was_simplified_has_another_name() -> None:
    """TorchRec cuts rows over one rank; the same bytes table-wise cost less."""
    tables = a_table("a", 10_000_000, 128, 60.0), a_table("b", 200_000, 64, 28.0)
    state = with_baselines(State(tools_of(a_problem(a_workload(*tables), hosts(1), H100))))
    named = {c.found_by: c.assignment for c in state.baselines}
    as_named = [c for c in state.usable if c.found_by in named]
    assert 0 < len(as_named) < len(state.usable)
    assert all(c.assignment == named[c.found_by] for c in as_named)


def _free() -> list[Table]:
    return [a_table(f"t{i}", 200_000, 128, 5.0 * (i + 1)) for i in range(4)]


def test_every_stage_keeps_what_the_one_before_has_found() -> None:
    problem = whole_tables(7)
    objective = tools_of(problem).objective
    crowded = objective.sharding_plan(on(objective, *[0] * 7))
    near = replace(problem, in_use=PlanInUse(crowded))
    states = [with_baselines(State(tools_of(near, 0.01)))]
    states.append(with_plan_in_use(states[-1]))
    states.append(with_bound(states[-1]))
    states.append(with_proposals(states[-1], ("annealing",)))
    states.append(with_any_plan(states[-1]))
    states.append(with_full_bound(states[-1]))
    assert [c.found_by for c in states[1].incumbents].count("given plan") == 1
    assert states[2].proven_ms > states[1].proven_ms == 0.0
    assert len(states[3].incumbents) > len(states[2].incumbents)
    for before, after in itertools.pairwise(states):
        assert {*before.incumbents} <= {*after.incumbents}
        assert after.best_ms <= before.best_ms
        assert before.proven_ms <= after.proven_ms
        assert after.baselines == before.baselines
        assert after.usable == before.usable
    assert states[-1].proven_ms <= states[-1].best_ms


def test_the_incumbent_is_annealed_where_there_was_no_time_for_a_bound() -> None:
    tools = tools_of(whole_tables(7), 0.01)
    state = State(tools).adding([timed(tools.objective, *[0] * 7)])
    annealed = with_proposals(state, ("annealing",))
    assert not tools.bound.has_begun
    assert annealed.best_ms < state.best_ms


def test_a_plan_that_fits_is_looked_for_only_where_there_is_none() -> None:
    tools = tools_of(whole_tables())
    state = State(tools).adding([timed(tools.objective, 0, 0, 0, 1)])
    assert with_any_plan(state) == state
    assert with_any_plan(State(tools)).best_ms < math.inf


def test_the_next_space_is_searched_only_where_the_one_before_has_no_plan() -> None:
    tools = tools_of(whole_tables())
    empty = State(tools)
    full = empty.adding([timed(tools.objective, 0, 0, 0, 1)])
    assert first_with_plans(iter([empty, full, None])) is full  # type: ignore[list-item]


def test_no_plan_slower_than_a_baseline_is_preferred() -> None:
    """A plan with less memory on the fullest rank is slower than the baseline by less than what
    ties."""
    loads = [(80, 80.0), (80, 70.0), (8, 60.0), (8, 50.0), (8, 40.0)]
    tables = [
        a_table(f"t{i}", millions * 10**6, 64, lookups, constraints=WHOLE)
        for i, (millions, lookups) in enumerate(loads)
    ]
    problem = a_problem(a_workload(*tables), hosts(2), copying(H100))
    tools = tools_of(replace(problem, scenarios=()), 0.1)
    every = [timed(tools.objective, 0, *rest) for rest in itertools.product(range(2), repeat=4)]
    fastest = min(every, key=lambda candidate: candidate.iteration_ms)
    state = State(tools).adding([fastest])
    free = choose(state, 0.5).ranked[0]
    baseline = replace(fastest, found_by="a baseline")
    bound = choose(replace(state, usable=(baseline,)), 0.5).ranked[0]
    assert free.iteration_ms > fastest.iteration_ms
    assert bound.iteration_ms <= fastest.iteration_ms * (1 + 1e-6)
