"""Sketches keep the bounds they promise, whatever the ids and however they are cut into chunks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.stats.counts import HotRows, IdSample
from tests.shardopt.stats.id_distributions import DISTRIBUTIONS, counted, draw

streams = st.lists(
    st.lists(st.one_of(st.integers(0, 12), st.integers(0, 2**62)), max_size=40), max_size=12
)


def feed(sketch: IdSample | HotRows, chunks: list[list[int]]) -> Counter[int]:
    for chunk in chunks:
        ids, counts = np.unique(np.array(chunk, dtype=np.int64), return_counts=True)
        sketch.add(ids, counts)
        if isinstance(sketch, IdSample):
            sketch.thin()
    return Counter(i for chunk in chunks for i in chunk)


@given(streams, st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_rows_of_the_sample_are_counted_exactly(chunks: list[list[int]], limit: int) -> None:
    sample = IdSample(limit)
    true = feed(sample, chunks)
    assert len(sample.ids) <= limit
    assert (np.diff(sample.ids) > 0).all()
    assert {int(i): int(n) for i, n in zip(sample.ids, sample.counts, strict=True)} == {
        int(i): true[int(i)] for i in sample.ids
    }
    if len(true) <= limit:
        assert sample.level == 0
        assert len(sample.ids) == len(true)


@given(streams, st.integers(1, 30), st.randoms())
@settings(max_examples=100, deadline=None)
def test_the_sample_depends_on_neither_order_nor_chunks(
    chunks: list[list[int]], limit: int, random: object
) -> None:
    in_chunks, in_order = IdSample(limit), IdSample(limit)
    feed(in_chunks, chunks)
    ids = [i for chunk in chunks for i in chunk]
    random.shuffle(ids)  # type: ignore[attr-defined]
    feed(in_order, [ids[:7], ids[7:]])
    assert in_chunks.level == in_order.level
    assert in_chunks.ids.tolist() == in_order.ids.tolist()
    assert in_chunks.counts.tolist() == in_order.counts.tolist()


@given(streams, st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_hot_rows_are_bounded_from_both_sides(chunks: list[list[int]], capacity: int) -> None:
    hot = HotRows(capacity)
    true = feed(hot, chunks)
    followed = set(hot.ids.tolist())
    assert len(followed) <= capacity
    assert hot.floor * (capacity + 1) <= sum(true.values())
    for row, low, slack in zip(hot.ids, hot.counts, hot.slack, strict=True):
        assert low <= true[int(row)] <= low + slack
    assert all(true[row] <= hot.floor for row in true if row not in followed)


def test_the_number_of_rows_is_estimated_within_its_error() -> None:
    limit = 4000
    ids = draw(DISTRIBUTIONS["zipf 0.8"], 300_000, 400_000, 1, shuffled=True)
    counts = counted(ids, limit, chunks=9)
    assert counts.sample.level > 3
    sigma = 1.2 / limit**0.5
    true = len(np.unique(ids))
    assert counts.spectrum(300_000).distinct == pytest.approx(true, rel=4 * sigma)


def test_hottest_rows_beyond_the_limit() -> None:
    ids = draw(DISTRIBUTIONS["zipf 1.05"], 200_000, 300_000, 2, shuffled=True)
    rows, counts, slack = counted(ids, 3000, chunks=20).hottest(20)
    true, often = np.unique(ids, return_counts=True)
    assert rows[0] == true[often.argmax()]
    exact = dict(zip(true.tolist(), often.tolist(), strict=True))
    off = [abs(exact[i] - n) for i, n in zip(rows.tolist(), counts.tolist(), strict=True)]
    assert (np.array(off) <= slack).all()
