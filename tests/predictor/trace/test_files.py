"""Where traces lie: files, gzip, folders, archives, and what can be wrong with them."""

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from predictor.errors import InputError
from predictor.trace.files import open_traces, read_object, text_of
from predictor.trace.read import load_traces
from tests.predictor.trace.synthetic import kineto, write

CONTENT = json.dumps(kineto()).encode()


def archive(path: Path, members: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def contents(*paths: Path) -> dict[str, bytes]:
    return {f.source: b"".join(f.chunks()) for f in open_traces(paths)}


def test_plain_and_gzipped_whatever_the_suffix(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(gzip.compress(b"{}"))
    (tmp_path / "b.json.gz").write_bytes(b"{}")
    assert set(contents(tmp_path / "a.json", tmp_path / "b.json.gz").values()) == {b"{}"}


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_archives_pass_over_what_is_no_trace(tmp_path: Path, mode: str) -> None:
    members = {
        "d/rank0.json": b"[0]",
        "d/._rank0.json": b"attributes",
        "d/readme.txt": b"text",
        "d/rank1.json.gz": gzip.compress(b"[1]"),
    }
    path = archive(tmp_path / "x.tar.gz", members, mode)
    assert contents(path) == {f"{path}:rank0.json": b"[0]", f"{path}:rank1.json.gz": b"[1]"}


def test_folders_hold_files_and_archives(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_bytes(b"[0]")
    archive(tmp_path / "a.tgz", {"c.json": b"[1]"})
    (tmp_path / "notes.md").write_bytes(b"")
    assert list(contents(tmp_path).values()) == [b"[1]", b"[0]"]


def test_other_json_beside_traces_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "plan.json", {"schema": "shardopt.plan/1"})
    write(tmp_path, "rank0.json", kineto())
    found = load_traces([tmp_path])
    assert [t.rank for t in found.traces] == [0]
    assert any("plan.json: not a trace; left out" in note for note in found.notes)


def broken(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    whole = gzip.compress(CONTENT)
    tar = archive(tmp_path / "whole.tar.gz", {"rank0.json": CONTENT}).read_bytes()
    plain = archive(tmp_path / "whole.tar", {"rank0.json": CONTENT}, "w").read_bytes()
    files = {
        "cut.json.gz": (whole[: len(whole) // 2], "cut off; copy it again"),
        "flipped.json.gz": (whole[:60] + b"\x00\xff\x00" + whole[63:], "damaged gzip|not JSON"),
        "cut.tar.gz": (tar[: len(tar) // 2], "cut off; copy it again|damaged"),
        "cut.tar": (plain[: len(plain) // 2], "damaged tar|cut off"),
        "cut.json": (CONTENT[: len(CONTENT) // 2], "cut off"),
        "empty.json": (b"", "is empty"),
        "empty.json.gz": (gzip.compress(b""), "is empty"),
        "picture.json": (b"\x89PNG\r\n\x1a\n\x00\x00", "not a trace: starts with"),
        "text.json": (b"PK\x03\x04", "not a trace: starts with 'P'"),
        "words.txt": (b"hello", "not a trace: starts with 'h'"),
        "other.json": (b'{"a": 1}', "without `traceEvents`"),
    }
    found = {}
    for name, (content, words) in files.items():
        (tmp_path / name).write_bytes(content)
        found[name] = (tmp_path / name, words)
    (tmp_path / "folder").mkdir()
    found["folder"] = (tmp_path / "folder", "no trace files in this folder")
    none = archive(tmp_path / "none.tar.gz", {"readme.txt": b"x"})
    found["none.tar.gz"] = (none, "no trace files in this archive")
    found["missing"] = (tmp_path / "rank0.jsn", "no such trace file")
    return found


def test_every_broken_file_is_named_with_its_reason(tmp_path: Path) -> None:
    for name, (path, words) in broken(tmp_path).items():
        with pytest.raises(InputError, match=words) as caught:
            load_traces([path])
        assert str(path) in str(caught.value), name


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "rank0.json", kineto())
    with pytest.raises(InputError, match=r"did you mean 'rank0.json'"):
        load_traces([tmp_path / "rank0.jsn"])


TEXT = st.text(st.characters(exclude_categories=("Cs",)))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def read(content: bytes, size: int) -> tuple[list[object], dict[str, object]]:
    items: list[object] = []
    chunks = (content[i : i + size] for i in range(0, len(content), size))
    rest = read_object(text_of(chunks), {"items": items.append}, "a.json")
    return items, rest


@example([0.5, -1e-05, 12], {}, 1, False)
@given(
    st.lists(VALUES, max_size=6),
    st.dictionaries(TEXT, VALUES, max_size=4),
    st.integers(1, 40),
    st.booleans(),
)
def test_equals_json(items: list[Any], rest: dict[str, Any], size: int, indented: bool) -> None:
    rest.pop("items", None)
    document = {**rest, "items": items, "after": 12345}
    text = json.dumps(document, indent=2 if indented else None, ensure_ascii=False)
    got, others = read(text.encode(), size)
    assert got == items
    assert others == {**document, "items": len(items)}


def test_an_array_alone_counts_as_the_first_member() -> None:
    assert read(b"[1, 2]", 3) == ([1, 2], {"items": 2})


def test_what_is_no_array_is_kept() -> None:
    assert read(b'{"items": 7}', 100) == ([], {"items": 7})


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        ("plan", "starts with 'p'"),
        ('{"items": [1, 2', "cut off"),
        ('{"items": [1, 2]', "cut off"),
        ('{"items": [{"a": "b', "not JSON"),
        ('{"items": [1 2]}', "expected ',' or ']', at character 13"),
        ('{"items": [1,,2]}', "expected a value"),
        ("{1: 2}", "expected the name of a member"),
        ('{"a" 2}', "expected ':'"),
        ("{} {}", "more text after the end"),
    ],
)
def test_broken(text: str, words: str, size: int) -> None:
    with pytest.raises(InputError, match=words) as caught:
        read(text.encode(), size)
    assert str(caught.value).startswith("a.json: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_what_python_cannot_hold(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(text.encode(), 1 << 18)


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert read(b'{"items": ["\xff\xfea\tb"]}', 4)[0] == ["\ufffd\ufffda\tb"]
