"""Embedding tables from a CSV file with one row per feature.

Columns have the names of the YAML keys. ``name`` is the table's name, and rows of one table
repeat it; ``feature`` is the feature's name (the table's own when the column is left out). What
belongs to the table must be the same in all its rows, or empty in all but the first. An empty
cell counts as left out. Nested values stand as inline YAML in their cell, such as
``{zipf: {alpha: 1.05}}`` in ``index_distribution`` or ``{ranks: [0, 1]}`` in ``constraints``, or
spread over columns: ``zipf_alpha``, ``zipf_q``, and one column for each key of ``constraints``.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predictor.document import KeyPath, Place, Problems, parse_yaml, shown
from predictor.errors import InputError
from predictor.model.workload import Constraints, Feature, Table
from predictor.section import Name, Section, keys_of, nearest
from shardopt.files import decode, read_bytes, refuse_streams

_CONSTRAINTS = list(keys_of(Constraints))
_TABLE = [key for key in keys_of(Table) if key != "features"]
_FEATURE = ["feature", *(key for key in keys_of(Feature) if key != "name")]
_ZIPF = ["zipf_alpha", "zipf_q"]
COLUMNS = [*_TABLE, *_FEATURE, *_ZIPF, *_CONSTRAINTS]
_TEXT = ("name", "feature", "module", "co_locate")
"""Columns whose cells are names, never YAML."""


@dataclass(frozen=True)
class CsvFile(Section):
    """Tables from a CSV file: a row for each feature, columns with the names of these keys."""

    csv: Name
    """The file, relative to this one."""


def read_tables_csv(path: Path, problems: Problems) -> tuple[list[dict[str, Any]], bytes]:
    """The tables as the YAML list would give them, and the bytes of the file.

    Args:
        path: the file; UTF-8, comma-separated, with a header line.
        problems: takes errors (file, line, column) and the places of all values.
    """
    try:
        refuse_streams(path, "CSV file of tables")
        content = read_bytes(path, "CSV file of tables")
        rows = _rows(decode(content, path), path, problems)
    except InputError as error:
        problems.add(("tables", "csv"), str(error))
        return [], b""
    tables = _Tables(str(path), problems)
    for line, row in rows:
        tables.add(line, row)
    if not tables.raw and not problems.found:
        problems.add_at(Place(str(path)), "the file has no row; give one row per feature")
    return tables.raw, content


def changed_csv(
    path: Path, changes: Mapping[tuple[str, str], Mapping[str, Any]], folder: Path
) -> str:
    """The text of the file with other values of some tables, in new columns where it has none.

    Args:
        changes: module and name of a table -> its keys; those of ``constraints`` are columns.
        folder: where the copy will lie.

    Raises:
        InputError: rows name files, which are relative to the file's own folder.
    """
    text = decode(read_bytes(path, "CSV file of tables"), path)
    problems = Problems(str(path))
    rows = [row for _, row in _rows(text, path, problems)]
    problems.raise_if_any()
    if folder.resolve() != path.parent.resolve() and "file" in text:
        raise InputError(
            f"{path}: may name files relative to its own folder; write the copy into {path.parent}"
        )
    flat = {key: {**values, **values.get("constraints", {})} for key, values in changes.items()}
    columns = list(rows[0])
    columns += dict.fromkeys(
        c for values in flat.values() for c in values if c != "constraints" and c not in columns
    )
    copy = io.StringIO()
    writer = csv.DictWriter(copy, columns, restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        new = flat.get((row.get("module") or "ebc", row["name"]), {})
        cells = {c: str(v).lower() if isinstance(v, bool) else v for c, v in new.items()}
        writer.writerow({**row, **{c: v for c, v in cells.items() if c != "constraints"}})
    return copy.getvalue()


def _rows(text: str, path: Path, problems: Problems) -> list[tuple[int, dict[str, str]]]:
    """Line number and named cells of every row that has as many cells as the header."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    rows = []
    try:
        header = [name.strip() for name in next(reader, [])]
        if not _header_ok(header, path, problems):
            return []
        for cells in reader:
            stripped = [cell.strip() for cell in cells]
            if any(stripped) and len(cells) != len(header):
                problems.add_at(
                    Place(str(path), reader.line_num),
                    f"the row has {len(cells)} cells but the header {len(header)}; "
                    "put values that contain commas in double quotes",
                )
            elif any(stripped):
                rows.append((reader.line_num, dict(zip(header, stripped, strict=True))))
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num}: not CSV: {error}") from None
    return rows


