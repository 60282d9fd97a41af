"""Greedy placement: balance, memory, forced and tied tables."""

from __future__ import annotations

import numpy as np
import pytest

from predictor.model.topology import Topology
from predictor.model.workload import Constraints
from predictor.units import MIB
from search.objective import Objective
from search.partitioner import GreedyPartitioner
from search.surrogate import PHASES
from tests.search.problems import a_problem, a_table, a_workload, hosts, objective_of


def choose(objective: Objective, label: str) -> list:  # type: ignore[type-arg]
    return [next(o for o in opts if o.label == label) for opts in objective.space.options]


def test_like_tables_are_spread_evenly() -> None:
    objective, surrogate = objective_of(
        a_problem(a_workload(*(a_table(f"t{i}") for i in range(8))), hosts(4))
    )
    plan = GreedyPartitioner(objective, surrogate).place_all(choose(objective, "TW/fused"))
    assert plan is not None
    assert sorted(ranks[0] for _, ranks in plan) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_does_not_fit_by_work_is_placed_by_memory() -> None:
    """Busy tables first would leave no room for the two large ones."""
    tables = [a_table(f"busy{i}", 300_000, 64, 50.0) for i in range(4)]
    tables += [a_table(f"large{i}", 800_000, 64, 1.0) for i in range(2)]
    objective, surrogate = objective_of(a_problem(a_workload(*tables), hosts(2, hbm=440 * MIB)))
    plan = GreedyPartitioner(objective, surrogate).place_all(choose(objective, "TW/fused"))
    assert plan is not None
    assert objective.fits(plan)


def test_none_when_nothing_fits() -> None:
    tables = [a_table(n, 1_000_000, 64) for n in "abc"]
    objective, surrogate = objective_of(a_problem(a_workload(*tables), hosts(2, hbm=300 * MIB)))
    assert GreedyPartitioner(objective, surrogate).place_all(choose(objective, "TW/fused")) is None


def test_host_wise_columns_stay_in_one_group_even_when_tied() -> None:
    tables = [a_table("a", dim=128), a_table("b", dim=128)]
    objective, surrogate = objective_of(a_problem(a_workload(*tables), hosts(4, 2)))
    option = choose(objective, "TWCW64/fused")[0]
    placer = GreedyPartitioner(objective, surrogate)
    loads, used = np.zeros((4, PHASES)), np.zeros_like(objective.caps)
    ranks = placer.best_ranks(option, loads, used)
    assert ranks is not None
    assert option.is_legal(ranks, objective.problem.topology)
    assert placer.best_ranks(option, loads, used, frozenset({1, 2})) is None
    assert set(placer.best_ranks(option, loads, used, frozenset({2, 3})) or ()) == {2, 3}


@pytest.mark.parametrize("room", [1.0, 0.02])
def test_the_best_group_is_that_of_trying_each(
    room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, surrogate = objective_of(a_problem(a_workload(a_table(dim=256)), hosts(16, 4)))
    placer = GreedyPartitioner(objective, surrogate)
    rng = np.random.default_rng(0)
    options = [o for o in objective.space.options[0] if objective.legal(o).same_group]
    assert len(options) > 1
    best_groups = []
    for _ in range(20):
        loads, free_share = rng.random((16, PHASES)), rng.random((2, 16))
        used = objective.caps * (1 - room * free_share)
        best_groups.append([placer.best_ranks(option, loads, used) for option in options])
    monkeypatch.setattr(GreedyPartitioner, "_fill_group", lambda *_: None)
    rng = np.random.default_rng(0)
    for before in best_groups:
        loads, free_share = rng.random((16, PHASES)), rng.random((2, 16))
        used = objective.caps * (1 - room * free_share)
        assert [placer.best_ranks(option, loads, used) for option in options] == before


def test_tied_tables_share_their_ranks() -> None:
    pair = Constraints(co_locate="pair")
    tables = [a_table("a", constraints=pair), a_table("b"), a_table("c", constraints=pair)]
    objective, surrogate = objective_of(a_problem(a_workload(*tables), hosts(3)))
    plan = GreedyPartitioner(objective, surrogate).place_all(choose(objective, "TW/fused"))
    assert plan is not None
    assert plan[0][1] == plan[2][1] != plan[1][1]


@pytest.mark.parametrize("weights", [None, np.array([0.0, 1.0, 1.0, 5.0])])
def test_small_ranks_are_left_alone(weights: np.ndarray | None) -> None:
    tables = [a_table(f"t{i}", 500_000, 64) for i in range(3)]
    topology = Topology(3, 3, (10 * MIB, 300 * MIB, 300 * MIB), (0,) * 3)
    objective, surrogate = objective_of(a_problem(a_workload(*tables), topology))
    plan = GreedyPartitioner(objective, surrogate, weights).place_all(choose(objective, "TW/fused"))
    assert plan is not None
    assert all(0 not in ranks for _, ranks in plan)
