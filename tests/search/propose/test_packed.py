"""The plans of a rounding packed, and rounded again."""

from __future__ import annotations

import pytest

from search.bound.lower_bound import LowerBound
from search.problem import silent
from search.propose import packed
from search.propose.packed import RoundingPacker
from search.propose.rounding import Rounding
from search.stop import Stop
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
