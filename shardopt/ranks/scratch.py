"""Folders for temporary files, which not even a killed process leaves behind for long."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import current_thread, main_thread

from predictor.errors import InputError

PREFIX = "shardopt-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for the files of a launch; those that killed processes left are removed first.

    Its process holds a lock on it, which the system lifts when that ends, however it ends. A
    SIGTERM that nobody handles ends the process in order, so that the folder goes at once.

    Raises:
        InputError: it cannot be made.
    """
    try:
        for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with suppress(OSError):
                _remove_left(path)
        name, lock = _make()
    except OSError as error:
        raise InputError(
            f"no place for temporary files: {error.strerror or error}; set TMPDIR to a folder that "
            "can be written"
        ) from None
    ours = current_thread() is main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _exit_terminated)
    try:
        yield Path(name)
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        shutil.rmtree(name, ignore_errors=True)
        os.close(lock)


def _exit_terminated(number: int, _: object) -> None:
    """Exit as a shell names a process that the signal ended: 143."""
    raise SystemExit(128 + number)


def _make() -> tuple[str, int]:
    """A new folder and the lock on it."""
    while True:
        name = tempfile.mkdtemp(prefix=PREFIX)
        with suppress(FileNotFoundError):  # another process took it for one that was left
            lock = os.open(name, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.isdir(name):
                return name, lock
            os.close(lock)


def _remove_left(path: Path) -> None:
    """Remove a folder that no process locks; a link may lead anywhere, and what others own is
    theirs."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)
