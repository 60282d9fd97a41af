"""Contract of every searcher: legal plans that fit, tile the tables and honour constraints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import pytest

from predictor.errors import InfeasibleError
from predictor.model.plan import ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Constraints
from predictor.units import GIB, MIB
from search.baselines.starting_plans import plan_baselines
from search.candidate import Candidate
from search.feasibility import find_feasible
from search.improve.annealing import Annealer, AnnealingTask, load_kernel
from search.improve.kernel import _anneal
from search.objective import Assignment
from search.partitioner import GreedyPartitioner
from search.problem import PlanInUse, Problem
from search.propose.annealed import propose_annealed
from search.propose.cpsat import propose_by_cpsat
from search.propose.study import propose_by_study
from search.stages import with_bound
from search.state import State, Tools
from tests.quick import quick_only
from tests.search.problems import (
    a_problem,
    a_table,
    a_workload,
    assert_valid,
    hosts,
    random_problem,
    some_plan,
    tools_of,
)

Searcher = Callable[[Tools], list[Assignment]]
EFFORT = 0.05


def proposed(propose: Callable[[State], Iterable[Candidate]], tools: Tools) -> list[Assignment]:
    """Return the plans that a searcher proposes once the bound has begun."""
    state = with_bound(State(tools))
    return [c.assignment for c in state.adding(propose(state)).incumbents]


def by_annealer(tools: Tools) -> list[Assignment]:
    """From a plan that may not fit: all on the first ranks."""
    objective, options = tools.objective, tools.objective.space.options
    units = [objective.legal(table[0]).units for table in options]
    start = tuple(
        (table[0], tuple(rank for unit in of_table for rank in unit[0]))
        for table, of_table in zip(options, units, strict=True)
    )
    annealer = Annealer(objective, tools.surrogate)
    return [plan for plan, _ in annealer.improve(AnnealingTask(start, options, 20_000, 5, 0))]


def by_placer(tools: Tools) -> list[Assignment]:
    placer = GreedyPartitioner(tools.objective, tools.surrogate)
    every = tools.objective.space.options
    tried = [[o[min(i, len(o) - 1)] for o in every] for i in range(max(map(len, every)))]
    return [plan for options in tried if (plan := placer.place_all(options)) is not None]


def by_feasibility(tools: Tools) -> list[Assignment]:
    plan = find_feasible(tools.objective, 2.0, 0).assignment
    return [plan] if plan else []


def by_baselines(tools: Tools) -> list[Assignment]:
    return list(plan_baselines(tools.objective, tools.surrogate, 0).values())


SEARCHERS: dict[str, Searcher] = {
    "annealed sets": partial(proposed, propose_annealed),
    "annealer": by_annealer,
    "cpsat": partial(proposed, propose_by_cpsat),
    "study": partial(proposed, propose_by_study),
    "placer": by_placer,
    "baselines": by_baselines,
    "feasibility": by_feasibility,
}


def spanning() -> Problem:
    """Two hosts; tables tied together that may use ranks of both, and types bound to a host."""
    pair = Constraints(co_locate="pair", ranks=(1, 2))
    free = Constraints(co_locate="other")
    tables = [
        a_table("a", 400_000, 128, 5.0, constraints=pair),
        a_table("b", 200_000, 128, 9.0, constraints=pair),
        a_table("c", 900_000, 64, 2.0, constraints=free),
        a_table("d", 500_000, 128, 2.0, constraints=free),
        a_table("e", 700_000, 128, 30.0, pooling="none"),
    ]
    return a_problem(a_workload(*tables), hosts(4, 2))


def uvm_needed() -> Problem:
    tables = [a_table(n, 3_000_000, 64, 5.0, alpha=1.0) for n in "abc"]
    return a_problem(a_workload(*tables), hosts(2, hbm=700 * MIB))


def uneven() -> Problem:
    tables = [a_table(f"t{i}", 400_000 * (i + 1), 64, 5.0) for i in range(5)]
    caps = (200 * MIB, 500 * MIB, 300 * MIB, 900 * MIB)
    return a_problem(a_workload(*tables), Topology(4, 4, caps, (0,) * 4))


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "two hosts, tied": spanning,
    "UVM needed": uvm_needed,
    "uneven caps": uneven,
    **{f"random {seed}": lambda seed=seed: random_problem(seed) for seed in range(4)},
}
QUICK = ["UVM needed", "uneven caps"]


@pytest.mark.parametrize("searcher", SEARCHERS)
@pytest.mark.parametrize("problem", quick_only(QUICK, PROBLEMS))
def test_plans_are_legal_and_fit(searcher: str, problem: str) -> None:
    try:
        tools = tools_of(PROBLEMS[problem](), EFFORT)
    except InfeasibleError:
        pytest.skip("a table has no option")
    for plan in SEARCHERS[searcher](tools):
        assert_valid(tools.objective, plan)


@pytest.mark.parametrize("searcher", SEARCHERS)
def test_the_same_seed_gives_the_same_plans(searcher: str) -> None:
    def labels() -> list[list[tuple[str, tuple[int, ...]]]]:
        plans = SEARCHERS[searcher](tools_of(random_problem(4), EFFORT))
        return [[(o.label, ranks) for o, ranks in plan] for plan in plans]

    assert labels() == labels()


def test_the_kernel_of_annealing_is_the_one_that_setup_compiles() -> None:
    """Compiling it once more takes a user's first search ten seconds."""
    load_kernel()
    in_use = PlanInUse(some_plan(spanning(), 0), max_bytes=1000 * GIB)
    for problem in (uneven(), spanning(), replace(spanning(), in_use=in_use)):
        assert by_annealer(tools_of(problem, EFFORT))
    assert len(_anneal.signatures) == 1


@pytest.mark.parametrize("searcher", ["cpsat", "feasibility"])
def test_pinned_and_tied_to_ranks_that_exclude_each_other(searcher: str) -> None:
    """One table may only use rank 0, its companion only rank 1."""
    tables = [
        a_table(
            f"t{rank}",
            constraints=Constraints(
                sharding_types=(ShardingType.TABLE_WISE,), ranks=(rank,), co_locate="both"
            ),
        )
        for rank in range(2)
    ]
    problem = a_problem(a_workload(*tables), hosts(2, hbm=GIB))
    assert SEARCHERS[searcher](tools_of(problem, EFFORT)) == []
