"""Folders for temporary files: there while they are used, gone after a kill and another start."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shardopt.ranks.scratch import scratch_folder

HOLD = """
import sys, time
from shardopt.ranks.scratch import scratch_folder

with scratch_folder() as folder:
    (folder / "file").write_text("text")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def holder() -> tuple[subprocess.Popen[str], Path]:
    """A process that uses a folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_gone_after_its_use(tmp_path: Path) -> None:
    with scratch_folder() as folder:
        (folder / "file").write_text("text")
        assert folder.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_at_the_next_start_and_nothing_else(
    tmp_path: Path,
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "shardopt-link").symlink_to(tmp_path / "other")
    (tmp_path / "shardopt-file").write_text("text")
    killed, folder = holder()
    running, used = holder()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    try:
        assert (folder / "file").exists()
        with scratch_folder():
            assert not folder.exists()
            assert (used / "file").exists()
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"other", "shardopt-link", "shardopt-file", used.name}
    finally:
        running.kill()
        running.communicate()
