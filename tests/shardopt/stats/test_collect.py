"""Runs that are killed go on from their checkpoints; samples fall into the window of their time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.errors import InputError
from shardopt.stats.collect import WHOLE, ReadOptions, TimeWindow, collect
from shardopt.stats.counts import Bags, FeatureCounts
from shardopt.stats.readers import Chunk
from shardopt.stats.result import summarise

READING = ReadOptions(chunk_rows=500, max_ids=900)

KILLED = """
import os, signal, sys
from pathlib import Path
from shardopt.stats.collect import ReadOptions, collect

left = int(sys.argv[3])

def kill(path, samples):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

paths = [Path(name) for name in sys.argv[4:]]
collect(paths, ReadOptions(chunk_rows=500, max_ids=900), checkpoint=Path(sys.argv[1]),
        every=int(sys.argv[2]), on_chunk=kill)
"""


@pytest.fixture
def data(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = [tmp_path / "a.npy", tmp_path / "b.npy"]
    for path in paths:
        np.save(path, rng.zipf(1.2, (5000, 3)) % 40_000)
    return paths


def equal(counts: FeatureCounts, expected: FeatureCounts) -> None:
    state, expected_state = counts.state(), expected.state()
    assert state.keys() == expected_state.keys()
    for name, value in state.items():
        assert np.array_equal(value, expected_state[name]), name


@pytest.mark.parametrize("kills", [(4,), (13,), (3, 2, 9)])
def test_killed_and_continued_gives_the_same(
    kills: tuple[int, ...], data: list[Path], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "state.npz"
    for chunks in kills:
        words = [str(checkpoint), "2", str(chunks), *map(str, data)]
        done = subprocess.run([sys.executable, "-c", KILLED, *words], check=False)
        assert done.returncode == -9
    samples_read: list[int] = []
    (continued,) = collect(
        data, READING, checkpoint=checkpoint, on_chunk=lambda _, n: samples_read.append(n)
    ).values()
    assert samples_read[0] > 500
    uninterrupted = collect(data, READING)[WHOLE]
    assert uninterrupted["cat_0"].hot is not None
    for name in uninterrupted:
        equal(continued[name], uninterrupted[name])


def test_a_checkpoint_of_something_else_is_refused(data: list[Path], tmp_path: Path) -> None:
    checkpoint = tmp_path / "state.npz"
    collect(data, READING, checkpoint=checkpoint, every=3)
    for paths, reading in ((data[:1], READING), (data, ReadOptions(chunk_rows=500, max_ids=7))):
        with pytest.raises(InputError, match=r"state\.npz"):
            collect(paths, reading, checkpoint=checkpoint)
    checkpoint.write_text("no checkpoint")
    with pytest.raises(InputError, match=r"state\.npz"):
        collect(data, READING, checkpoint=checkpoint)


DAY = 86_400


def test_a_window_is_a_column_and_a_length() -> None:
    assert TimeWindow.parse("when=1d") == TimeWindow("when", DAY)
    assert TimeWindow.parse("a=b=12h") == TimeWindow("a=b", DAY // 2)


@pytest.mark.parametrize("text", ["", "when", "when=", "=1d", "when=0d", "when=1y", "when=-1d"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="COLUMN=LENGTH"):
        TimeWindow.parse(text)


@given(st.lists(st.tuples(st.integers(0, 10 * DAY), st.integers(0, 3)), min_size=1, max_size=30))
def test_every_sample_is_in_its_window(samples: list[tuple[int, int]]) -> None:
    times = np.array([time for time, _ in samples], dtype=np.float64)
    lengths = np.array([length for _, length in samples])
    # the id of a sample is its day, so that the bags of a window show where they come from
    ids = np.repeat((times // DAY).astype(np.int64), lengths)
    chunk = Chunk(0, "row", {"f": Bags(ids, lengths)}, times)
    windows = list(TimeWindow("when", DAY).split(chunk))
    assert sum(part.bags["f"].samples for _, part in windows) == len(samples)
    assert sum(len(part.bags["f"].ids) for _, part in windows) == len(ids)
    for start, part in windows:
        assert set(part.bags["f"].ids.tolist()) <= {start // DAY}


def test_names_are_days_or_times() -> None:
    assert TimeWindow("when", 7 * DAY).name(3 * DAY) == "1970-01-04"
    assert TimeWindow("when", 3600).name(3 * DAY + 7200) == "1970-01-04T02-00-00"


def test_a_time_that_is_none_is_told() -> None:
    chunk = Chunk(0, "row", {"f": Bags(np.array([1]))}, np.array([1e30]))
    with pytest.raises(InputError, match=r"column 'when': got the time 1e\+30"):
        list(TimeWindow("when", DAY).split(chunk))


@pytest.mark.parametrize("chunk_rows", [7, 10_000])
def test_lengths_that_go_together_are_found_in_data(tmp_path: Path, chunk_rows: int) -> None:
    """Two features of one history and one of fixed length, whatever is read at once."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table
    rng = np.random.default_rng(0)
    history = rng.poisson(rng.gamma(1.0, 20.0, 400))
    columns = {
        "item": [[1] * n for n in history],
        "action": [[2] * n for n in history],
        "country": [[3]] * len(history),
    }
    parquet.write_table(table(columns), tmp_path / "data.parquet")
    reading = ReadOptions(chunk_rows=chunk_rows)
    counts = collect([tmp_path / "data.parquet"], reading)[WHOLE]
    features = {f.name: f for f in summarise(counts, reading, 0)}
    for name, correlation in (("item", 1.0), ("action", 1.0), ("country", 0.0)):
        assert features[name].length_correlation == pytest.approx(correlation, abs=1e-6)
    assert features["item"].pooling_factor_max == history.max()
