"""Counts of a monitor in its windows, and the workload that its ids imply."""

from __future__ import annotations

import pytest

pytest.importorskip("torchrec")

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from predictor.model.workload import Workload
from shardopt.live import monitor as window
from shardopt.live.monitor import SHARE, StepWindow
from shardopt.live.reshard import observed_workload
from shardopt.stats.collect import ReadOptions
from shardopt.stats.counts import Bags, FeatureCounts
from shardopt.stats.result import summarise
from tests.distributed import live_case as case


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(window, "time", fake)
    return fake


def batch(ids: list[int], lengths: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b"], values=torch.tensor(ids), lengths=torch.tensor(lengths)
    )


SMALL = batch([1, 2, 2, 7], [1, 2, 0, 1])


def counting(monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds: float) -> list[float]:
    """When ids were counted, each time for so many seconds."""
    at: list[float] = []
    bags_of = window._bags_of

    def slow(features: object, turn: int) -> object:
        at.append(clock.now)
        clock.now += seconds
        return bags_of(features, turn)

    monkeypatch.setattr(window, "_bags_of", slow)
    return at


def test_counting_takes_its_share_whatever_it_costs(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    at = counting(monkeypatch, clock, 0.02)
    step_window = StepWindow()
    for _ in range(1000):
        clock.now += 0.06
        step_window.add(SMALL)
    assert 0.02 * len(at) / clock.now == pytest.approx(SHARE, rel=0.4)
    assert len(at) > 5
    assert step_window.step_ms == pytest.approx(60)
    assert all(later - earlier > 6 for earlier, later in pairwise(at))


def test_what_one_window_spent_the_next_ones_pay_back(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    at = counting(monkeypatch, clock, 0.3)
    credit = 0.0
    for _ in range(4):
        step_window = StepWindow(credit_s=credit)
        for _ in range(50):
            clock.now += 0.06
            step_window.add(SMALL)
        credit = step_window.credit_s
    assert len(at) == 4, "one in each window, and no more"
    assert credit < -1


def test_an_evaluation_is_no_time_to_count_in(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    at = counting(monkeypatch, clock, 0.02)
    step_window = StepWindow()
    for seconds in (0.06, 600.0, *[0.06] * 50):
        clock.now += seconds
        step_window.add(SMALL)
    assert len(at) == 1
    assert step_window.step_ms == pytest.approx(60)


def test_a_rank_that_counts_no_ids(clock: Clock) -> None:
    step_window = StepWindow(counts_ids=False)
    step_window.add(None)
    assert step_window.steps == 1
    assert not step_window.counts


def test_of_large_batches_some_samples_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "MOST_AT_ONCE", 3)
    large = {"x": batch([1, 2, 2, 7, 8, 9], [1, 2, 0, 3]), "y": SMALL}
    # 3 of 10 ids: one of the two samples, and then the other
    turns = [dict(window._bags_of(large, turn)) for turn in range(3)]
    assert [turn["a"].ids.tolist() for turn in turns] == [[1], [2, 2], [1]]
    assert [turn["b"].ids.tolist() for turn in turns] == [[], [7, 8, 9], []]
    monkeypatch.setattr(window, "MOST_AT_ONCE", 10)
    bags = dict(window._bags_of(SMALL, 5))
    assert [bags[name].ids.tolist() for name in "ab"] == [[1, 2, 2], [7]]
    assert [bags[name].lengths.tolist() for name in "ab"] == [[1, 2], [0, 1]]


def test_what_are_no_ids_is_named() -> None:
    with pytest.raises(TypeError, match="got list as the ids of a step"):
        StepWindow().add([1, 2])


def test_a_step_that_counts_nothing_costs_next_to_nothing() -> None:
    step_window = StepWindow(counts_ids=False)
    start = time.process_time()
    for _ in range(10_000):
        step_window.add(SMALL)
    assert time.process_time() - start < 0.2, "20 us a step"


def observed(load: Workload, lengths: list[int], path: Path) -> Workload:
    """After samples of so many ids of the first feature."""
    counts = FeatureCounts(1000)
    ids = np.arange(sum(lengths), dtype=np.int64) % 100
    counts.add(Bags(ids, np.array(lengths, dtype=np.int64)))
    features = summarise({"f0": counts}, ReadOptions(rows={"f0": 5000}), 0)
    return observed_workload(load, list(features), path / "stats.npz")


def test_the_spread_of_the_ids_per_sample_is_handed_on(tmp_path: Path) -> None:
    feature, uncounted = (
        table.features[0] for table in observed(case.workload(), [10, 50] * 20, tmp_path).tables[:2]
    )
    assert feature.pooling_factor == 30
    assert feature.pooling_factor_std == pytest.approx(20)
    assert uncounted == case.workload().tables[1].features[0], "nobody counted it"


def test_no_spread_beyond_floor_and_ceiling(tmp_path: Path) -> None:
    load = case.workload()
    spread = replace(load.tables[0].features[0], pooling_factor_std=5.0)
    load = replace(load, tables=(replace(load.tables[0], features=(spread,)), *load.tables[1:]))
    feature = observed(load, [3, 4] * 20, tmp_path).tables[0].features[0]
    assert (feature.pooling_factor, feature.pooling_factor_std) == (3.5, None)
