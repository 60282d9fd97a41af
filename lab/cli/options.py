"""Texts of flags that several commands of the laboratory share."""

from __future__ import annotations

import re

MAX_TASK = 999_999
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?\Z")


def seeds(flag: str, given: str) -> list[int]:
    """The numbers that a text such as ``3,7,10-12`` names, in its order, each once.

    Raises:
        InputError: it is no such text.
    """
    from predictor.errors import InputError

    found: list[int] = []
    for part in given.split(","):
        match = _RANGE.match(part.strip())
        first, last = (int(n or match[1]) for n in match.groups()) if match else (1, 0)
        if last < first:
            raise InputError(
                f"{flag} is {given!r}; give numbers and ranges of 0 to {MAX_TASK}, the lower "
                "number first, such as 0-19 or 3,7,10-12"
            )
        found += range(first, last + 1)
    return list(dict.fromkeys(found))
