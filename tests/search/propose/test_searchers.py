"""What the searchers propose together."""

from __future__ import annotations

import pytest

from search.bound.lower_bound import LowerBound
from search.candidate import Candidate
from search.problem import silent
from search.propose.rounding import Rounding
from search.propose.searchers import Proposer
from search.stop import Stop
from tests.search.problems import a_problem, a_table, a_workload, assert_valid, hosts, objective_of


def test_where_no_rounded_plan_can_be_placed_known_plans_are_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Rounding, "propose", lambda *_: iter(()))
    tables = [a_table(f"t{i}", 100_000, 64, 40.0 + i) for i in range(6)]
    objective, surrogate = objective_of(a_problem(a_workload(*tables, batch_size=32768), hosts(2)))
    whole = [next(o for o in table if o.num_shards == 1) for table in objective.space.options]
    crowded = tuple((option, (0,)) for option in whole)
    known = Candidate(crowded, float(objective.score([crowded])[0]), "a baseline")
    bound = LowerBound(objective.problem, objective.space, objective.scorer)
    proposer = Proposer(objective, surrogate, Stop(effort=0.2), 0, bound, silent)
    found = proposer.propose(("rounding",), [known])
    assert found
    for one in found:
        assert_valid(objective, one.assignment)
    assert min(c.iteration_ms for c in found) < known.iteration_ms
