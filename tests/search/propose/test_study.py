"""The study proposes ranked plans, and stops when told."""

from __future__ import annotations

from search.propose.study import Study
from tests.search.problems import assert_valid, objective_of, random_problem


def a_study(seed: int = 0) -> Study:
    objective, surrogate = objective_of(random_problem(2))
    return Study(objective, surrogate, seed)


def test_best_first_and_scored_on_the_timeline() -> None:
    study = a_study()
    results = study.run(8)
    assert 1 <= len(results) <= 8
    times = [ms for _, ms in results]
    assert times == sorted(times)
    for plan, ms in results:
        assert_valid(study.objective, plan)
        assert abs(float(study.objective.score([plan])[0]) - ms) <= 1e-9 * ms


def test_it_stops_when_told() -> None:
    calls: list[int] = []

    def after_two() -> bool:
        calls.append(1)
        return len(calls) == 2

    assert len(a_study().run(50, after_two)) <= 2
    assert len(calls) == 2


def test_seeds_differ_after_the_first_trial() -> None:
    runs = [[ms for _, ms in a_study(seed).run(6)] for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
