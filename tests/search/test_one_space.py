"""The search of one space."""

from __future__ import annotations

import pytest

from search.bound.lower_bound import LowerBound
from search.candidate import Candidate
from search.one_space import IMPROVED, _starts
from search.solve import solve
from search.stop import Stop
from tests.search.problems import several_lookups


def ranked(*searchers: str) -> list[Candidate]:
    return [Candidate((), float(ms), name) for ms, name in enumerate(searchers)]


@pytest.mark.parametrize(
    ("searchers", "taken"),
    [
        (("packing",) * 6, [0, 1, 2, 3]),
        (("packing",) * 5 + ("optuna", "cpsat"), [0, 1, 2, 5]),
        (("packing", "rounding", "packing", "rounding", "optuna"), [0, 1, 2, 4]),
        (("packing", "optuna"), [0, 1]),
    ],
)
def test_local_search_starts_from_the_best_and_one_of_another_searcher(
    searchers: tuple[str, ...], taken: list[int]
) -> None:
    plans = ranked(*searchers)
    assert IMPROVED == 4
    assert _starts(plans) == [plans[i] for i in taken]


def test_the_bound_is_refined_in_full_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    efforts: list[float] = []

    def tighten(self: LowerBound, steps: int, upper_ms: float, effort: float, *_: object) -> float:
        efforts.append(effort)
        return self.solve(steps, upper_ms)

    monkeypatch.setattr(LowerBound, "tighten", tighten)
    for prove in (False, True):
        solve(several_lookups(1, 4), Stop(effort=0.01), 0, scenarios=(), prove=prove)
    assert efforts[1] > 5 * efforts[0]
