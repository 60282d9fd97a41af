"""Samples fall into the window of their time, whatever the order and the chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.errors import InputError
from shardopt.stats.counts import Bags
from shardopt.stats.source import Chunk
from shardopt.stats.windows import TimeWindow

DAY = 86_400


def test_a_window_is_a_column_and_a_length() -> None:
    assert TimeWindow.parse("when=1d") == TimeWindow("when", DAY)
    assert TimeWindow.parse("a=b=12h") == TimeWindow("a=b", DAY // 2)


@pytest.mark.parametrize("text", ["", "when", "when=", "=1d", "when=0d", "when=1y", "when=-1d"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"allowed: COLUMN=LENGTH.*timestamp=1d"):
        TimeWindow.parse(text)


@given(st.lists(st.tuples(st.integers(0, 10 * DAY), st.integers(0, 3)), min_size=1, max_size=30))
def test_every_sample_is_in_its_window(samples: list[tuple[int, int]]) -> None:
    times = np.array([time for time, _ in samples], dtype=np.float64)
    lengths = np.array([length for _, length in samples])
    # the id of a sample is its day, so that the bags of a window show where they come from
    ids = np.repeat((times // DAY).astype(np.int64), lengths)
    chunk = Chunk(0, "row", {"f": Bags(ids, lengths)}, times)
    found = list(TimeWindow("when", DAY).split(chunk))
    assert sum(part.bags["f"].samples for _, part in found) == len(samples)
    assert sum(len(part.bags["f"].ids) for _, part in found) == len(ids)
    for start, part in found:
        assert set(part.bags["f"].ids.tolist()) <= {start // DAY}


def test_names_are_days_or_times() -> None:
    assert TimeWindow("when", 7 * DAY).name(3 * DAY) == "1970-01-04"
    assert TimeWindow("when", 3600).name(3 * DAY + 7200) == "1970-01-04T02-00-00"


def test_a_time_that_is_none_is_told() -> None:
    chunk = Chunk(0, "row", {"f": Bags(np.array([1]))}, np.array([1e30]))
    with pytest.raises(InputError, match=r"column 'when': got the time 1e\+30"):
        list(TimeWindow("when", DAY).split(chunk))
