"""Lists of hosts as schedulers give them: a name a line, Slurm's ranges, or ``name slots=8``."""

from __future__ import annotations

import re
from pathlib import Path

from predictor.csv_rows import MOST_RANKS
from predictor.errors import InputError
from shardopt.files import decode, read_bytes

_HOST = re.compile(r"(?P<names>\S+?)(?::(?P<colon>\d{1,6})|\s+slots\s*=\s*(?P<slots>\d{1,6}).*)?")
_RANGES = re.compile(r"(?P<before>[^\[\]]*)\[(?P<ranges>[\d,-]+)\](?P<after>[^\[\]]*)")
_SPLIT = re.compile(r",(?![^\[]*\])")
"""Commas outside of brackets."""


def read_hosts(path: str | Path) -> list[tuple[str, int | None]]:
    """Name and GPUs of every host, in order; None where the list does not say how many.

    Args:
        path: lines such as ``node[01-04,07]``, ``node1 slots=8`` (MPI, DeepSpeed) or ``node1:8``;
            empty lines and those that start with ``#`` say nothing.

    Raises:
        InputError: a line is none of these, or a host is there twice; names the line.
    """
    found: dict[str, int | None] = {}
    text = decode(read_bytes(path, "list of hosts"), path)
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#")[0].strip()
        match = _HOST.fullmatch(words)
        if words and match is None:
            raise InputError(
                f"{path}:{number}: got {words[:60]!r}; allowed: a host's name, node[01-04], or a "
                "name with slots=8"
            )
        if match is None or not words:
            continue
        slots = match["colon"] or match["slots"]
        for name in _names(match["names"], path, number):
            if name in found:
                raise InputError(f"{path}:{number}: host '{name}' is there twice")
            found[name] = None if slots is None else int(slots)
            if len(found) > MOST_RANKS:
                raise InputError(f"{path}:{number}: more than {MOST_RANKS} hosts")
    if not found:
        raise InputError(f"{path}: names no host; give one a line")
    return list(found.items())


def _names(text: str, path: str | Path, number: int) -> list[str]:
    """The hosts of Slurm's short form, such as ``a[1-3],b7``."""
    found = []
    for part in _SPLIT.split(text):
        match = _RANGES.fullmatch(part)
        if match is None:
            if "[" in part or "]" in part or not part:
                raise InputError(
                    f"{path}:{number}: got {part[:60]!r}; allowed in brackets: numbers and ranges, "
                    "such as node[01-04,07]"
                )
            found.append(part)
            continue
        for span in match["ranges"].split(","):
            first, _, last = span.partition("-")
            low, high = _bounds(first, last, span, path, number)
            width = len(first)
            found += [
                f"{match['before']}{n:0{width}d}{match['after']}" for n in range(low, high + 1)
            ]
    return found


def _bounds(first: str, last: str, span: str, path: str | Path, number: int) -> tuple[int, int]:
    wrong = not first.isdigit() or (last and not last.isdigit()) or "-" in last
    low, high = (0, -1) if wrong else (int(first), int(last or first))
    if wrong or not low <= high < low + MOST_RANKS:
        raise InputError(f"{path}:{number}: got the range {span[:40]!r}; allowed: such as 01-04")
    return low, high
