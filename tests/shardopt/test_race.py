"""Successive elimination on simulated timings, and what is told of them."""

import random
import statistics
from collections.abc import Mapping, Sequence

import pytest

from predictor.errors import InputError
from shardopt.race import (
    TORCHREC,
    Entrant,
    Race,
    median_interval,
    ratio_of,
    run_final,
    run_race,
)

TRUE_MS = {"a": 50.0, "b": 51.0, "slow": 60.0}


def race_of(names: Sequence[str]) -> Race:
    race = Race()
    race.enter({name: Entrant(name, name) for name in names})
    return race


class Played:
    """Sessions of rounds with some noise each, and drift that all plans share."""

    def __init__(self, true_ms: Mapping[str, float], seed: int = 0, noise: float = 0.03) -> None:
        self.true_ms, self.rng, self.noise = true_ms, random.Random(seed), noise
        self.at, self.orders = 0.0, list[list[str]]()

    def now(self) -> float:
        return self.at

    def run(
        self, race: Race, session: int, order: Sequence[str], until: float
    ) -> Mapping[str, str]:
        self.orders.append(list(order))
        self.at = until
        for i in range(15):
            drift = 1 + 0.2 * session
            times = {n: self.true_ms[n] * drift * self.rng.gauss(1, self.noise) for n in order}
            race.add((session, i), times)
        return {}


def run(seed: int, true_ms: Mapping[str, float]) -> Race:
    race = race_of(list(true_ms))
    run_race(race, Played(true_ms, seed), 180.0)
    return race


def test_a_plan_that_is_clearly_slower_is_out_early() -> None:
    race = run(0, TRUE_MS)
    assert race.dropped["slow"] == 15
    assert race.leader == "a"
    assert len(race.times["slow"]) == 15


def test_the_fastest_plan_is_hardly_ever_dropped() -> None:
    dropped = ["a" in run(seed, TRUE_MS).dropped for seed in range(100)]
    assert statistics.fmean(dropped) <= 0.05


def test_equal_plans_stay() -> None:
    all_stay = [not run(seed, dict.fromkeys("abcd", 50.0)).dropped for seed in range(100)]
    assert statistics.fmean(all_stay) >= 0.95


def test_a_gain_and_its_interval_hold_the_truth() -> None:
    inside = 0
    for seed in range(100):
        race = race_of(["a", TORCHREC])
        sessions = Played({"a": 50.0, TORCHREC: 52.0}, seed)
        sessions.run(race, 1, ["a", TORCHREC], 1.0)
        ratio = race.ratio("a", TORCHREC)
        assert ratio is not None
        assert ratio.interval is not None
        inside += ratio.interval[0] <= 50 / 52 <= ratio.interval[1]
    assert inside >= 90


def test_the_plan_of_torchrec_stays_and_the_race_ends_without_it() -> None:
    race = run(0, {"a": 50.0, TORCHREC: 80.0, "b": 70.0})
    assert race.dropped == {"b": 15}
    assert race.sessions == 1  # the best is told apart
    confirmation = race.confirmation()
    assert confirmation.gain is not None
    assert confirmation.gain[0] == pytest.approx(0.375, abs=0.03)


@pytest.mark.parametrize("seed", range(10))
def test_the_answer_never_measured_slower_than_torchrecs(seed: int) -> None:
    race = race_of(["a", "b", TORCHREC])
    run_race(race, Played(dict.fromkeys(["a", "b", TORCHREC], 50.0), seed, noise=0.2), 180.0)
    confirmation = race.confirmation()
    times = {plan.name: plan.median_ms for plan in confirmation.plans}
    assert confirmation.best.median_ms is not None
    assert confirmation.best.median_ms <= (times[TORCHREC] or 0)
    assert confirmation.gain is not None
    assert confirmation.gain[0] >= 0


def test_the_gain_of_a_chosen_plan_is_not_flattered_by_the_choice() -> None:
    """Eight plans that are all as fast as TorchRec's: the best of them looks faster by luck."""
    names = [f"plan {i}" for i in range(8)]
    first, last = [], []
    for seed in range(40):
        race = race_of([*names, TORCHREC])
        sessions = Played(dict.fromkeys([*names, TORCHREC], 50.0), seed, noise=0.1)
        race.sessions = 1
        sessions.run(race, 1, [*names, TORCHREC], 15.0)
        chosen = race.leader
        assert chosen is not None
        first.append(1 - (race.median_ms(chosen) or 0) / (race.median_ms(TORCHREC) or 0))
        run_final(race, sessions, 60.0)
        gain = race.confirmation().gain
        assert gain is not None
        assert gain[0] >= 0  # else it is TorchRec's plan
        if race.chosen is not None:
            ratio = race.ratio(race.chosen, TORCHREC, since=race.final)
            assert ratio is not None
            last.append(1 - ratio.value)
    assert statistics.fmean(first) > 0.05
    assert abs(statistics.fmean(last)) < 0.02


