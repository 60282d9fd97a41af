"""Plans in windows of data: which batches a plan of a bench run trains on, by its name.

A name such as ``nominal @2`` is that of a plan on the batches of the second window; without a
window it is the first.
"""

from __future__ import annotations

_MARK = " @"


def in_window(name: str, number: int) -> str:
    """The name of a plan in a window, from 1."""
    return f"{name}{_MARK}{number}"


def split_window(name: str) -> tuple[str, int]:
    """A plan's own name and its window, from 1."""
    plain, mark, number = name.rpartition(_MARK)
    return (plain, int(number)) if mark and number.isdecimal() else (name, 1)
