"""What every report on the console shares: the console itself, headings, tables, bars."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shardopt.printable import printable

MAX_WIDTH = 120
PLAIN_WIDTH = 100
"""Width of output that goes to a file, unless COLUMNS is set."""
FOLD_WIDTH = 8
"""Smallest width of a column that wraps, or of its header where that is shorter."""


class EscapingConsole(Console):
    """A console on which names from files cannot steer the terminal."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """What is printed; everything passes here, whatever made it."""
        for segment in super().render(renderable, options):
            if segment.control is None:
                yield segment._replace(text=printable(segment.text))
            else:
                yield segment

    def on_broken_pipe(self) -> None:
        """The command ends; rich would end the process."""
        raise BrokenPipeError


def make_console(file: TextIO | None = None, *, width: int | None = None) -> Console:
    """A console on stdout, at most `MAX_WIDTH` wide; plain text when it is not a terminal."""
    stream = sys.stdout if file is None else file
    if width is None and not stream.isatty() and "COLUMNS" not in os.environ:
        width = PLAIN_WIDTH
    console = EscapingConsole(file=stream, width=width, highlight=False, emoji=False, markup=False)
    if console.width > MAX_WIDTH:
        console.width = MAX_WIDTH
    return console


def heading(console: Console, title: str, aside: str = "") -> None:
    """An empty line and the title of what follows."""
    console.print()
    text = Text(title, style="bold")
    if aside:
        text.append(f"  {aside}", style="dim")
    console.print(text)


def table(*columns: str) -> Table:
    """An empty table; a column is its header after ``<`` or ``>`` for the side that it is flush
    with, or after ``~`` for text that may break over lines when the console is narrow."""
    made = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim"
    )
    for column in columns:
        header, folds = column[1:], column[0] == "~"
        made.add_column(
            header,
            justify="right" if column[0] == ">" else "left",
            no_wrap=not folds,
            overflow="fold",
            min_width=min(FOLD_WIDTH, len(header)) if folds else None,
        )
    return made


def show(console: Console, what: Table | Text) -> None:
    """A table or text, indented under its heading."""
    console.print(Padding(what, (0, 0, 0, 2), expand=False))


def line(console: Console, text: str, style: str = "") -> None:
    """Flowing text, wrapped at words."""
    console.print(Text(text, style=style))


FULL = "█"
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


def bar(fraction: float, width: int, style: str = "cyan") -> Text:
    """A bar of ``fraction`` of ``width`` columns, to an eighth of a column."""
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    if fraction > 0:
        eighths = max(1, eighths)
    return Text(FULL * (eighths // 8) + _EIGHTHS[eighths % 8], style=style)


def stacked(parts: Sequence[tuple[float, str, str]], total: float, width: int) -> Text:
    """Parts side by side on a scale where ``width`` columns are ``total``.

    Args:
        parts: value, character and style of each part.
    """
    text = Text()
    reached, drawn = 0.0, 0
    for value, character, style in parts:
        # round the running sum, not the parts, so that equal sums give equal lengths
        reached += value
        end = round(min(1.0, reached / total) * width) if total > 0 else 0
        text.append(character * (end - drawn), style=style)
        drawn = end
    return text