def _header_ok(header: list[str], path: Path, problems: Problems) -> bool:
    wrong = {
        name: f"unknown column{nearest(name, COLUMNS)}; known: {', '.join(COLUMNS)}"
        for name in header
        if name not in COLUMNS
    }
    twice = sorted({name for name in header if header.count(name) > 1})
    wrong |= dict.fromkeys(twice, "the column appears twice; remove one")
    if "name" not in header:
        wrong[""] = "the column name (of the table) is missing"
    for name, problem in wrong.items():
        problems.add_at(Place(str(path), 1, name), problem)
    return not wrong


class _Tables:
    """Gathers rows into tables and remembers where each value stood."""

    def __init__(self, file: str, problems: Problems) -> None:
        self.file = file
        self.problems = problems
        self.raw: list[dict[str, Any]] = []
        self.index: dict[tuple[str, str], int] = {}
        self.modules: dict[str, str] = {}
        """Module of the latest table of a name, for rows that leave it empty."""
        self.first: list[tuple[int, dict[str, str]]] = []

    def add(self, line: int, row: dict[str, str]) -> None:
        """Add a row: a feature, and its table when the row is the table's first."""
        if not row["name"]:
            self._wrong(line, "name", "the table has no name")
            return
        module = row.get("module") or self.modules.get(row["name"], "ebc")
        self.modules[row["name"]] = module
        number = self.index.setdefault((module, row["name"]), len(self.raw))
        if number == len(self.raw):
            self.first.append((line, row))
            self.raw.append(self._table(line, row))
        first_line, first = self.first[number]
        for name in (*_TABLE, *_CONSTRAINTS):
            if row.get(name) and row[name] != first[name]:
                self._wrong(
                    line,
                    name,
                    f"got {shown(row[name])}, but line {first_line} gives the same table "
                    f"{shown(first[name])}; make them equal, or leave this cell empty",
                )
        features = self.raw[number]["features"]
        features.append(self._feature(line, row, ("tables", number, "features", len(features))))

    def _table(self, line: int, row: dict[str, str]) -> dict[str, Any]:
        path: KeyPath = ("tables", len(self.raw))
        table = self._values(line, row, _TABLE, path)
        own = self._values(line, row, _CONSTRAINTS, (*path, "constraints"))
        if own:
            stated = table.get("constraints")
            table["constraints"] = {**(stated if isinstance(stated, dict) else {}), **own}
        return {**table, "features": []}

    def _feature(self, line: int, row: dict[str, str], path: KeyPath) -> dict[str, Any]:
        feature = self._values(line, row, _FEATURE, path)
        feature["name"] = feature.pop("feature", row["name"])
        column = "feature" if "feature" in row else "name"
        self.problems.places[(*path, "name")] = Place(self.file, line, column)
        nested = (*path, "index_distribution", "zipf")
        zipf = self._values(line, row, _ZIPF, nested)
        if zipf and "index_distribution" in feature:
            self._wrong(line, "index_distribution", "zipf_alpha is given too")
        if zipf:
            plain = {name: name.removeprefix("zipf_") for name in _ZIPF}
            for name, key in plain.items():
                self.problems.places[(*nested, key)] = Place(self.file, line, name)
            feature["index_distribution"] = {"zipf": {plain[name]: zipf[name] for name in zipf}}
        return feature

    def _values(
        self, line: int, row: dict[str, str], names: list[str], path: KeyPath
    ) -> dict[str, Any]:
        """The filled cells of some columns, by column name."""
        self.problems.places[path] = Place(self.file, line)
        filled = [name for name in names if row.get(name)]
        for name in filled:
            self.problems.places[(*path, name)] = Place(self.file, line, name)
        return {name: self._cell(line, name, row[name]) for name in filled}

    def _wrong(self, line: int, column: str, message: str) -> None:
        self.problems.add_at(Place(self.file, line, column), message)

    def _cell(self, line: int, name: str, cell: str) -> Any:
        """Text as it stands, true and false, or inline YAML in brackets or braces."""
        if name in _TEXT or (cell[0] not in "{[" and cell.lower() not in ("true", "false")):
            return cell
        if cell[0] not in "{[":
            return cell.lower() == "true"
        inner = Problems(str(Place(self.file, line, name)))
        try:
            value = parse_yaml(cell, inner)
            inner.raise_if_any()
        except InputError as error:
            self._wrong(line, name, f"{error}")
            return None
        return value
