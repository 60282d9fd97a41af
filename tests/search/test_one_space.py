"""The search of one space."""

from __future__ import annotations

import pytest

from search.candidate import Candidate
from search.one_space import IMPROVED, _starts


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
