"""Trace files: plain or gzipped JSON, alone, in folders or in tars, and the rank of each."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from predictor.errors import InputError, did_you_mean
from predictor.files import open_input

GZIP_MAGIC = b"\x1f\x8b"
TAR_MAGIC, TAR_AT = b"ustar", 257
SUFFIXES = (".json", ".json.gz", ".tar", ".tar.gz", ".tgz")
CHUNK_BYTES = 1 << 20
MOST_CHARS = 2**33
"""Longer than any trace that fits into memory; a file such as a damaged gzip may have no end."""


@dataclass(frozen=True)
class TraceFile:
    """One document.

    Args:
        source: the file as the user knows it; of a tar ``archive:member``.
        text: its content; bytes that are no UTF-8 are U+FFFD.
        named: the user gave this very file; False: it was found in a folder or tar.
    """

    source: str
    text: str
    named: bool


def open_traces(paths: Iterable[str | Path]) -> Iterator[TraceFile]:
    """Yield every document under these paths: files, folders (without subfolders), tars."""
    for path in paths:
        path = Path(path)
        if path.is_dir():
            with _readable(str(path)):
                files = sorted(p for p in path.iterdir() if _is_candidate(p.name) and p.is_file())
            if not files:
                raise InputError(
                    f"{path}: no trace files in this folder; looked for {', '.join(SUFFIXES)}"
                )
            for file in files:
                yield from _open(file, named=False)
        else:
            yield from _open(path, named=True)


def _is_candidate(name: str) -> bool:
    # a tar packed on macOS carries files "._name" that hold attributes
    return not name.startswith(".") and name.endswith(SUFFIXES)


def _open(path: Path, *, named: bool) -> Iterator[TraceFile]:
    source = str(path)
    try:
        file = open_input(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such trace file{_neighbour(path)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot read this trace file: {reason}") from None
    with file, _readable(source):
        stream = _unpack(file)
        # archives need not have the right suffix
        if stream.peek(TAR_AT + len(TAR_MAGIC))[TAR_AT:].startswith(TAR_MAGIC):
            yield from _members(stream, source)
        else:
            yield _document(stream, source, named=named)


def _neighbour(path: Path) -> str:
    """Suggest the nearest name in the folder, or name the folder that is missing."""
    if not path.parent.is_dir():
        return f"; there is no directory {path.parent}"
    with suppress(OSError):
        return did_you_mean(path.name, [p.name for p in path.parent.iterdir()])
    return ""


def _unpack(file: IO[bytes]) -> io.BufferedReader:
    """Return a stream of the content, whatever the suffix; both kinds can be peeked into."""
    plain = cast("io.BufferedReader", file)
    if plain.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC):
        return cast("io.BufferedReader", gzip.GzipFile(fileobj=plain))
    return plain


def _document(stream: io.BufferedReader, source: str, *, named: bool) -> TraceFile:
    start = stream.peek(1)[:64].removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start or start[:1] not in b"{[":
        first = start.decode("utf-8", errors="replace")[:1]
        problem = f"starts with {first!r}" if first else "is empty"
        raise InputError(f"{source}: not a trace: {problem}; a trace is JSON, alone or gzipped")
    # names may hold any bytes
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    text = io.StringIO()
    while chunk := stream.read(CHUNK_BYTES):
        text.write(decoder.decode(chunk))
        if text.tell() > MOST_CHARS:
            raise InputError(f"{source}: is longer than {MOST_CHARS >> 30} GiB; trace fewer steps")
    text.write(decoder.decode(b"", True))
    return TraceFile(source, text.getvalue(), named)


def _members(stream: io.BufferedReader, archive: str) -> Iterator[TraceFile]:
    any_member = False
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            name = Path(member.name).name
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None and _is_candidate(name):
                any_member = True
                with _readable(f"{archive}:{name}"):
                    yield _document(_unpack(content), f"{archive}:{name}", named=False)
    if not any_member:
        raise InputError(f"{archive}: no trace files in this archive; looked for *.json, *.json.gz")


@contextmanager
def _readable(source: str) -> Iterator[None]:
    """Turn errors of unpacking into messages."""
    try:
        yield
    except EOFError:
        raise InputError(f"{source}: the compressed file is cut off; copy it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{source}: damaged gzip file: {error}") from None
    except tarfile.TarError as error:
        raise InputError(f"{source}: damaged tar file: {error}") from None
    except OSError as error:
        raise InputError(f"{source}: cannot read: {error.strerror or error}") from None


def read_json(
    file: TraceFile, hook: Callable[[dict[str, Any]], object]
) -> dict[str, Any] | list[Any]:
    """Parse a document, an object or an array (chrome://tracing allows that).

    Args:
        hook: replaces each JSON object, innermost first; events become records as they are read,
            so that few of them are in memory as JSON.
    """
    try:
        # profilers write tabs and the like into names as they are
        document = json.loads(file.text, strict=False, object_hook=hook)
    except RecursionError:
        raise InputError(f"{file.source}: nested too deeply") from None
    except json.JSONDecodeError as error:
        excerpt = repr(file.text[error.pos :][:20]) if error.pos < len(file.text) else "the end"
        raise InputError(
            f"{file.source}: not JSON, or cut off: {error.msg}, at character {error.pos:,}, "
            f"found {excerpt}"
        ) from None
    except ValueError as error:
        raise InputError(f"{file.source}: not JSON: {error}") from None
    return document if isinstance(document, dict | list) else {}


IN_NAME = re.compile(r"(?:rank|worker|(?:^|[-_.])e[gt])[-_]?(\d{1,7})", re.IGNORECASE)
OF_IN_NAME = re.compile(r"rank[-_]?\d+[-_]?of[-_]?(\d{1,7})", re.IGNORECASE)


def rank_of(
    source: str, distributed: object, *, name_first: bool = False
) -> tuple[int, int | None, tuple[str, ...]]:
    """Return rank, world size (None: unknown), and notes on guesses.

    Args:
        source: path of the file, whose name often holds the rank.
        distributed: entry of the document, such as Kineto's ``distributedInfo``.
        name_first: prefer the rank in the name.
    """
    name = re.split(r"[/\\:]", source)[-1]
    info = distributed if isinstance(distributed, Mapping) else {}
    rank, world_size = _count(info.get("rank"), 0), _count(info.get("world_size"), 1)
    if world_size is None and (match := OF_IN_NAME.search(name)):
        world_size = int(match[1]) or None
    match = IN_NAME.search(name)
    if match and (rank is None or name_first):
        return int(match[1]), world_size, ()
    if rank is not None:
        return rank, world_size, ()
    return 0, world_size, ("no rank in the trace or its name; taken for rank 0",)


def _count(value: object, least: int) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        return None
    return value
