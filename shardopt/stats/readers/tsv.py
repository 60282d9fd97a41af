"""Criteo's click logs: lines of a label, 13 integers and 26 hexadecimal categories, with tabs."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from predictor.errors import InputError
from shardopt.files import read_problem
from shardopt.stats.counts import Bags
from shardopt.stats.source import Chunk

CATEGORIES = 26
NAMES = tuple(f"cat_{i}" for i in range(CATEGORIES))
"""As TorchRec names them (torchrec/datasets/criteo.py, DEFAULT_CAT_NAMES)."""
COLUMNS = (40, 39)
"""Columns of a line: with the label, or without it as in Criteo's test files."""
MAX_DIGITS = 15

_DIGITS = np.full(256, 255, dtype=np.uint8)
for _value, _characters in enumerate(("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")):
    _DIGITS[ord(_characters)] = _value
for _value, _characters in enumerate(("aA", "bB", "cC", "dD", "eE", "fF"), start=10):
    for _character in _characters:
        _DIGITS[ord(_character)] = _value


class TsvSource:
    """A file of Criteo's, gzipped or not. An empty category is id 0, as TorchRec's preprocessing
    takes it (torchrec/datasets/criteo.py, `tsv_to_npys`)."""

    features: Sequence[str] = NAMES
    times: Sequence[str] = ()

    def __init__(self, path: Path) -> None:
        self.path = path

    def chunks(
        self, wanted: Sequence[str], rows: int, skip: int, time: str | None = None
    ) -> Iterator[Chunk]:
        """As `Source.chunks`.

        Raises:
            InputError: names the line and the column.
        """
        columns = [NAMES.index(name) for name in wanted]
        width = 0
        line = 1
        try:
            with self._open() as stream:
                while lines := list(islice(stream, rows)):
                    width = width or self._width(lines[0])
                    if skip > 0:
                        skip -= 1
                    else:
                        yield Chunk(line, "line", self._parse(lines, line, width, columns))
                    line += len(lines)
        except (EOFError, gzip.BadGzipFile, zlib.error):
            raise InputError(
                f"{self.path}: the compressed data end or break after line {line - 1}; "
                "the file is truncated or damaged"
            ) from None
        except OSError as error:
            raise InputError(read_problem(self.path, "data file", error)) from None

    def _open(self) -> BinaryIO:
        if self.path.suffix == ".gz":
            return cast(BinaryIO, gzip.open(self.path))
        return self.path.open("rb")

    def _width(self, line: bytes) -> int:
        width = line.count(b"\t") + 1
        if width not in COLUMNS:
            raise InputError(
                f"{self.path}:1: has {width} columns; allowed: 40 (label, 13 integers, 26 "
                "hexadecimal categories), or 39 without the label, separated by tabs"
            )
        return width

    def _parse(
        self, lines: list[bytes], first: int, width: int, columns: Sequence[int]
    ) -> dict[str, Bags]:
        end = b"" if lines[-1].endswith(b"\n") else b"\n"
        text = np.frombuffer((b"".join(lines) + end).replace(b"\r\n", b"\n"), dtype=np.uint8)
        breaks = np.flatnonzero((text == 9) | (text == 10))
        regular = len(breaks) == len(lines) * width
        if not regular or (text[breaks[width - 1 :: width]] != 10).any():
            self._uneven(lines, first, width)
        ends = breaks.reshape(len(lines), width)
        found = {}
        for column in columns:
            at = width - CATEGORIES + column
            found[NAMES[column]] = Bags(self._column(text, ends, at, first, NAMES[column]))
        return found

    def _uneven(self, lines: list[bytes], first: int, width: int) -> None:
        for number, line in enumerate(lines, start=first):
            columns = line.count(b"\t") + 1
            if columns != width:
                raise InputError(
                    f"{self.path}:{number}: has {columns} columns; line 1 has {width}, and all "
                    "lines must have as many"
                )

    def _column(
        self, text: NDArray[np.uint8], ends: NDArray[np.intp], at: int, first: int, name: str
    ) -> NDArray[np.int64]:
        start, end = ends[:, at - 1] + 1, ends[:, at]
        length = end - start
        ids = np.zeros(len(ends), dtype=np.int64)
        wrong = length > MAX_DIGITS
        for place in range(min(int(length.max()), MAX_DIGITS)):
            there = np.flatnonzero(length > place)
            digit = _DIGITS[text[start[there] + place]]
            wrong[there[digit == 255]] = True
            ids[there] = ids[there] * 16 + digit
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            given = bytes(text[start[row] : end[row]]).decode("utf-8", errors="replace")
            raise InputError(
                f"{self.path}:{first + row}: {name}: got {given!r}; allowed: a hexadecimal number "
                f"of at most {MAX_DIGITS} digits, or nothing, which counts as id 0"
            )
        return ids
