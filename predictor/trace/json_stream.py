"""JSON objects with one long array, read item by item: a trace may be far larger than memory."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from predictor.errors import InputError

MAX_VALUE_CHARS = 1 << 26
_SPACE = re.compile(r"[ \t\r\n]*")
_OF_NUMBER = re.compile(r"[-+.eE0-9]*")
_WORD = re.compile(r"[-+.\w]*\s*")

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
        found = _members(reader, arrays)
    else:
        given = f"starts with {first!r}" if first else "is empty"
        raise InputError(f"{source}: not a trace: {given}; a trace is JSON, alone or gzipped")
    if reader.peek():
        raise InputError(f"{source}: more text after the end of the JSON, {reader.where()}")
    return found


def _members(reader: _Reader, arrays: Mapping[str, Item]) -> dict[str, object]:
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
            except ValueError as error:
                if not self.grow(wanted):
                    raise self.cut() if self._ends_in(error) else self.broken("a value") from None
                wanted *= 2
                continue
            # a number may go on in the next chunk
            if _OF_NUMBER.fullmatch(self.buffer, end) and self.grow(wanted):
                wanted *= 2
                continue
            self.position = end
            return value

    def _ends_in(self, error: ValueError) -> bool:
        """Whether a value is wrong only because the text ends in it."""
        if not self.ended or not isinstance(error, json.JSONDecodeError):
            return False
        rest = _WORD.fullmatch(self.buffer, error.pos)
        return error.msg.startswith("Unterminated") or rest is not None

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
        """What is wrong here."""
        if not self.peek():
            return self.cut()
        rest = self.buffer[self.position : self.position + 20]
        return InputError(
            f"{self.source}: not JSON: expected {expected}, {self.where()}, found {rest!r}"
        )

    def cut(self) -> InputError:
        """The text ends too early."""
        return InputError(f"{self.source}: ends within the JSON, {self.where()}; copy it again")
