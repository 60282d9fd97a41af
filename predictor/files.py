"""Reading small files whole, never more than a machine can hold.

Why: docs/decisions/0049.
"""

from __future__ import annotations

from os import PathLike

from predictor.errors import InputError

MOST_BYTES = 2**28
"""Longer than any model, plan, profile or table of measurements; a device such as /dev/zero has no
end."""


def read_whole(path: str | PathLike[str]) -> bytes:
    """Content of a file.

    Raises:
        OSError, ValueError: it cannot be read.
        InputError: it is longer than `MOST_BYTES`.
    """
    with open(path, "rb") as stream:
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise InputError(f"{path}: is longer than {MOST_BYTES >> 20} MiB, the most that is read")
    return content
