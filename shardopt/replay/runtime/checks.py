"""Reads a benchmark's data files, and names one that was cut off or edited wrongly."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

REFUSED = 2
"""Exit code of a rank that refuses its input with a message."""

LOST = 3
"""Exit code of a rank that ended by an error which another rank may have caused."""

COMMS = "c10d::"
TENSOR = re.compile(r"t\[(\d+)\]")
WRONG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of data that lack a key or hold values of another type."""


def number_of(argument: Any) -> int | None:
    """Return the number of the tensor that an argument is; None for other arguments."""
    match = TENSOR.fullmatch(argument) if isinstance(argument, str) else None
    return None if match is None else int(match[1])


def refuse(message: str, code: int = REFUSED) -> NoReturn:
    """End this rank with a message instead of a traceback."""
    print(message, file=sys.stderr, flush=True)
    raise SystemExit(code)


def read(path: Path) -> dict[str, Any]:
    """Read a data file of the benchmark; end this rank if that fails."""
    with naming(path.name):
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            refuse(f"{path.name}: cannot be read: {error.strerror}; generate the benchmark again")


@contextmanager
def naming(file: str) -> Iterator[None]:
    """End this rank with the name of the file whose data are wrong."""
    try:
        yield
    except WRONG as error:
        kind = "has no key" if isinstance(error, KeyError) else f"{type(error).__name__}:"
        refuse(f"{file}: was cut off or edited: {kind} {error}; generate the benchmark again")


def parts_of(iteration: Sequence[Any], mine: dict[str, Any]) -> list[Any]:
    """Return the functions of a program, each with the range of its calls."""
    if len(iteration) != len(mine["parts"]):
        refuse(
            f"{mine['program']}: has {len(iteration)} parts, the rank's `parts` "
            f"{len(mine['parts'])}; generate the benchmark again"
        )
    return list(zip(iteration, mine["parts"], strict=True))
