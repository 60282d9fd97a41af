"""Reads files whole, never more than a machine can hold, and remembers every input."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import BinaryIO

from predictor.errors import InputError

MOST_BYTES = 2**28
"""Longer than any model, plan, profile or table of measurements; a device such as /dev/zero is
endless."""

_inputs: dict[tuple[int, int], str] | None = None
"""Device and inode of the files that this call has read -> how it named them; None outside one."""


@contextmanager
def inputs_remembered() -> Iterator[None]:
    """Keep, while the block runs, the list of inputs that `input_at` looks up.

    `open_input` and `remember_input` fill it. A command runs in such a block, so that its writer
    can refuse to replace its inputs. Scripts do not: they may write the files that they read.
    """
    global _inputs
    before, _inputs = _inputs, {}
    try:
        yield
    finally:
        _inputs = before


def open_input(path: str | PathLike[str]) -> BinaryIO:
    """Open a file that the user gave as a byte stream, and remember it as an input."""
    remember_input(path)
    return open(path, "rb")


def remember_input(path: str | PathLike[str]) -> None:
    if _inputs is not None:
        identity = _identity(path)
        if identity is not None and input_at(path) is None:
            _inputs[identity] = str(path)


def input_at(path: str | PathLike[str]) -> str | None:
    """Return the name under which this call has read the file at ``path``, or None.

    Links are followed.

    A file that was read and then replaced gives its inode back, so another file may have it.
    """
    identity = _identity(path)
    if not _inputs or identity not in _inputs:
        return None
    name = _inputs[identity]
    return name if _identity(name) == identity else None


def _identity(path: str | PathLike[str]) -> tuple[int, int] | None:
    try:
        there = os.stat(path)
    except (OSError, ValueError):
        return None
    return there.st_dev, there.st_ino


def read_whole(path: str | PathLike[str]) -> bytes:
    """Read a file whole.

    Raises:
        OSError, ValueError: it cannot be read.
        InputError: it is longer than `MOST_BYTES`.
    """
    with open_input(path) as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise InputError(f"{path}: is longer than {MOST_BYTES >> 20} MiB, the most that is read")
    return content
