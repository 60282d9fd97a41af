"""HugeCTR's hybrid embedding: the threshold of its source and what moves under it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.runtimes.hugectr import HybridRule, HybridSplit
from predictor.model.distribution import Zipf
from predictor.model.workload import DenseArch, Feature, Table, Workload

RULE = HybridRule(duplicates=0.03, bandwidth_ratio=0.7)


def workload(batch: int = 4096, alpha: float = 1.1, tables: int = 3) -> Workload:
    made = tuple(
        Table(f"t{i}", 10 ** (3 + i), 16, (Feature(f"f{i}", 1.0, distribution=Zipf(alpha)),))
        for i in range(tables)
    )
    return Workload("small", batch, made, DenseArch(13, (16,), (8, 1), "dot", "fp16", "sgd"))


def test_a_row_at_the_threshold_is_twice_on_a_rank_with_the_chance_asked_for() -> None:
    batch, ranks = 65536, 8
    share = RULE.threshold(batch, ranks, 1) / batch
    local = batch // ranks
    pairs = local * (local - 1) / 2
    assert pairs * share**2 == pytest.approx(RULE.duplicates)


def test_across_hosts_an_exchange_and_a_reduction_cost_the_same() -> None:
    """``t`` occurrences leave their host with chance (h - 1) / h; one gradient goes round."""
    assert RULE.threshold(65536, 64, 8) == pytest.approx(8 * 0.7 * 8 / 7)
    assert RULE.threshold(1024, 64, 8) == RULE.threshold(65536, 64, 8)


@given(st.integers(2, 20000), st.floats(0, 2), st.sampled_from([(4, 1), (8, 1), (64, 8)]))
def test_shares_are_shares(batch: int, alpha: float, shape: tuple[int, int]) -> None:
    split = HybridSplit.of(workload(batch, alpha), RULE, *shape)
    assert -1e-9 <= split.infrequent <= 1 + 1e-9
    assert 0 <= split.needed <= 1 - split.infrequent + 1e-9
    assert 0 <= split.elements <= 16 * (1e3 + 1e4 + 1e5)


def test_larger_batches_have_more_frequent_rows() -> None:
    small, large = (HybridSplit.of(workload(batch), RULE, 64, 8) for batch in (512, 4096))
    assert large.infrequent < small.infrequent
    assert large.elements > small.elements


def test_rows_drawn_alike_are_frequent_all_or_none() -> None:
    split = HybridSplit.of(workload(64, alpha=0.0, tables=1), RULE, 64, 8)
    assert (split.infrequent, split.elements) == (1.0, 0.0)
    every = HybridSplit.of(workload(4096, alpha=0.0, tables=1), RULE, 64, 8)
    assert (every.infrequent, every.elements) == (0.0, 16e3)
