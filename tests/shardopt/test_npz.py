"""NumPy's files: what is written comes back, what is damaged or too large is one error."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardopt.npz import BROKEN, load_arrays, read_head

ARRAYS = {
    "c": np.arange(6).reshape(2, 3),
    "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "empty": np.zeros((0, 3)),
    "scalar": np.array("text"),
}


def test_arrays_come_back(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", **ARRAYS)
    loaded = load_arrays(tmp_path / "a.npz", 1000)
    assert loaded.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(loaded[name], array)


def test_a_file_that_unpacks_to_more_than_it_may_is_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in "ab":
            with archive.open(f"{name}.npy", "w") as stream:
                np.save(stream, np.zeros(2**20))
    assert (tmp_path / "a.npz").stat().st_size < 2**16
    assert len(load_arrays(tmp_path / "a.npz", 2**24)) == 2
    with pytest.raises(ValueError, match="larger than any"):
        load_arrays(tmp_path / "a.npz", 2**23 + 2**22)


@given(data=st.data())
def test_damaged_heads(data: st.DataObject) -> None:
    stream = io.BytesIO()
    np.save(stream, ARRAYS["c"])
    good = stream.getvalue()
    at = data.draw(st.integers(0, 128))
    new = data.draw(st.binary(max_size=6) | st.sampled_from([b"(", b"'", b"9" * 30, b"-", b"[1]"]))
    try:
        head = read_head(io.BytesIO(good[:at] + new + good[at + len(new) :]))
    except BROKEN:
        return
    assert min(head.shape, default=0) >= 0
