"""Atomic writing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from predictor.errors import InputError
from shardopt.files import atomic_write_text


def test_writes_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    atomic_write_text(path, "one\n")
    assert path.read_text() == "one\n"
    path.chmod(0o640)
    atomic_write_text(str(path), "twö\n")
    assert path.read_bytes() == "twö\n".encode()
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_new_file_follows_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        atomic_write_text(tmp_path / "a", "")
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    atomic_write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_missing_directory_and_directory_as_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no directory .*nowhere; create it"):
        atomic_write_text(tmp_path / "nowhere" / "plan.json", "x")
    with pytest.raises(InputError, match="is a directory"):
        atomic_write_text(tmp_path, "x")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"cannot write: No space left on device"):
        atomic_write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_text_that_cannot_be_encoded_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    with pytest.raises(InputError, match="cannot write"):
        atomic_write_text(path, "\ud800")
    assert path.read_text() == "old"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_is_not_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match=r"Permission denied; make .* writable"):
        atomic_write_text(tmp_path / "plan.json", "x")
