"""Flags that several commands of `shardopt bench` share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

MEASURE = "Measurement"
MAX_ROUNDS, MAX_BLOCK = 10_000, 10_000
MAX_WARMUP = 1000
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
Rounds = Annotated[
    int,
    typer.Option(
        "--rounds",
        metavar="N",
        help="Number of rounds; each runs every plan.",
        rich_help_panel=MEASURE,
    ),
]
Block = Annotated[
    int,
    typer.Option(
        "--block", metavar="N", help="Iterations of a plan per round.", rich_help_panel=MEASURE
    ),
]
Warmup = Annotated[
    str,
    typer.Option(
        "--warmup",
        metavar="auto|N",
        help="Rounds before the measurement; auto warms up until no plan becomes faster.",
        rich_help_panel=MEASURE,
    ),
]
LinkRate = Annotated[
    float | None,
    typer.Option(
        "--link",
        metavar="GBIT_S",
        help="Run two ranks as two hosts over an emulated link of this rate (Gbit/s each way); "
        "needs root and iproute2.",
        rich_help_panel=MEASURE,
        show_default=False,
    ),
]
Ranks = Annotated[
    int,
    typer.Option(
        "--ranks",
        metavar="N",
        help="Number of processes; each has one core.",
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


def warmup_rounds(given: str) -> int | None:
    """Rounds of warm-up as ``--warmup`` has them; None where the samples decide.

    Raises:
        InputError: it is neither ``auto`` nor a number in range.
    """
    from predictor.errors import InputError

    if given == "auto":
        return None
    if not given.isdigit() or int(given) > MAX_WARMUP:
        raise InputError(
            f"--warmup is {given}; give auto, or a number of rounds of at most {MAX_WARMUP}"
        )
    return int(given)
