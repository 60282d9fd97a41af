"""Files that a call has read are known by whatever name."""

import os
from pathlib import Path

import pytest

from predictor.files import input_at, inputs_remembered, open_input, read_whole, remember_input


def test_what_is_read_is_an_input_under_every_name(tmp_path: Path) -> None:
    file, hard, soft = (tmp_path / name for name in ("file", "hard", "soft"))
    file.write_text("x")
    os.link(file, hard)
    soft.symlink_to("file")
    with inputs_remembered():
        assert input_at(file) is None
        assert read_whole(hard) == b"x"
        for path in (file, hard, soft):
            assert input_at(path) == str(hard)
        (tmp_path / "other").write_text("x")
        assert input_at(tmp_path / "other") is None
        remember_input(tmp_path / "other")
        assert input_at(tmp_path / "other") is not None
    assert input_at(file) is None


def test_an_inode_of_a_replaced_input_is_no_input(tmp_path: Path) -> None:
    read, written = tmp_path / "read", tmp_path / "other"
    read.write_text("x")
    with inputs_remembered():
        remember_input(read)
        os.link(read, written)  # as if the file system had given the inode to it
        (tmp_path / "new").write_text("y")
        (tmp_path / "new").replace(read)
        assert input_at(written) is None
        remember_input(written)
        assert input_at(written) == str(written)


def test_nothing_is_remembered_outside_a_call(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    open_input(tmp_path / "file").close()
    assert input_at(tmp_path / "file") is None
    with inputs_remembered(), pytest.raises(OSError, match="nothing"):
        open_input(tmp_path / "nothing")
