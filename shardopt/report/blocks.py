"""Blocks of reports.

A report is a list of blocks in the order of reading; `shardopt.report.console` and
`shardopt.report.html` draw the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from pydantic import BaseModel


@dataclass(frozen=True)
class Heading:
    """The title of what follows."""

    title: str
    aside: str = ""


@dataclass(frozen=True)
class Line:
    """A line of text.

    Args:
        style: ``bold``, ``dim``, ``yellow`` for a warning, ``red`` for a refusal.
        wraps: it may break over lines where the console is narrow.
    """

    text: str
    style: str = ""
    wraps: bool = True


@dataclass(frozen=True)
class Bar:
    """Parts side by side on a track.

    Args:
        parts: value, kind and what it is called, of each; kinds are those of `KINDS`.
        total: what all of the track is.
    """

    parts: Sequence[tuple[float, str, str]]
    total: float


KINDS = {
    "embedding_forward": ("█", "cyan"),
    "embedding_backward": ("▓", "blue"),
    "dense_forward": ("▒", "green"),
    "idle": ("·", "dim"),
    "compute": ("█", "cyan"),
    "exposed_communication": ("▓", "magenta"),
    "memcpy": ("▒", "green"),
    "host_bound": ("░", "yellow"),
}
"""Kind of a part of a bar -> its character and colour on the console; all others are plain."""


@dataclass(frozen=True)
class Legend:
    """Kind of parts -> what they are."""

    kinds: Mapping[str, str]


@dataclass(frozen=True)
class Cell:
    """Cell of a table, and the number that it is sorted by where its text is none."""

    shown: str | Bar
    value: float


@dataclass(frozen=True)
class TextTable:
    """A table.

    Args:
        columns: each its title after ``<`` or ``>`` for the side that it is flush with, or after
            ``~`` for text that may break over lines; none for a list of facts.
        strong: the row that matters most.
        name: of a table that is sorted by a click on its titles, where there is a pointer.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Bar | Cell]]
    strong: int | None = None
    name: str = ""


Block: TypeAlias = Heading | Line | Legend | TextTable | str
"""A text is a plain line; an empty one separates."""


@dataclass(frozen=True)
class View:
    """All forms of what a command answers.

    Args:
        data: answer that ``--json`` prints.
        full: the report.
        brief: the report under ``--quiet``.
        notes: what stands on stderr beside any of them, unless ``--quiet``.
        code: with which the command ends; 0 where all is done.
    """

    data: Mapping[str, Any] | BaseModel
    full: Sequence[Block]
    brief: Sequence[Block] = ()
    notes: Sequence[str] = ()
    code: int = 0


def warning(text: str) -> Line:
    """Return a line on something that may make the result wrong."""
    return Line(text, "yellow")
