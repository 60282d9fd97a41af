"""The study proposes ranked plans, and stops when told."""

from __future__ import annotations

from search.propose.study import Study
from tests.search.problems import assert_valid, objective_of, random_problem


def a_study(seed: int = 0) -> Study:
    objective, surrogate = objective_of(random_problem(2))
    return Study(objective, surrogate, seed)


def test_best_first_and_scored_on_the_timeline() -> None:
    study = a_study()
    found = study.run(8)
    assert 1 <= len(found) <= 8
    times = [ms for _, ms in found]
    assert times == sorted(times)
    for plan, ms in found:
        assert_valid(study.objective, plan)
        assert abs(float(study.objective.score([plan])[0]) - ms) <= 1e-9 * ms


def test_it_stops_when_told() -> None:
    asked: list[int] = []

    def after_two() -> bool:
        asked.append(1)
        return len(asked) == 2

    assert len(a_study().run(50, after_two)) <= 2
    assert len(asked) == 2


def test_seeds_differ_after_the_first_trial() -> None:
    runs = [[ms for _, ms in a_study(seed).run(6)] for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
