"""Atomic writing."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from predictor.errors import InputError
from shardopt.files import atomic_open, atomic_write_text


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


def test_a_fifo_is_written_to_and_stays_one(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "link").symlink_to("fifo")
    # a reader, so that opening does not wait for one
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for path in (fifo, tmp_path / "link"):
            atomic_write_text(path, "text")
            assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["fifo", "link"]


def test_a_device_is_written_to_and_stays_one(tmp_path: Path) -> None:
    # a pseudo terminal is a device that any user may make
    shown, device = os.openpty()
    try:
        atomic_write_text(os.ttyname(device), "text")
        assert os.read(shown, 10) == b"text"
        assert stat.S_ISCHR(os.stat(os.ttyname(device)).st_mode)
    finally:
        os.close(shown)
        os.close(device)
    with pytest.raises(InputError, match="/dev/full: cannot write: No space left on device"):
        atomic_write_text("/dev/full", "text")


@pytest.mark.parametrize("into", ["file", "pipe"])
def test_stdout_by_name_is_written_to(tmp_path: Path, into: str) -> None:
    code = (
        "from shardopt.files import atomic_write_text; print('a', flush=True); "
        "atomic_write_text('/dev/stdout', 'b\\n'); print('c')"
    )
    out = tmp_path / "out"
    with out.open("wb") as stream:
        where = stream if into == "file" else subprocess.PIPE
        done = subprocess.run([sys.executable, "-c", code], stdout=where, check=True, timeout=60)
    assert (out.read_bytes() if into == "file" else done.stdout) == b"a\nb\nc\n"


def test_a_reader_that_has_left_is_a_broken_pipe() -> None:
    ends = os.pipe()
    os.close(ends[0])
    try:
        with pytest.raises(BrokenPipeError), atomic_open(f"/proc/self/fd/{ends[1]}") as stream:
            stream.write(b"text")
    finally:
        os.close(ends[1])


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    path, untouched = tmp_path / "plan.json", [".plan.json.bak_2024", ".other.json.x.shardopt-tmp"]
    for name in untouched:
        (tmp_path / name).write_text("kept")
    code = (
        "import sys, time\nfrom shardopt.files import atomic_open\n"
        "with atomic_open(sys.argv[1]) as stream:\n"
        "    stream.write(b'half'); stream.flush(); print('writes', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writes\n"
        atomic_write_text(path, "ours")
        assert len(list(tmp_path.iterdir())) == 4, "a file that is being written stays"
        writer.kill()
    atomic_write_text(path, "again")
    assert path.read_text() == "again"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([path.name, *untouched])


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
    for text in ("new", "\ud800"):  # of which the second cannot be encoded
        with pytest.raises(InputError, match="cannot write"):
            atomic_write_text(path, text)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_directory_that_is_not_writable(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match=r"Permission denied; make .* writable"):
        atomic_write_text(tmp_path / "plan.json", "x")
