"""What the searchers propose together."""

from __future__ import annotations

import pytest

from search import side_by_side
from search.bound.lower_bound import LowerBound
from search.candidate import Candidate
from search.improve.neighbourhoods import Neighbourhoods
from search.objective import Assignment
from search.problem import silent
from search.propose.annealed import FOUND_BY, AnnealedPlans
from search.propose.searchers import Proposer, rescue
from search.stop import Stop
from tests.search.problems import a_problem, a_table, a_workload, assert_valid, hosts, objective_of


def test_where_no_set_makes_a_plan_known_plans_are_annealed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AnnealedPlans, "_sets", lambda *_: [])
    tables = [a_table(f"t{i}", 100_000, 64, 40.0 + i) for i in range(6)]
    objective, surrogate = objective_of(a_problem(a_workload(*tables, batch_size=32768), hosts(2)))
    whole = [next(o for o in table if o.num_shards == 1) for table in objective.space.options]
    crowded = tuple((option, (0,)) for option in whole)
    known = Candidate(crowded, float(objective.score([crowded])[0]), "a baseline")
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    proposer = Proposer(objective, surrogate, Stop(effort=0.2), 0, bound, silent)
    found = proposer.propose(("annealing",), [known])
    assert found
    for one in found:
        assert_valid(objective, one.assignment)
    assert min(c.iteration_ms for c in found) < known.iteration_ms


def test_neighbourhoods_also_start_at_a_plan_that_was_made_in_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a plan that just fits if there is no other."""
    monkeypatch.setattr(side_by_side, "usable_cores", lambda: 1)  # what a fork notes is lost
    begun: list[tuple[Assignment, float]] = []

    def improve(
        self: Neighbourhoods, start: Assignment, work: float, *_: object
    ) -> tuple[Assignment, float]:
        begun.append((start, work))
        return start, float(self.objective.score([start])[0])

    monkeypatch.setattr(Neighbourhoods, "improve", improve)
    tables = [a_table(f"t{i}", 100_000, 64, 40.0 + i) for i in range(6)]
    objective, surrogate = objective_of(a_problem(a_workload(*tables, batch_size=32768), hosts(2)))
    whole = [next(o for o in table if o.num_shards == 1) for table in objective.space.options]

    def starts(*named: tuple[str, tuple[int, ...]]) -> list[tuple[Assignment, float]]:
        known = []
        for name, ranks in named:
            plan = tuple((o, (rank,)) for o, rank in zip(whole, ranks, strict=True))
            known.append(Candidate(plan, float(objective.score([plan])[0]), name))
        bound = LowerBound(objective.problem, objective.space, objective.scorer)
        begun.clear()
        Proposer(objective, surrogate, Stop(), 0, bound, silent).propose(("cpsat",), known)
        return [*begun]

    ((packed, all_of_it), (other, same)) = starts((FOUND_BY, (0, 1, 0, 1, 0, 1)))
    assert [ranks for _, ranks in packed] == [(0,), (1,)] * 3
    assert other == rescue(objective, Stop(), 0)[0][0].assignment
    assert same == all_of_it
    (best, second) = starts(
        (FOUND_BY, (0, 1, 0, 1, 0, 1)), (FOUND_BY, (0, 0, 0, 0, 0, 1)), ("greedy", (0,) * 6)
    )
    assert best == (packed, all_of_it)
    assert [ranks for _, ranks in second[0]] == [(0,)] * 6
    assert second[1] == all_of_it
