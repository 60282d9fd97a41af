"""What every searcher promises: legal plans that fit, tile the tables and honour constraints."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from predictor.errors import InfeasibleError
from predictor.model.plan import ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Constraints
from predictor.units import GIB, MIB
from search.baselines.starting_plans import plan_baselines
from search.bound.lower_bound import LowerBound
from search.improve.annealing import Annealer, AnnealingTask, load_kernel
from search.improve.balance import balance
from search.improve.kernel import anneal
from search.improve.local_search import LocalSearch
from search.improve.neighbourhoods import Neighbourhoods
from search.objective import Assignment, Objective
from search.partitioner import GreedyPartitioner
from search.problem import Problem
from search.propose.annealed import AnnealedPlans
from search.propose.feasibility import find_feasible
from search.propose.searchers import rescue
from search.propose.study import Study
from search.stop import Stop
from search.surrogate import Surrogate
from tests.quick import quick_only
from tests.search.problems import (
    a_problem,
    a_table,
    a_workload,
    assert_valid,
    hosts,
    objective_of,
    random_problem,
)

Searcher = Callable[[Objective, Surrogate], list[Assignment]]


def by_cpsat(objective: Objective, surrogate: Surrogate) -> list[Assignment]:
    start = by_feasibility(objective, surrogate)[:1]
    search = Neighbourhoods(objective, surrogate, 0)
    return [search.improve(plan, 1.0)[0] for plan in start]


def by_study(objective: Objective, surrogate: Surrogate) -> list[Assignment]:
    study = Study(objective, surrogate, 0)
    return [plan for plan, _ in study.run(4)]


def by_annealed_sets(objective: Objective, surrogate: Surrogate) -> list[Assignment]:
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    bound.solve(50)
    plans = AnnealedPlans(objective, surrogate, bound, Stop(effort=0.02), 0)
    return [c.assignment for c in plans.propose([], lambda: False)]


def by_annealer(objective: Objective, surrogate: Surrogate) -> list[Assignment]:
    """From a plan that may not fit: all on the first ranks."""
    annealer, options = Annealer(objective, surrogate), objective.space.options
    units = [objective.legal(table[0]).units for table in options]
    start = tuple(
        (table[0], tuple(rank for unit in of_table for rank in unit[0]))
        for table, of_table in zip(options, units, strict=True)
    )
    found, _ = annealer.improve(AnnealingTask(start, options, 20_000, 5, 0))
    return [] if found is None else [found]


def by_placer(objective: Objective, surrogate: Surrogate) -> list[Assignment]:
    placer = GreedyPartitioner(objective, surrogate)
    most = max(map(len, objective.space.options))
    tried = [[o[min(i, len(o) - 1)] for o in objective.space.options] for i in range(most)]
    return [plan for options in tried if (plan := placer.place_all(options)) is not None]


def by_feasibility(objective: Objective, surrogate: Surrogate) -> list[Assignment]:
    found = find_feasible(objective, 2.0, 0).assignment
    return [found] if found else []


def by_local_search(objective: Objective, surrogate: Surrogate) -> list[Assignment]:
    starts, _ = rescue(objective, Stop(), 0)
    search = LocalSearch(objective, surrogate, 0)
    return [search.improve(c.assignment, 600)[0] for c in starts]


SEARCHERS: dict[str, Searcher] = {
    "annealed sets": by_annealed_sets,
    "annealer": by_annealer,
    "balancer": lambda given, cheap: [balance(given, cheap, p) for p in by_placer(given, cheap)],
    "cpsat": by_cpsat,
    "study": by_study,
    "placer": by_placer,
    "baselines": lambda given, cheap: list(plan_baselines(given, cheap, 0).values()),
    "feasibility": by_feasibility,
    "local search": by_local_search,
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
        objective, surrogate = objective_of(PROBLEMS[problem]())
    except InfeasibleError:
        pytest.skip("a table has no option")
    for plan in SEARCHERS[searcher](objective, surrogate):
        assert_valid(objective, plan)


@pytest.mark.parametrize("searcher", SEARCHERS)
def test_the_same_seed_gives_the_same_plans(searcher: str) -> None:
    def labels() -> list[list[tuple[str, tuple[int, ...]]]]:
        plans = SEARCHERS[searcher](*objective_of(random_problem(4)))
        return [[(o.label, ranks) for o, ranks in plan] for plan in plans]

    assert labels() == labels()


@pytest.mark.parametrize("searcher", ["annealer", "balancer"])
def test_the_kernel_of_annealing_is_the_one_that_setup_compiles(searcher: str) -> None:
    """Compiling it once more takes a user's first search ten seconds."""
    load_kernel()
    assert SEARCHERS[searcher](*objective_of(uneven()))
    assert len(anneal.signatures) == 1


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
    assert SEARCHERS[searcher](*objective_of(problem)) == []
