"""Trace files: plain or gzipped JSON, alone, in folders or in tars, and the rank each is of.

Their JSON is read item by item: a trace may be far larger than memory.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, cast

from predictor.errors import InputError, did_you_mean
from predictor.files import open_input

CHUNK_BYTES = 1 << 18
GZIP_MAGIC = b"\x1f\x8b"
TAR_MAGIC, TAR_AT = b"ustar", 257
SUFFIXES = (".json", ".json.gz", ".tar", ".tar.gz", ".tgz")


class ByteReader(Protocol):
    """What a document is read from."""

    def read(self, size: int, /) -> bytes:
        """The next bytes, at most ``size``; empty at the end."""


@dataclass(frozen=True)
class TraceFile:
    """One document.

    Args:
        source: the file as the user knows it; of a tar ``archive:member``.
        stream: its bytes, unpacked; valid until the next file is asked for.
        named: the user gave this very file; False: it was found in a folder or tar.
    """

    source: str
    stream: ByteReader
    named: bool

    def chunks(self) -> Iterator[bytes]:
        """The content.

        Raises:
            InputError: it cannot be unpacked or read to its end.
        """
        with _readable(self.source):
            while chunk := self.stream.read(CHUNK_BYTES):
                yield chunk


def open_traces(paths: Iterable[str | Path]) -> Iterator[TraceFile]:
    """Every document under these paths: files, folders (not what lies deeper), tars.

    Raises:
        InputError: a path is missing, not readable, or holds no trace file.
    """
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
    with file:
        with _readable(source):
            stream = _unpack(file)
            is_tar = stream.peek(TAR_AT + len(TAR_MAGIC))[TAR_AT:] == TAR_MAGIC
        if is_tar:
            yield from _members(stream, source)
        else:
            yield TraceFile(source, stream, named)


def _neighbour(path: Path) -> str:
    """The nearest name in the folder, or which folder is missing."""
    if not path.parent.is_dir():
        return f"; there is no directory {path.parent}"
    with suppress(OSError):
        return did_you_mean(path.name, [p.name for p in path.parent.iterdir()])
    return ""


def _unpack(file: IO[bytes]) -> _Peekable:
    plain = _Peekable(file)
    if plain.peek(len(GZIP_MAGIC)) == GZIP_MAGIC:
        return _Peekable(gzip.GzipFile(fileobj=cast("IO[bytes]", plain)))
    return plain


class _Peekable:
    """A stream whose first bytes can be peeked at: archives need not have the right suffix."""

    def __init__(self, stream: ByteReader) -> None:
        self.stream = stream
        self.start = b""

    def peek(self, size: int) -> bytes:
        """The first bytes, before anything was read; fewer at the end of the file."""
        while len(self.start) < size and (chunk := self.stream.read(size - len(self.start))):
            self.start += chunk
        return self.start[:size]

    def read(self, size: int) -> bytes:
        """The next bytes."""
        kept, self.start = self.start[:size], self.start[size:]
        return kept or self.stream.read(size)


def _members(stream: ByteReader, archive: str) -> Iterator[TraceFile]:
    found = False
    tar_stream = cast("IO[bytes]", stream)
    with _readable(archive), tarfile.open(fileobj=tar_stream, mode="r|") as tar:
        for member in tar:
            name = Path(member.name).name
            if not member.isfile() or not _is_candidate(name):
                continue
            content = tar.extractfile(member)
            if content is not None:
                found = True
                yield TraceFile(f"{archive}:{name}", _unpack(content), named=False)
    if not found:
        raise InputError(f"{archive}: no trace files in this archive; looked for *.json, *.json.gz")


@contextmanager
def _readable(source: str) -> Iterator[None]:
    """Turns errors of unpacking into messages."""
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


IN_NAME = re.compile(r"(?:rank|worker|(?:^|[-_.])e[gt])[-_]?(\d{1,7})", re.IGNORECASE)
OF_IN_NAME = re.compile(r"rank[-_]?\d+[-_]?of[-_]?(\d{1,7})", re.IGNORECASE)


def rank_of(
    source: str, distributed: object, *, name_first: bool = False
) -> tuple[int, int | None, tuple[str, ...]]:
    """Rank, world size (None: unknown), and notes on what had to be guessed.

    Args:
        source: path of the file, whose name often holds the rank.
        distributed: what the document says, such as Kineto's ``distributedInfo``.
        name_first: prefer the rank in the name.
    """
    name = re.split(r"[/\\:]", source)[-1]
    said = distributed if isinstance(distributed, Mapping) else {}
    rank, world_size = _count(said.get("rank"), 0), _count(said.get("world_size"), 1)
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


MAX_VALUE_CHARS = 1 << 26
_SPACE = re.compile(r"[ \t\r\n]*")
_OF_NUMBER = re.compile(r"[-+.eE0-9]*")

Item = Callable[[object], None]


def text_of(chunks: Iterable[bytes]) -> Iterator[str]:
    """UTF-8 text of byte chunks; invalid bytes become U+FFFD, since names may hold any bytes."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    for chunk in chunks:
        yield decoder.decode(chunk)
    yield decoder.decode(b"", True)


