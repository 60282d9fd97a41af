"""The plans of a rounding packed, and rounded again."""

from __future__ import annotations

import pytest

from search.bound.exchange_set import ExchangeSet
from search.bound.lower_bound import LowerBound
from search.improve.cycle_cuts import critical_cut
from search.objective import Assignment, Objective
from search.problem import silent
from search.propose import packed
from search.propose.packed import CutRounding, RoundingPacker
from search.propose.rounding import Rounding
from search.stop import Stop
from search.surrogate import Surrogate
from tests.search.problems import (
    a_problem,
    a_table,
    a_workload,
    assert_valid,
    hosts,
    objective_of,
)


def a_packer(stop: Stop) -> tuple[RoundingPacker, list]:  # type: ignore[type-arg]
    tables = [
        a_table(f"t{i}", 50_000 * (i % 7 + 1), (32, 64, 128)[i % 3], 1.0 + 7 * (i * i % 5))
        for i in range(9)
    ]
    objective, surrogate = objective_of(a_problem(a_workload(*tables, batch_size=32768), hosts(4)))
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    bound.solve(200)
    rounding = Rounding(objective, surrogate, 0)
    return RoundingPacker(rounding, bound, stop), list(rounding.propose(bound))


def test_packed_plans_are_valid_and_the_same_once_more() -> None:
    packer, found = a_packer(Stop(effort=0.1))
    plans = list(packer.pack(found, silent))
    for one in plans:
        assert_valid(packer.objective, one.assignment)
    best = min(one.iteration_ms for one in plans)
    assert best <= min(one.iteration_ms for one in found)
    assert list(packer.pack(found, silent)) == plans


def test_late_it_packs_nothing() -> None:
    packer, found = a_packer(Stop(effort=0.1, time_limit_s=1.0, clock=iter(range(99)).__next__))
    assert list(packer.pack(found, silent)) == []


def test_a_plan_of_a_refuted_set_is_not_rounded_again() -> None:
    packer, found = a_packer(Stop(effort=0.1))
    packer.bound.promising = lambda most: []  # type: ignore[method-assign]
    one = found[0]
    assert packer._again(one, 10, lambda *_: False) == one


def test_where_the_bound_is_far_more_plans_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    packer, found = a_packer(Stop(effort=0.1))
    counts, best = [], []
    for wide in (1.0, 0.0):
        monkeypatch.setattr(packed, "WIDE", wide)
        plans = list(packer.pack(found, silent))
        counts.append(len(plans))
        best.append(min(one.iteration_ms for one in plans))
    assert counts[1] > counts[0]
    assert best[1] <= best[0]


def one_busy_table() -> tuple[Objective, Surrogate]:
    tables = [a_table("busy", 1_000_000, 128, 100.0), *(a_table(f"t{i}") for i in range(7))]
    return objective_of(a_problem(a_workload(*tables, batch_size=16384), hosts(8)))


def a_solved_set(objective: Objective) -> tuple[ExchangeSet, float]:
    """The set with the least bound, and what is proven of all plans."""
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    proven = bound.solve(200)
    one = bound.promising(1)[0]
    assert Rounding.solve(one, lambda: False)
    return one, proven


def round_again(
    objective: Objective, surrogate: Surrogate, cuts: int
) -> tuple[Assignment, Assignment]:
    """A set's first plan, and the plan after so many cuts."""
    rounding = Rounding(objective, surrogate, 0)
    one, _ = a_solved_set(objective)
    again = CutRounding(surrogate, one)
    first = now = rounding.place(one.rounded())
    for _ in range(cuts):
        assert now is not None
        cut = critical_cut(objective, now)
        assert cut is not None
        again.add(cut)
        now = rounding.place(again.rounded())
    assert first is not None
    assert now is not None
    return first, now


def test_without_cuts_the_program_is_that_of_the_set() -> None:
    objective, surrogate = one_busy_table()
    one, _ = a_solved_set(objective)
    again = CutRounding(surrogate, one)
    assert again.rounded() is not None
    assert again.program.optimum <= one.proven * (1 + 1e-6)


def test_cuts_raise_the_program_towards_the_plan() -> None:
    objective, surrogate = one_busy_table()
    rounding = Rounding(objective, surrogate, 0)
    one, proven = a_solved_set(objective)
    plan = rounding.place(one.rounded())
    assert plan is not None
    cut = critical_cut(objective, plan)
    assert cut is not None
    again = CutRounding(surrogate, one)
    again.rounded()
    before = again.program.optimum
    again.add(cut)
    again.rounded()
    assert before <= again.program.optimum
    assert again.program.optimum >= proven * (1 - 1e-3)


def test_plans_of_options_chosen_again_are_valid() -> None:
    objective, surrogate = one_busy_table()
    first, again = round_again(objective, surrogate, 2)
    assert_valid(objective, again)
    assert objective.score([again])[0] <= objective.score([first])[0] * 1.05


def test_a_set_without_memory_has_no_options() -> None:
    objective, surrogate = one_busy_table()
    one, _ = a_solved_set(objective)
    again = CutRounding(surrogate, one)
    again.program.room[0].SetUb(0.0)
    assert again.rounded() is None
    assert Rounding(objective, surrogate, 0).place(None) is None
