"""Rows survive a process that is killed while it writes one, and broken lines are named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from predictor.errors import InputError
from shardopt.measure.store import RowKind, RowsFile, read_json, read_rows, write_rows


@dataclass(frozen=True)
class Shot:
    name: str
    ms: float


CSV = RowKind(
    what="shot",
    keys=("schema", "name", "ms"),
    parse=lambda fields: Shot(fields["name"], float(fields["ms"])),
    fields=lambda shot: {"schema": "shots/1", "name": shot.name, "ms": f"{shot.ms:.3f}"},
    schema="shots/1",
    comment="# shots\n",
    remedy="shoot again",
)
SHOTS = [Shot("a", 1.5), Shot("b, c", 2.0)]


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    grown, rewritten = tmp_path / "grown", tmp_path / "whole"
    file = RowsFile(grown, CSV)
    for shot in SHOTS:
        file.append(shot)
    write_rows(rewritten, CSV, SHOTS)
    assert grown.read_text() == rewritten.read_text()
    assert read_rows(grown, CSV) == file.rows == RowsFile(grown, CSV).rows == SHOTS


def test_a_run_goes_on_wherever_it_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    write_rows(path, CSV, SHOTS)
    text = path.read_text()
    for size in range(len(text)):
        path.write_text(text[:size])
        read = read_rows(path, CSV) if size else []
        assert path.read_text() == text[:size], "reading changes nothing"
        file = RowsFile(path, CSV)
        assert file.rows == SHOTS[: len(file.rows)] == read
        for shot in SHOTS[len(file.rows) :]:
            file.append(shot)
        assert read_rows(path, CSV) == SHOTS
        assert path.read_text() == text


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    write_rows(path, CSV, [*SHOTS, *SHOTS])
    lines = path.read_text().splitlines()
    head = len(CSV.head.splitlines())
    lines[head] = lines[head].replace("1.5", '"')
    lines[head + 2] = "nonsense"
    path.write_text("\n".join(lines) + "\n")
    message = rf"rows:{head + 1}: not a shot: .* \(and 1 more lines\); shoot again"
    with pytest.raises(InputError, match=message):
        read_rows(path, CSV)
    with pytest.raises(InputError, match=message):
        RowsFile(path, CSV)


def test_keys_and_versions_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("schema,name,ms\nshots/2,a,1\n")
    with pytest.raises(InputError, match=r"rows:2: .*'shots/2', but this version reads 'shots/1'"):
        read_rows(path, CSV)
    path.write_text("name,ms\na,1\n")
    with pytest.raises(InputError, match="rows:1: no column 'schema'"):
        read_rows(path, CSV)
    with pytest.raises(InputError, match="no such file of shots"):
        read_rows(tmp_path / "none", CSV)


def test_rows_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        RowsFile(tmp_path / "none" / "rows", CSV).append(SHOTS[0])


def test_a_document_names_the_line_of_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    kinds = {"head": dict, "rounds": list}
    path.write_text('{\n "schema": "doc/1",\n "head": {},\n "rounds": [\n  1,\n  2\n ]\n}\n')
    file = read_json(path, "rows file", "doc/1", kinds, "restore it")
    assert file.data["rounds"] == [1, 2]
    with pytest.raises(InputError, match=r"file.json:6: rounds\[1\]: too small; restore it"):
        file.refuse("too small", "rounds", 1)
    with pytest.raises(InputError, match=r"'notes' is missing or malformed; restore it"):
        read_json(path, "rows file", "doc/1", {"notes": str}, "restore it")
    with pytest.raises(InputError, match=r"schema is 'doc/1', but this version reads 'doc/2'"):
        read_json(path, "rows file", "doc/2", kinds, "restore it")
    path.write_text(path.read_text()[:-3])
    with pytest.raises(InputError, match=r"file.json:\d+: not JSON"):
        read_json(path, "rows file", "doc/1", kinds, "restore it")
