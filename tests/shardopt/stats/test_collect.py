"""A run that is killed goes on from its checkpoint, and ends with the same counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from predictor.errors import InputError
from shardopt.stats.collect import WHOLE, ReadOptions, collect
from shardopt.stats.counts import FeatureCounts

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


def equal(one: FeatureCounts, other: FeatureCounts) -> None:
    left, right = one.state(), other.state()
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert np.array_equal(value, right[name]), name


@pytest.mark.parametrize("kills", [(4,), (13,), (3, 2, 9)])
def test_killed_and_continued_gives_the_same(
    kills: tuple[int, ...], data: list[Path], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "state.npz"
    for chunks in kills:
        words = [str(checkpoint), "2", str(chunks), *map(str, data)]
        done = subprocess.run([sys.executable, "-c", KILLED, *words], check=False)
        assert done.returncode == -9
    seen: list[int] = []
    (found,) = collect(
        data, READING, checkpoint=checkpoint, on_chunk=lambda _, n: seen.append(n)
    ).values()
    assert seen[0] > 500
    whole = collect(data, READING)[WHOLE]
    assert whole["cat_0"].hot is not None
    for name in whole:
        equal(found[name], whole[name])


def test_a_checkpoint_of_something_else_is_refused(data: list[Path], tmp_path: Path) -> None:
    checkpoint = tmp_path / "state.npz"
    collect(data, READING, checkpoint=checkpoint, every=3)
    for paths, reading in ((data[:1], READING), (data, ReadOptions(chunk_rows=500, max_ids=7))):
        with pytest.raises(InputError, match="of other data or options; delete it"):
            collect(paths, reading, checkpoint=checkpoint)
    checkpoint.write_text("no checkpoint")
    with pytest.raises(InputError, match="no checkpoint of shardopt stats"):
        collect(data, READING, checkpoint=checkpoint)
