"""The plans of a rounding packed."""

from __future__ import annotations

import pytest

from search.bound.lower_bound import LowerBound
from search.candidate import Candidate
from search.objective import Objective
from search.problem import silent
from search.propose import packed
from search.propose.packed import pack_plans
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


def a_rounding() -> tuple[Objective, list[Candidate], LowerBound]:
    tables = [
        a_table(f"t{i}", 50_000 * (i % 7 + 1), (32, 64, 128)[i % 3], 1.0 + 7 * (i * i % 5))
        for i in range(9)
    ]
    objective, surrogate = objective_of(a_problem(a_workload(*tables, batch_size=32768), hosts(4)))
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    bound.solve(200)
    return objective, list(Rounding(objective, surrogate).propose(bound)), bound


def pack(stop: Stop) -> tuple[Objective, list[Candidate], list[Candidate]]:
    objective, found, bound = a_rounding()
    surrogate = Surrogate(objective)
    return objective, found, list(pack_plans(objective, surrogate, found, bound, stop, silent))


def test_packed_plans_are_valid_and_the_same_once_more() -> None:
    objective, found, plans = pack(Stop(effort=0.1))
    for one in plans:
        assert_valid(objective, one.assignment)
    best = min(one.iteration_ms for one in plans)
    assert best <= min(one.iteration_ms for one in found)
    again = pack(Stop(effort=0.1))[2]
    assert [one.iteration_ms for one in again] == [one.iteration_ms for one in plans]


def test_late_it_packs_nothing() -> None:
    assert pack(Stop(effort=0.1, time_limit_s=1.0, clock=iter(range(99)).__next__))[2] == []


def test_where_the_bound_is_far_more_plans_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "WORTH", -1.0)
    counts, best = [], []
    for wide in (1.0, 0.0):
        monkeypatch.setattr(packed, "WIDE", wide)
        plans = pack(Stop(effort=0.1))[2]
        counts.append(len(plans))
        best.append(min(one.iteration_ms for one in plans))
    assert counts[1] > counts[0]
    assert best[1] <= best[0]
