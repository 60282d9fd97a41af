"""Successive elimination on simulated timings."""

import random
import statistics

from shardopt.bench.race import Race

TRUE_MS = {"a": 50.0, "b": 51.0, "slow": 60.0}


def run(seed: int, true_ms: dict[str, float], looks: int = 6, each: int = 15) -> Race:
    """Rounds with 3 % of noise each, and drift that all plans share."""
    rng = random.Random(seed)
    race = Race(list(true_ms), looks)
    for look in range(looks):
        for _ in range(each):
            drift = 1 + 0.2 * look / looks
            race.add({n: true_ms[n] * drift * rng.gauss(1, 0.03) for n in race.left})
        race.eliminate()
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
    kept = [not run(seed, dict.fromkeys("abcd", 50.0)).dropped for seed in range(100)]
    assert statistics.fmean(kept) >= 0.95


def test_a_gain_and_its_interval_hold_the_truth() -> None:
    inside = 0
    for seed in range(100):
        ratio = run(seed, {"a": 50.0, "b": 52.0}, looks=1, each=30).ratio("a", "b")
        assert ratio is not None
        assert ratio.interval is not None
        inside += ratio.interval[0] <= 50 / 52 <= ratio.interval[1]
    assert inside >= 90


def test_few_rounds_drop_nothing_and_give_no_interval() -> None:
    race = Race(["a", "b"], 3)
    for _ in range(3):
        race.add({"a": 1.0, "b": 2.0})
    assert race.eliminate() == []
    ratio = race.ratio("a", "b")
    assert ratio is not None
    assert (ratio.value, ratio.interval) == (0.5, None)


def test_a_plan_that_was_taken_out_does_not_win() -> None:
    race = Race(["a", "b"], 3)
    race.add({"a": 1.0, "b": 2.0})
    race.drop("a")
    assert race.left == ["b"]
    assert race.leader == "b"
    assert race.ratio("b", "a") is not None
    race.drop("b")
    assert race.leader == "a"  # better than none


def test_nothing_timed_has_no_leader() -> None:
    assert Race(["a"], 1).leader is None
