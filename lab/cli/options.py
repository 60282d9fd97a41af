"""Flags that several commands of the laboratory share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from shardopt.cli.bench.options import MEASURE

MAX_TASK = 999_999
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?\Z")

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER", help="Folder for the measurements; it is created, or continued."
    ),
]
Tasks = Annotated[
    str,
    typer.Option(
        "--tasks",
        metavar="SEEDS",
        help="Tasks to draw, such as 0-19 or 3,7,10-12.",
        rich_help_panel=MEASURE,
    ),
]
Models = Annotated[
    str,
    typer.Option(
        "--models",
        metavar="NAME",
        help="Family that models are drawn from: random (sized by predictions; the predictor was "
        "developed on it), published (DLRM-DCNv2, RM1 to RM3 and Meta's tables, scaled down) or "
        "shapes (many small tables, few wide ones, weighted, sequences and others), and, for batch "
        "alone, crossed (plans whose ranks wait for each other), architectures (crosses, "
        "experts, towers and attention in place of a DLRM) and drifting (windows of data that "
        "move).",
        rich_help_panel=MEASURE,
    ),
]


def seeds(flag: str, given: str) -> list[int]:
    """The numbers that a text such as ``3,7,10-12`` names, in its order, each once.

    Raises:
        InputError: it is no such text.
    """
    from predictor.errors import InputError

    found: list[int] = []
    for part in given.split(","):
        match = _RANGE.match(part.strip())
        first, last = (int(n or match[1]) for n in match.groups()) if match else (1, 0)
        if last < first:
            raise InputError(
                f"{flag} is {given!r}; give numbers and ranges of 0 to {MAX_TASK}, the lower "
                "number first, such as 0-19 or 3,7,10-12"
            )
        found += range(first, last + 1)
    return list(dict.fromkeys(found))
