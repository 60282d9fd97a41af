"""Reading text files with errors that name the file, and writing them without half-done results."""

from __future__ import annotations

import fcntl
import glob
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from predictor.errors import InputError, did_you_mean
from predictor.files import input_at, read_whole

TEMPORARY = ".shardopt-tmp"
"""Ending of the files that become the one that is written."""


def read_bytes(path: str | Path, kind: str) -> bytes:
    """Content of a file.

    Args:
        path: as the user gave it.
        kind: what the file is, for the message, such as ``model file``.

    Raises:
        InputError: the file is missing, a directory, not readable, or longer than any such file.
    """
    try:
        return read_whole(path)
    except (OSError, ValueError) as error:
        raise InputError(read_problem(path, kind, error)) from None


def refuse_streams(path: Path, kind: str) -> None:
    """Refuse a file that another one names and that is none: a FIFO would be waited for.

    Raises:
        InputError: it is a FIFO or a device.
    """
    if is_stream(path):
        raise InputError(f"{path}: is a FIFO or a device; give a regular {kind}")


def read_problem(path: str | Path, kind: str, error: Exception) -> str:
    """Say why a file cannot be read.

    Args:
        kind: what the file is, such as ``model file``.
    """
    if isinstance(error, FileNotFoundError):
        return f"{path}: no such {kind}{_neighbour(Path(path))}"
    if isinstance(error, IsADirectoryError):
        return f"{path}: is a directory; give the {kind} itself"
    return f"{path}: cannot read this {kind}: {_reason(error)}"


def decode(content: bytes, path: str | Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark.

    Raises:
        InputError: the bytes are not UTF-8; names the line.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}:{line}: not UTF-8 text (byte 0x{content[error.start]:02x}); "
            "give a text file saved as UTF-8"
        ) from None


def read_numbers(
    path: str | Path, kind: str, form: str, least: float, most: float
) -> dict[str, Any]:
    """Name -> number, of a YAML file of such lines.

    Args:
        kind: what the file is, such as ``file of prices``.
        form: of a line, such as ``hardware: price``.
        least, most: what a number may be; whole ones where these are.

    Raises:
        InputError: the file cannot be read, or has something else.
    """
    from predictor.document import Problems, parse_yaml, shown

    problems = Problems(str(path))
    raw = parse_yaml(decode(read_bytes(path, kind), path), problems)
    problems.raise_if_any()
    if not isinstance(raw, dict) or not raw:
        raise InputError(f"{path}: must have a line '{form}' for each")
    kinds = (int,) if isinstance(least, int) else (int, float)
    for name, value in raw.items():
        if type(value) not in kinds or not least <= value <= most:
            raise InputError(
                f"{problems.place((name,))}: {name}: got {shown(value)}; allowed: "
                f"{'whole ' * (kinds == (int,))}numbers from {least:g} to {most:g}"
            )
    return {str(name): value for name, value in raw.items()}


def atomic_write_text(path: str | Path, text: str, *, update: bool = False) -> None:
    """Write ``text`` as UTF-8 so that ``path`` holds either all of it or what it held before.

    Args:
        update: as `atomic_open`.

    Raises:
        InputError: as `atomic_open`.
    """
    with atomic_open(path, update=update) as stream:
        stream.write(text.encode("utf-8"))


@contextmanager
def atomic_open(path: str | Path, *, update: bool = False) -> Iterator[BinaryIO]:
    """A stream whose bytes ``path`` holds once the block ends, all of them; an error in the block
    leaves what the file held before.

    The bytes go to a temporary file in the same directory, which then takes the name; those that
    killed writers of this file left there are removed. A file that is replaced keeps its
    permissions; a symbolic link stays one and its target is replaced. What is no file to replace
    (`is_stream`) is written to as it stands.

    Args:
        update: the file is one that a command continues, such as the rows of an interrupted run.
            Any other that the command has read is an input, and refused.

    Raises:
        InputError: the file is an input, the directory is missing or not writable, or the disk is
            full; an existing file is left as it was.
    """
    if is_stream(path):
        with _open_stream(path) as stream:
            yield stream
        return
    if not update:
        refuse_input(path)
    target, temporary = target_of(path), ""
    try:
        handle, temporary = _make_temporary(target)
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, _mode(target))
        os.replace(temporary, target)
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"{path}: cannot write: {_reason(error)}; make {target.parent} writable "
            "or choose another file"
        ) from None
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def target_of(path: str | Path) -> Path:
    """The file that is written under a name.

    Raises:
        InputError: it is a directory, or lies in none.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise InputError(f"{path}: is a directory; give the name of a file to write")
    if not target.parent.is_dir():
        raise InputError(
            f"{path}: cannot write: there is no directory {Path(path).parent}; create it or choose "
            "another file"
        )
    return target


def refuse_input(path: str | Path) -> None:
    """Refuse to write a file that this command has read, under whatever name.

    Raises:
        InputError: it has read the file.
    """
    read_as = input_at(path)
    if read_as is not None:
        also = "" if read_as == str(path) else f" (read as {read_as})"
        raise InputError(f"{path}: is an input of this command{also}; choose another file to write")


def _make_temporary(target: Path) -> tuple[int, str]:
    """A new file beside the target and its handle, which holds a lock: the system lifts it when the
    process ends, however it ends."""
    start = f".{target.name[:100]}."
    for leftover in target.parent.glob(f"{glob.escape(start)}*{TEMPORARY}"):
        with suppress(OSError):
            _remove_left(leftover)
    while True:
        handle, name = tempfile.mkstemp(TEMPORARY, start, target.parent)
        with suppress(OSError):  # not every file system has locks; then nothing is removed
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, name
        os.close(handle)  # another writer took it for one that was left


def _remove_left(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    finally:
        os.close(handle)


def is_stream(path: str | Path) -> bool:
    """Tell if a file takes what is written to it and keeps its place: a device, a FIFO, or
    whatever stdout and stderr of this process go to."""
    try:
        there = os.stat(path)
    except (OSError, ValueError):
        return False
    if not stat.S_ISREG(there.st_mode):
        return not stat.S_ISDIR(there.st_mode)
    return _own_stream(there) is not None


@contextmanager
def _open_stream(path: str | Path) -> Iterator[BinaryIO]:
    try:
        own = _own_stream(os.stat(path))
        # a second opening of a file that stdout goes to would write over what stands there
        with open(path if own is None else os.dup(own), "wb") as stream:
            yield stream
            stream.flush()
    except BrokenPipeError:
        raise
    except (OSError, UnicodeError) as error:
        raise InputError(f"{path}: cannot write: {_reason(error)}; choose another file") from None


def _own_stream(there: os.stat_result) -> int | None:
    """Return the one of stdout and stderr that goes to a file."""
    for number in (1, 2):
        try:
            if os.path.samestat(there, os.fstat(number)):
                return number
        except OSError:  # it is closed
            continue
    return None


def _mode(target: Path) -> int:
    """Permissions of the file that is replaced, or those that a new file would get."""
    if target.exists():
        return target.stat().st_mode & 0o7777
    # the umask can only be read by setting it
    umask = os.umask(0o077)
    os.umask(umask)
    return 0o666 & ~umask


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _neighbour(path: Path) -> str:
    """The nearest file name in the directory, or which directory is missing."""
    if not path.parent.is_dir():
        return f"; there is no directory {path.parent}"
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return ""
    return did_you_mean(path.name, names)
