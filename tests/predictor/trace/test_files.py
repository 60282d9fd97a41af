"""Trace files, gzip, folders and archives, and their faults."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from predictor.errors import InputError
from predictor.trace.files import open_traces
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


def contents(*paths: Path) -> dict[str, str]:
    return {f.source: f.text for f in open_traces(paths)}


def test_plain_and_gzipped_whatever_the_suffix(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(gzip.compress(b"{}"))
    (tmp_path / "b.json.gz").write_bytes(b"{}")
    assert set(contents(tmp_path / "a.json", tmp_path / "b.json.gz").values()) == {"{}"}


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_archives_pass_over_what_is_no_trace(tmp_path: Path, mode: str) -> None:
    members = {
        "d/rank0.json": b"[0]",
        "d/._rank0.json": b"attributes",
        "d/readme.txt": b"text",
        "d/rank1.json.gz": gzip.compress(b"[1]"),
    }
    path = archive(tmp_path / "x.tar.gz", members, mode)
    assert contents(path) == {f"{path}:rank0.json": "[0]", f"{path}:rank1.json.gz": "[1]"}


def test_other_json_beside_traces_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "plan.json", {"schema": "shardopt.plan/1"})
    write(tmp_path, "rank0.json", kineto())
    traces = load_traces([tmp_path])
    assert [t.rank for t in traces.traces] == [0]
    assert any("plan.json: not a trace; left out" in note for note in traces.notes)


def broken(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    compressed = gzip.compress(CONTENT)
    tar = archive(tmp_path / "whole.tar.gz", {"rank0.json": CONTENT}).read_bytes()
    plain = archive(tmp_path / "whole.tar", {"rank0.json": CONTENT}, "w").read_bytes()
    files = {
        "cut.json.gz": (compressed[: len(compressed) // 2], "cut off; copy it again"),
        "flipped.json.gz": (
            compressed[:60] + b"\x00\xff\x00" + compressed[63:],
            "damaged gzip|not JSON",
        ),
        "cut.tar.gz": (tar[: len(tar) // 2], "cut off; copy it again|damaged"),
        "cut.tar": (plain[: len(plain) // 2], "damaged tar|cut off"),
        "cut.json": (CONTENT[: len(CONTENT) // 2], "cut off"),
        "open.json": (b'{"traceEvents": [{"a": "b', "not JSON"),
        "comma.json": (b'{"traceEvents": [1 2]}', "at character 19"),
        "two.json": (b"{} {}", "not JSON"),
        "deep.json": (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        "digits.json": (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        "empty.json": (b"", "is empty"),
        "blank.json": (b"  \n", "is empty"),
        "empty.json.gz": (gzip.compress(b""), "is empty"),
        "picture.json": (b"\x89PNG\r\n\x1a\n\x00\x00", "not a trace: starts with"),
        "text.json": (b"PK\x03\x04", "not a trace: starts with 'P'"),
        "words.txt": (b"hello", "not a trace: starts with 'h'"),
        "other.json": (b'{"a": 1}', "without `traceEvents`"),
    }
    contents = {}
    for name, (content, words) in files.items():
        (tmp_path / name).write_bytes(content)
        contents[name] = (tmp_path / name, words)
    (tmp_path / "folder").mkdir()
    contents["folder"] = (tmp_path / "folder", "no trace files in this folder")
    none = archive(tmp_path / "none.tar.gz", {"readme.txt": b"x"})
    contents["none.tar.gz"] = (none, "no trace files in this archive")
    contents["missing"] = (tmp_path / "othr.json", r"no such trace file.*did you mean 'other.json'")
    return contents


def test_every_broken_file_is_named_with_its_reason(tmp_path: Path) -> None:
    for name, (path, words) in broken(tmp_path).items():
        with pytest.raises(InputError, match=words) as caught:
            load_traces([path])
        assert str(caught.value).startswith(str(path)), name


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(InputError, match="not a trace: starts with"):
        load_traces(["/dev/zero"])
