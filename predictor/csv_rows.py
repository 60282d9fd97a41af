"""Reading tables of measurements: what cannot be read is named by line and left out.

Lines that start with ``#`` are comments. A row is refused as a whole, with the file, the line, the
column and the value; a file without a needed column is an error.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from predictor.errors import InputError, did_you_mean

Row = Mapping[str, str]
T = TypeVar("T")


@dataclass
class Table(Generic[T]):
    """Rows that could be read, and a line of text for each that could not."""

    rows: list[T] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_table(path: Path, columns: Sequence[str], parse: Callable[[Row], T]) -> Table[T]:
    """Every row of a CSV file, parsed.

    Args:
        columns: that the file must have.
        parse: raises ValueError with a text for a row that it cannot read.

    Raises:
        InputError: the file cannot be read at all, or lacks a column.
    """
    found: Table[T] = Table()
    for number, row in numbered_rows(path, columns):
        try:
            if None in row or None in row.values():
                raise ValueError(f"has not the {len(row)} columns of the header")
            found.rows.append(parse(row))
        except ValueError as error:
            found.problems.append(f"{path.name}:{number}: {error}")
    return found


def numbered_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, row) of a CSV file.

    Raises:
        InputError: the file cannot be read, or lacks one of ``columns``.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    kept = [(i, text) for i, text in enumerate(lines, start=1) if not text.startswith("#")]
    reader = csv.DictReader([text for _, text in kept])
    header = list(reader.fieldnames or ())
    for column in columns:
        if column not in header:
            hint = did_you_mean(column, header)
            raise InputError(f"{path}: no column '{column}'{hint}; it has {', '.join(header)}")
    for row in reader:
        yield kept[reader.line_num - 1][0], row


def number(row: Row, column: str) -> float:
    """A finite number above zero.

    Raises:
        ValueError: it is none.
    """
    text = (row[column] or "").strip()
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{column} is '{text}', not a number") from None
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{column} is {text}; it must be above 0")
    return value


def count(row: Row, column: str) -> int:
    """A whole number of at least one.

    Raises:
        ValueError: it is none.
    """
    value = number(row, column)
    if value != int(value):
        raise ValueError(f"{column} is {row[column]}, not a whole number")
    return int(value)