def test_a_plan_that_loses_the_final_rounds_is_not_the_answer() -> None:
    race = race_of(["a", TORCHREC])
    for i in range(8):
        race.add((1, i), {"a": 49.0, TORCHREC: 50.0})
    run_final(race, Played({"a": 55.0, TORCHREC: 50.0}), 60.0)
    confirmation = race.confirmation()
    assert (confirmation.best.name, confirmation.gain) == (TORCHREC, (0.0, 0.0, 0.0))


def test_a_lucky_plan_of_few_rounds_is_chosen_only_where_no_known_one_is_faster() -> None:
    for known_ms, chosen in ((48.0, "known"), (52.0, "lucky")):
        race = race_of(["known", "lucky", TORCHREC])
        for i in range(8):
            race.add(
                (1, i), {"known": known_ms, TORCHREC: 50.0} | ({"lucky": 40.0} if i < 2 else {})
            )
        true_ms = {"known": known_ms, "lucky": 60.0, TORCHREC: 50.0}
        run_final(race, Played(true_ms), 60.0)
        assert race.chosen == chosen
        assert race.confirmation().best.name == ("known" if chosen == "known" else TORCHREC)


def test_drift_between_sessions_is_no_difference_between_plans() -> None:
    race = race_of([TORCHREC, "early", "late"])
    for session, name, drift in ((1, "early", 1.0), (2, "late", 2.0)):
        for i in range(8):
            race.add((session, i), {TORCHREC: 10.0 * drift, name: 9.0 * drift})
    assert race.median_ms("early") == pytest.approx(race.median_ms("late"))


def test_a_plan_under_two_names_runs_once() -> None:
    race = Race()
    names = race.enter({"plan 1": Entrant("same", "search"), TORCHREC: Entrant("same", "theirs")})
    assert names == {"plan 1": "plan 1", TORCHREC: "plan 1"}
    race.add((1, 0), {"plan 1": 3.0})
    confirmation = race.confirmation()
    assert [(p.name, p.found_by) for p in confirmation.plans] == [("plan 1", "search, theirs")]
    assert confirmation.gain == (0.0, 0.0, 0.0)


def test_each_plan_is_built_in_every_place() -> None:
    sessions = Played(dict.fromkeys(["a", "b", TORCHREC], 50.0))
    run_race(race_of(["a", "b", TORCHREC]), sessions, 180.0)
    for place in range(3):
        assert {order[place] for order in sessions.orders} == {"a", "b", TORCHREC}


def test_few_rounds_drop_nothing_and_give_no_interval() -> None:
    race = race_of(["a", "b"])
    for i in range(3):
        race.add((1, i), {"a": 1.0, "b": 2.0})
    assert race.slower(looks=3) == []
    ratio = race.ratio("a", "b")
    assert ratio is not None
    assert (ratio.value, ratio.interval) == (0.5, None)


def test_a_plan_that_was_taken_out_does_not_win() -> None:
    race = race_of(["a", "b"])
    race.add((1, 0), {"a": 1.0, "b": 2.0})
    race.drop("a", "rank 0 died")
    assert race.left == ["b"]
    assert race.leader == "b"
    race.drop("b")
    assert race.leader == "a"  # better than none
    assert race.confirmation().notes == ("a is out: rank 0 died",)


def test_nothing_timed_says_why() -> None:
    race = race_of(["a"])
    race.drop("a", "rank 0 died")
    assert race.leader is None
    with pytest.raises(InputError, match="rank 0 died"):
        race.confirmation()


def test_the_interval_of_a_median() -> None:
    assert median_interval([1.0] * 5) is None
    assert median_interval([1, 2, 3, 4, 5, 6]) == (1, 6)
    assert median_interval(list(range(10))) == (1, 8)
    assert median_interval(list(range(20))) == (5, 14)


def test_a_ratio_is_significant_where_nearly_all_rounds_agree() -> None:
    first = [10.0, 11.0, 12.0, 13.0, 12.0, 11.0, 10.0, 10.0]
    slower = [1.1 * value for value in first]
    assert ratio_of(slower, first).significant
    assert ratio_of(slower, first).value == pytest.approx(1.1)
    either = [value * (1.1 if i % 2 else 0.9) for i, value in enumerate(first)]
    assert not ratio_of(either, first).significant
    assert not ratio_of(slower[:5], first[:5]).significant
