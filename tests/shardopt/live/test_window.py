"""What a monitor counts, and how much of the time it takes."""

import time
from itertools import pairwise

import pytest

pytest.importorskip("torchrec")

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardopt.live import window
from shardopt.live.window import SHARE, StepWindow


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(window, "time", made)
    return made


def batch(ids: list[int], lengths: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b"], values=torch.tensor(ids), lengths=torch.tensor(lengths)
    )


SMALL = batch([1, 2, 2, 7], [1, 2, 0, 1])


def counting(monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds: float) -> list[float]:
    """When ids were counted, each time for so many seconds."""
    at: list[float] = []
    whole = window._bags_of

    def slow(features: object, turn: int) -> object:
        at.append(clock.now)
        clock.now += seconds
        return whole(features, turn)

    monkeypatch.setattr(window, "_bags_of", slow)
    return at


def test_counting_takes_its_share_whatever_it_costs(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    at = counting(monkeypatch, clock, 0.02)
    seen = StepWindow()
    for _ in range(1000):
        clock.now += 0.06
        seen.add(SMALL)
    assert 0.02 * len(at) / clock.now == pytest.approx(SHARE, rel=0.4)
    assert len(at) > 5
    assert seen.step_ms == pytest.approx(60)
    assert all(later - earlier > 6 for earlier, later in pairwise(at))


def test_what_one_window_spent_the_next_ones_pay_back(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    at = counting(monkeypatch, clock, 0.3)
    credit = 0.0
    for _ in range(4):
        seen = StepWindow(credit_s=credit)
        for _ in range(50):
            clock.now += 0.06
            seen.add(SMALL)
        credit = seen.credit_s
    assert len(at) == 4, "one in each window, and no more"
    assert credit < -1


def test_an_evaluation_is_no_time_to_count_in(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    at = counting(monkeypatch, clock, 0.02)
    seen = StepWindow()
    for took in (0.06, 600.0, *[0.06] * 50):
        clock.now += took
        seen.add(SMALL)
    assert len(at) == 1
    assert seen.step_ms == pytest.approx(60)


def test_a_rank_that_counts_no_ids(clock: Clock) -> None:
    seen = StepWindow(counts_ids=False)
    seen.add(None)
    assert seen.steps == 1
    assert not seen.counts


def test_of_large_batches_some_samples_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "MOST_AT_ONCE", 3)
    large = {"x": batch([1, 2, 2, 7, 8, 9], [1, 2, 0, 3]), "y": SMALL}
    # 3 of 10 ids: one of the two samples, and then the other
    turns = [dict(window._bags_of(large, turn)) for turn in range(3)]
    assert [turn["a"].ids.tolist() for turn in turns] == [[1], [2, 2], [1]]
    assert [turn["b"].ids.tolist() for turn in turns] == [[], [7, 8, 9], []]
    monkeypatch.setattr(window, "MOST_AT_ONCE", 10)
    whole = dict(window._bags_of(SMALL, 5))
    assert [whole[name].ids.tolist() for name in "ab"] == [[1, 2, 2], [7]]
    assert [whole[name].lengths.tolist() for name in "ab"] == [[1, 2], [0, 1]]


def test_what_are_no_ids_is_named() -> None:
    with pytest.raises(TypeError, match="got list as the ids of a step"):
        StepWindow().add([1, 2])


def test_a_step_that_counts_nothing_costs_next_to_nothing() -> None:
    seen = StepWindow(counts_ids=False)
    start = time.process_time()
    for _ in range(10_000):
        seen.add(SMALL)
    assert time.process_time() - start < 0.2, "20 us a step"