def read_object(
    chunks: Iterable[str], arrays: Mapping[str, Item], source: str
) -> dict[str, object]:
    """Read one JSON object, passing the items of its long arrays to functions one by one.

    Args:
        chunks: of the text.
        arrays: name of a member of the outermost object -> what takes its items. A document that
            is an array itself counts as the first of them (chrome://tracing allows that).
        source: the file, for messages.

    Returns:
        The other members; of an array that was passed on the number of items.

    Raises:
        InputError: not JSON, or cut off; says where.
    """
    reader = _Reader(chunks, source)
    first = reader.peek()
    if first == "[":
        name, take = next(iter(arrays.items()))
        found: dict[str, object] = {name: reader.items(take)}
    elif first == "{":
        found = _object_members(reader, arrays)
    else:
        given = f"starts with {first!r}" if first else "is empty"
        raise InputError(f"{source}: not a trace: {given}; a trace is JSON, alone or gzipped")
    if reader.peek():
        raise InputError(f"{source}: more text after the end of the JSON, {reader.where()}")
    return found


def _object_members(reader: _Reader, arrays: Mapping[str, Item]) -> dict[str, object]:
    found: dict[str, object] = {}
    for _ in reader.separated("{", "}"):
        name = reader.value()
        if not isinstance(name, str):
            raise reader.broken("the name of a member")
        reader.expect(":")
        take = arrays.get(name)
        if take is not None and reader.peek() == "[":
            found[name] = reader.items(take)
        else:
            found[name] = reader.value()
    return found


class _Reader:
    """A window on the text that grows when a value does not fit."""

    def __init__(self, chunks: Iterable[str], source: str) -> None:
        self.chunks = iter(chunks)
        self.source = source
        self.buffer = ""
        self.position = 0
        self.dropped = 0
        self.ended = False
        # profilers write tabs and the like into names as they are
        self.decode = json.JSONDecoder(strict=False).raw_decode

    def peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            match = _SPACE.match(self.buffer, self.position)
            self.position = match.end() if match else self.position
            if self.position < len(self.buffer):
                return self.buffer[self.position]
            if not self.grow(1):
                return ""

    def expect(self, *allowed: str) -> str:
        """The next character, which must be one of these."""
        found = self.peek()
        if found not in allowed or not found:
            raise self.broken(" or ".join(repr(a) for a in allowed))
        self.position += 1
        return found

    def separated(self, opening: str, closing: str) -> Iterator[None]:
        """Once for each member or item; between two the caller reads one."""
        self.expect(opening)
        if self.peek() == closing:
            self.position += 1
            return
        while True:
            yield
            if self.expect(",", closing) == closing:
                return

    def items(self, take: Item) -> int:
        """Pass on the items of an array; their number."""
        count = 0
        for _ in self.separated("[", "]"):
            take(self.value())
            count += 1
        return count

    def value(self) -> object:
        """The next value."""
        self.peek()
        wanted = 1
        while True:
            try:
                value, end = self.decode(self.buffer, self.position)
            except RecursionError:
                raise InputError(f"{self.source}: nested too deeply, {self.where()}") from None
            except ValueError:
                if not self.grow(wanted):
                    raise self.broken("a value") from None
                wanted *= 2
                continue
            # a number may go on in the next chunk
            if _OF_NUMBER.fullmatch(self.buffer, end) and self.grow(wanted):
                wanted *= 2
                continue
            self.position = end
            return value

    def grow(self, chunks: int) -> bool:
        """Read more; False at the end, or if one value is too long."""
        if self.ended or len(self.buffer) - self.position > MAX_VALUE_CHARS:
            return False
        parts = [self.buffer[self.position :]]
        for _ in range(chunks):
            chunk = next(self.chunks, None)
            self.ended = chunk is None
            if chunk is None:
                break
            parts.append(chunk)
        self.dropped += self.position
        self.position = 0
        self.buffer = "".join(parts)
        return len(parts) > 1

    def where(self) -> str:
        """Where the reader stands."""
        return f"at character {self.dropped + self.position:,}"

    def broken(self, expected: str) -> InputError:
        """What is wrong here; a value that the end of the file cuts off is shown by its start."""
        found = repr(self.buffer[self.position :][:20]) if self.peek() else "the end"
        return InputError(
            f"{self.source}: not JSON, or cut off: expected {expected}, {self.where()}, "
            f"found {found}"
        )
