"""Interactions with typed columns: RecBole's ``.inter`` files, one interaction a line, tabs between
columns, and a first line such as ``user_id:token  item_ids:token_seq  timestamp:float``.

Source: RecBole's "atomic files" (https://recbole.io/docs/user_guide/data/atomic_files.html).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TextIO

import numpy as np

from predictor.errors import InputError
from shardopt.files import read_problem
from shardopt.stats.counts import Bags
from shardopt.stats.source import Chunk, Times, seconds

TOKEN, TOKENS, NUMBER = "token", "token_seq", "float"
KINDS = (TOKEN, TOKENS, NUMBER, "float_seq")
MAX_ID = 2**63 - 1


class InterSource:
    """A file of interactions. Columns of tokens are features; their tokens must be whole
    numbers. Columns of single numbers may say when an interaction was, in Unix seconds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with self._open() as stream:
                head = stream.readline().rstrip("\r\n")
        except OSError as error:
            raise InputError(read_problem(path, "data file", error)) from None
        except UnicodeDecodeError:
            raise InputError(f"{path}:1: is no text; allowed: UTF-8") from None
        typed = [column.rpartition(":") for column in head.split("\t")]
        self.columns = [(name, kind) for name, _, kind in typed]
        for name, kind in self.columns:
            if not name or kind not in KINDS:
                raise InputError(
                    f"{path}:1: got the column '{name}:{kind}'; allowed: name:type with one of "
                    f"the types {', '.join(KINDS)}, and tabs between columns"
                )
        self.features: Sequence[str] = self._of((TOKEN, TOKENS))
        self.times: Sequence[str] = self._of((NUMBER,))

    def chunks(
        self, wanted: Sequence[str], rows: int, skip: int, time: str | None = None
    ) -> Iterator[Chunk]:
        """As `Source.chunks`."""
        line = 2
        try:
            with self._open() as stream:
                stream.readline()
                while lines := list(islice(stream, rows)):
                    if skip > 0:
                        skip -= 1
                    else:
                        yield self._chunk(lines, line, wanted, time)
                    line += len(lines)
        except OSError as error:
            raise InputError(read_problem(self.path, "data file", error)) from None
        except UnicodeDecodeError:
            raise InputError(f"{self.path}: is no text after line {line}; allowed: UTF-8") from None

    def _of(self, kinds: Sequence[str]) -> list[str]:
        return [name for name, kind in self.columns if kind in kinds]

    def _open(self) -> TextIO:
        return self.path.open(encoding="utf-8-sig")

    def _chunk(
        self, lines: list[str], first: int, wanted: Sequence[str], time: str | None
    ) -> Chunk:
        cells = [line.rstrip("\r\n").split("\t") for line in lines]
        for number, row in enumerate(cells, start=first):
            if len(row) != len(self.columns):
                raise InputError(
                    f"{self.path}:{number}: has {len(row)} columns; line 1 has {len(self.columns)}"
                )
        names = [name for name, _ in self.columns]

        def column(name: str) -> list[str]:
            return [row[names.index(name)] for row in cells]

        bags = {name: self._bags(column(name), name, first) for name in wanted}
        return Chunk(first, "line", bags, self._times(column, time, first))

    def _bags(self, cells: list[str], name: str, first: int) -> Bags:
        if dict(self.columns)[name] == TOKEN:
            return Bags(self._ids(cells, name, lambda at: first + at))
        tokens = [cell.split() for cell in cells]
        lengths = np.array([len(each) for each in tokens], dtype=np.int64)
        ends = np.cumsum(lengths)
        flat = list(chain.from_iterable(tokens))
        where = lambda at: first + int(np.searchsorted(ends, at, side="right"))  # noqa: E731
        return Bags(self._ids(flat, name, where), lengths)

    def _ids(self, tokens: list[str], name: str, line: Callable[[int], int]) -> np.ndarray:
        for at, token in enumerate(tokens):
            if not (token.isascii() and token.isdigit() and int(token) <= MAX_ID):
                raise InputError(
                    f"{self.path}:{line(at)}: feature '{name}': got '{token}'; allowed: whole "
                    "numbers; number the tokens, or leave the column out of the features",
                    inputs=("features",),
                )
        return np.array(tokens, dtype=object).astype(np.int64)

    def _times(
        self, column: Callable[[str], list[str]], time: str | None, first: int
    ) -> Times | None:
        if time is None:
            return None
        cells = column(time)
        wrong = next((at for at, cell in enumerate(cells) if not _is_number(cell)), None)
        if wrong is not None:
            raise InputError(
                f"{self.path}:{first + wrong}: {time}: got '{cells[wrong]}'; allowed: numbers"
            )
        return seconds(np.array(cells, dtype=np.float64))


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False
