"""Reads CSV tables of measurements: rows that cannot be read are listed by line and left out.

Lines that start with ``#`` are comments. A message about a row names file, line, column and value;
a file that lacks a needed column is an error.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from predictor.errors import InputError, did_you_mean
from predictor.files import read_whole

Row = Mapping[str, str]
T = TypeVar("T")

SMALLEST, LARGEST = 1e-12, 1e15
"""Bounds of any measured figure, in any unit; a figure outside is a typing error."""
MOST_RANKS = 2**16
"""Larger than any machine; the predictor keeps arrays with one entry per rank."""


@dataclass
class ParsedRows(Generic[T]):
    """Rows that could be read, and a line of text for each that could not."""

    rows: list[T] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def skipped(self) -> list[str]:
        return skipped_lines(self.problems)


def read_table(path: Path, columns: Sequence[str], parse: Callable[[Row], T]) -> ParsedRows[T]:
    """Parse every row of a CSV file; a row is one line.

    Args:
        columns: that the file must have.
        parse: raises ValueError with a message for a row that it cannot read.
    """
    try:
        text = read_whole(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    return parse_table(path, text, columns, parse)


def parse_table(
    path: Path, text: str, columns: Sequence[str], parse: Callable[[Row], T]
) -> ParsedRows[T]:
    """Parse the text of a CSV file; see `read_table`."""
    every = ((number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1))
    lines = [(number, line) for number, line in every if line and not line.startswith("#")]
    if not lines:
        raise InputError(f"{path}: is empty; it needs the columns {', '.join(columns)}")
    number, first = lines[0]
    try:
        header = _cells(first)
    except ValueError as error:
        raise InputError(f"{path}:{number}: {error}") from error
    for column in columns:
        if header.count(column) != 1:
            wrong = f"column '{column}' appears twice"
            if column not in header:
                near = did_you_mean(column, header)
                wrong = f"no column '{column}'{near}; it has {', '.join(header)}"
            raise InputError(f"{path}:{number}: {wrong}")
    parsed: ParsedRows[T] = ParsedRows()
    for number, line in lines[1:]:
        try:
            cells = _cells(line)
            if len(cells) != len(header):
                raise ValueError(f"has {len(cells)} columns, the header has {len(header)}")
            parsed.rows.append(parse(dict(zip(header, cells, strict=True))))
        except ValueError as error:
            parsed.problems.append(f"{path.name}:{number}: {error}")
    return parsed


def skipped_lines(problems: Sequence[str]) -> list[str]:
    """Return a line with the number of rows left out, then one for each; no lines if none are."""
    head = [f"rows left out that cannot be read: {len(problems)}"] if problems else []
    return head + [f"    {text}" for text in problems]


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise ValueError(f"is no CSV: {error}") from error


def number(row: Row, column: str) -> float:
    """Return a number above zero, between `SMALLEST` and `LARGEST`."""
    text = row[column].strip()
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{column} is '{text}', not a number") from None
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{column} is {text}; it must be above 0")
    if not SMALLEST <= value <= LARGEST:
        raise ValueError(f"{column} is {text}; it must lie between {SMALLEST:g} and {LARGEST:g}")
    return value


def count(row: Row, column: str, most: float = LARGEST) -> int:
    """Return a whole number of at least one."""
    value = number(row, column)
    if value != int(value):
        raise ValueError(f"{column} is {row[column]}, not a whole number")
    if value > most:
        raise ValueError(f"{column} is {row[column]}; it must be at most {most:,g}")
    return int(value)
