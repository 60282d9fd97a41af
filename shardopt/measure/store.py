"""The store of measured rows: read, append, resume, versions, and errors in files.

Rows are lines of CSV under a header; a `RowKind` describes a line.
`RowsFile` adds rows one at a time and writes each to the disk at once, so that a run that is killed
continues from its file: the line that was cut off is measured again.
Files that are not lists of rows but one JSON document are read by `read_json`.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from predictor.csv_rows import parse_table
from predictor.errors import InputError
from shardopt.files import atomic_write_text, decode, read_bytes

T = TypeVar("T")
Fields = Mapping[str, Any]
"""A line by its columns."""


@dataclass(frozen=True)
class RowKind(Generic[T]):
    """Format of the lines of a file.

    Args:
        what: a row in words, for messages, such as "calibration row".
        keys: columns, in their order.
        parse: a line's fields -> the row. Raises ValueError, KeyError, TypeError or AttributeError
            for fields that are no such row.
        fields: a row -> its fields, which are written as `str` makes them.
        schema: version that the field `schema` of every line must have; empty: lines have none.
        comment: first line of the file, which starts with ``#``.
        remedy: advice on a line that cannot be read.
    """

    what: str
    keys: Sequence[str]
    parse: Callable[[Fields], T]
    fields: Callable[[T], Fields]
    schema: str = ""
    comment: str = ""
    remedy: str = "restore the file"

    @property
    def head(self) -> str:
        """Text of a file before its rows."""
        return self.comment + _csv_line(self.keys)

    def line(self, row: T) -> str:
        fields = self.fields(row)
        return _csv_line([fields[key] for key in self.keys])

    def row(self, fields: Fields) -> T:
        """Parse the row of a line's fields.

        Raises:
            ValueError: names the fault.
        """
        if self.schema and fields["schema"] != self.schema:
            raise ValueError(
                f"schema is '{fields['schema']}', but this version reads '{self.schema}'"
            )
        try:
            return self.parse(fields)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def rows(self, path: Path, text: str) -> list[T]:
        """Parse all rows of a text.

        Raises:
            InputError: a line is no such row; names it.
        """
        if not text.strip():
            return []
        parsed = parse_table(path, text, self.keys, self.row)
        if parsed.problems:
            where, _, why = parsed.problems[0].partition(": ")
            rest = len(parsed.problems) - 1
            more = f" (and {rest} more lines)" if rest else ""
            raise InputError(
                f"{path.parent / where}: not a {self.what}: {why}{more}; {self.remedy}"
            )
        return parsed.rows


def _csv_line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def read_rows(path: Path, kind: RowKind[T]) -> list[T]:
    """Read all rows of a file, without a last line that was cut off while it was written.

    Raises:
        InputError: the file cannot be read, is of another kind, or a line is no such row; names
            the line.
    """
    return kind.rows(path, _whole_lines(_text(path, kind), kind))


def write_rows(path: Path, kind: RowKind[T], rows: Sequence[T]) -> None:
    """Replace a file by one with these rows, atomically.

    Raises:
        InputError: it cannot be written.
    """
    atomic_write_text(path, kind.head + "".join(map(kind.line, rows)), update=True)


class RowsFile(Generic[T]):
    """A file of rows that grows; it need not exist yet.

    Args:
        rows: the rows that it holds.
    """

    def __init__(self, path: Path, kind: RowKind[T]) -> None:
        """Read the file if it exists.

        Raises:
            InputError: as `read_rows`; or a line that was cut off cannot be removed.
        """
        self.path, self.kind = path, kind
        self.rows: list[T] = []
        if path.exists() and path.stat().st_size:
            text = _text(path, kind)
            whole = _whole_lines(text, kind)
            self.rows = kind.rows(path, whole)
            if whole != text:
                atomic_write_text(path, whole, update=True)

    def append(self, row: T) -> None:
        """Write one row to the disk.

        Raises:
            InputError: it cannot be written.
        """
        try:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                file.write((self.kind.head if file.tell() == 0 else "") + self.kind.line(row))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"{self.path}: cannot write: {error.strerror or error}") from error
        self.rows.append(row)


def _text(path: Path, kind: RowKind[Any]) -> str:
    return decode(read_bytes(path, f"file of {kind.what}s"), path)


def _whole_lines(text: str, kind: RowKind[Any]) -> str:
    """Return the text without a last line that was cut off.

    A line whose last number is cut off could be read.
    """
    whole = text[: text.rfind("\n") + 1]
    return "" if kind.head.startswith(whole) and whole != kind.head else whole


@dataclass(frozen=True)
class Document:
    """A JSON document on disk, each of whose keys and list entries starts a line.

    Args:
        remedy: advice on a broken file.
    """

    path: Path
    data: Mapping[str, Any]
    lines: Sequence[str]
    remedy: str

    def refuse(self, problem: str, key: str, index: int | None = None) -> NoReturn:
        """Raise the InputError of a key, or of an entry of the list that it names."""
        starts = (i for i, line in enumerate(self.lines, start=1) if line.startswith(f' "{key}":'))
        line = next(starts, 1) + (0 if index is None else index + 1)
        where = "" if index is None else f"{key}[{index}]: "
        raise InputError(f"{self.path}:{line}: {where}{problem}; {self.remedy}")


def read_json(
    path: Path, title: str, schema: str, kinds: Mapping[str, type], remedy: str
) -> Document:
    """Read a JSON document.

    Args:
        title: the file in words, such as "rows file".
        schema: required value of its key `schema`.
        kinds: required keys, with the types of their values.
        remedy: advice on a broken file.

    Raises:
        InputError: it cannot be read, is not JSON, has another schema, or lacks a key; names the
            line.
    """
    text = decode(read_bytes(path, title), path)

    def refuse(word: str) -> NoReturn:
        raise InputError(f"{path}: holds {word}, which is no number of JSON; {remedy}")

    try:
        data = json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}:{error.lineno}: not JSON ({error.msg}, column {error.colno}); {remedy}"
        ) from None
    file_schema = data.get("schema") if isinstance(data, dict) else None
    if file_schema != schema:
        raise InputError(
            f"{path}: schema is {file_schema!r}, but this version reads '{schema}'; {remedy}"
        )
    document = Document(path, data, text.splitlines(), remedy)
    for key, kind in kinds.items():
        if not isinstance(data.get(key), kind):
            document.refuse(f"'{key}' is missing or malformed", key)
    return document
