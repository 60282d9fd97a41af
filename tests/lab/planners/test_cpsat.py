"""CP-SAT finds the best joint choice on its own objective, from a hint or without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.planners import cpsat
from lab.planners.cpsat import CpSat
from predictor.units import MIB
from search.objective import Assignment
from tests.search.problems import (
    a_problem,
    a_table,
    a_workload,
    assert_valid,
    every_plan,
    hosts,
    objective_of,
)


def setting(hbm: int = 4096 * MIB):  # type: ignore[no-untyped-def]
    tables = (a_table(n, 10**6, 64, p) for n, p in (("a", 5.0), ("b", 20.0), ("c", 1.0)))
    return objective_of(a_problem(a_workload(*tables, batch_size=32768), hosts(2, hbm=hbm)))


def surrogate_ms(objective, surrogate, plan: Assignment) -> float:  # type: ignore[no-untyped-def]
    """The value CP-SAT gives to one plan: no other is allowed."""
    pinned = tuple((replace(option, pinned=ranks),) for option, ranks in plan)
    found = CpSat(objective, surrogate).solve(pinned, 5.0, 0)
    assert found is not None
    return found.surrogate_ms


@pytest.mark.parametrize("hbm", [4096 * MIB, 450 * MIB])
def test_it_finds_its_optimum(hbm: int) -> None:
    objective, surrogate = setting(hbm)
    found = CpSat(objective, surrogate).solve(objective.space.options, 20.0, 0)
    assert found is not None
    assert_valid(objective, found.assignment)
    some = list(every_plan(objective))[::37]
    assert min(surrogate_ms(objective, surrogate, p) for p in some) >= found.surrogate_ms - 1e-3


def test_a_hint_is_never_made_worse() -> None:
    objective, surrogate = setting()
    hint = next(every_plan(objective))
    found = CpSat(objective, surrogate).solve(objective.space.options, 0.5, 0, hint)
    assert found is not None
    assert found.surrogate_ms <= surrogate_ms(objective, surrogate, hint) + 1e-3


def test_none_where_nothing_fits_or_the_model_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objective, surrogate = setting(200 * MIB)
    narrow = [[o for o in opts if o.label == "TW/fused"] for opts in objective.space.options]
    roomy = setting()[0].space.options
    whole = [[o for o in opts if o.label == "TW/fused"] for opts in roomy]
    assert CpSat(objective, surrogate).solve(whole, 1.0, 0) is None
    assert not any(narrow)
    monkeypatch.setattr(cpsat, "MAX_VARIABLES", 3)
    assert CpSat(objective, surrogate).solve(objective.space.options, 1.0, 0) is None


def test_small_tables_are_counted_in_small_units() -> None:
    """Rounded up to MiB, two tables of a few KiB would not fit a rank of 100 KiB."""
    tables = (a_table(n, 100, 16, 1.0) for n in "ab")
    workload = a_workload(*tables, batch_size=16)
    objective, surrogate = objective_of(a_problem(workload, hosts(1, hbm=100 * 1024)))
    assert CpSat(objective, surrogate).solve(objective.space.options, 1.0, 0) is not None
