"""Input that a user may give to `bench generate`."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.errors import InputError
from shardopt.replay.check import MAX_ALPHA, check_folder, check_indices


@given(st.one_of(st.text(), st.floats().map(lambda alpha: f"zipf:{alpha}")))
def test_other_distributions_are_refused_by_name(text: str) -> None:
    match = re.fullmatch(r"zipf:\s*\+?([\d._e+-]+)\s*", text)
    if text == "uniform" or (match and 0 <= float(match[1]) <= MAX_ALPHA):
        check_indices(text)
        return
    with pytest.raises(InputError, match="uniform or zipf:ALPHA with ALPHA from 0 to 10") as raised:
        check_indices(text)
    assert repr(text) in str(raised.value)


def test_folders_that_may_be_written(tmp_path: Path) -> None:
    check_folder(tmp_path)
    check_folder(tmp_path / "new")
    old = tmp_path / "old"
    old.mkdir()
    (old / "data.json").write_text("{}")
    (old / "benchmark.py").write_text("")
    check_folder(old)


def test_folders_that_may_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        check_folder(tmp_path / "file")
    with pytest.raises(InputError, match="holds other files"):
        check_folder(tmp_path)
    with pytest.raises(InputError, match="there is no directory"):
        check_folder(tmp_path / "none" / "new")
    monkeypatch.chdir(tmp_path)
    check_folder(Path("new"))
