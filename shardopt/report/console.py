"""Draws reports on the console: headings, lines, tables, bars."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shardopt.printable import printable
from shardopt.report.blocks import KINDS, Bar, Block, Cell, Heading, Legend, Line, TextTable

MAX_WIDTH = 120
PLAIN_WIDTH = 100
"""Width of output that goes to a file, unless COLUMNS is set."""
FOLD_WIDTH = 8
"""Smallest width of a column that wraps, or of its header where that is shorter."""
BAR_WIDTH = 10, 40
"""Least and most columns of a bar."""
STYLES = {"red": "bold red"}
"""Styles of lines that rich calls otherwise."""
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


class EscapingConsole(Console):
    """A console on which names from files cannot steer the terminal."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the printed segments; all output passes here."""
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


def draw(console: Console, blocks: Iterable[Block]) -> None:
    """Print blocks, one below the other."""
    for block in blocks:
        if isinstance(block, Heading):
            heading(console, block.title, block.aside)
        elif isinstance(block, TextTable):
            drawn = _table(block, console.width)
            show(console, drawn) if block.columns else console.print(drawn)
        elif isinstance(block, Legend):
            show(console, _legend(block))
        elif isinstance(block, Line):
            text = Text(block.text, style=STYLES.get(block.style, block.style))
            console.print(text, soft_wrap=not block.wraps)
        else:
            line(console, block)


def heading(console: Console, title: str, aside: str = "") -> None:
    """An empty line and the title of what follows."""
    console.print()
    text = Text(title, style="bold")
    if aside:
        text.append(f"  {aside}", style="dim")
    console.print(text)


def table(*columns: str) -> Table:
    """An empty table; `TextTable` says what its columns are."""
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim"
    )
    for column in columns:
        header, folds = column[1:], column[0] == "~"
        table.add_column(
            header,
            justify="right" if column[0] == ">" else "left",
            no_wrap=not folds,
            overflow="fold",
            min_width=min(FOLD_WIDTH, len(header)) if folds else None,
        )
    return table


def show(console: Console, item: Table | Text) -> None:
    """A table or text, indented under its heading."""
    console.print(Padding(item, (0, 0, 0, 2), expand=False))


def line(console: Console, text: str, style: str = "") -> None:
    """Flowing text, wrapped at words."""
    console.print(Text(text, style=style))


def _table(grid: TextTable, width: int) -> Table:
    """A grid on a console of so many columns; bars take the room that is left."""
    if grid.columns:
        drawn = table(*grid.columns)
    else:
        drawn = Table.grid(padding=(0, 2))
        drawn.add_column(style="bold", overflow="fold", max_width=width // 2)
        drawn.add_column(overflow="fold")
    rows = [[c.shown if isinstance(c, Cell) else c for c in row] for row in grid.rows]
    titles = [[title[1:] for title in grid.columns]] if grid.columns else []
    taken_width = sum(
        2 + max(len(cell) if isinstance(cell, str) else 0 for cell in column)
        for column in zip(*titles, *rows, strict=True)
    )
    least, most = BAR_WIDTH
    room = max(least, min(most, width - 2 - taken_width))
    for at, row in enumerate(rows):
        cells = (_bar(cell, room) if isinstance(cell, Bar) else cell for cell in row)
        drawn.add_row(*cells, style="bold" if at == grid.strong else "")
    return drawn


def _bar(bar: Bar, width: int) -> Text:
    """A bar in so many columns: one part to an eighth of a column, several in whole ones."""
    text = Text()
    if len(bar.parts) == 1:
        ((value, _, _),) = bar.parts
        eighths = round(max(0.0, min(1.0, value / bar.total)) * width * 8)
        eighths = max(eighths, 1) if value > 0 else eighths
        return text.append("█" * (eighths // 8) + _EIGHTHS[eighths % 8], style="cyan")
    reached, drawn = 0.0, 0
    for value, kind, _ in bar.parts:
        # round the running sum, not the parts, so that equal sums give equal lengths
        reached += value
        end = round(min(1.0, reached / bar.total) * width) if bar.total > 0 else 0
        character, style = KINDS.get(kind, ("█", ""))
        text.append(character * (end - drawn), style=style)
        drawn = end
    return text


def _legend(legend: Legend) -> Text:
    text = Text()
    for kind, words in legend.kinds.items():
        character, style = KINDS.get(kind, ("█", ""))
        text.append(character * 2, style=style).append(f" {words}   ", style="dim")
    return text
