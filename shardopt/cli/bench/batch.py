"""``shardopt bench batch``: a folder of tasks, each drawn from a seed and measured for real."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from shardopt.cli import options
from shardopt.cli.bench.run import MAX_BLOCK, MAX_ROUNDS, MEASURE, Block, LinkRate, Rounds

MAX_TASK = 999_999
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?\Z")

Folder = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", help="Made if it is not there; taken up again if it is."),
]
Tasks = Annotated[
    str,
    typer.Option(
        "--tasks", metavar="SEEDS", help="Such as 0-19 or 3,7,10-12.", rich_help_panel=MEASURE
    ),
]
Repeats = Annotated[
    str | None,
    typer.Option(
        "--repeat",
        metavar="SEEDS",
        help="Tasks to measure a second time, after all others.",
        rich_help_panel=MEASURE,
        show_default=False,
    ),
]
RanksOption = Annotated[
    int,
    typer.Option("--ranks", metavar="N", help="Processes, a core each.", rich_help_panel=MEASURE),
]


def batch(
    folder: Folder,
    tasks: Tasks,
    repeat: Repeats = None,
    rounds: Rounds = 10,
    block: Block = 6,
    link: LinkRate = None,
    ranks: RanksOption = 2,
    quiet: options.Quiet = False,
) -> None:
    """Draw tasks, calibrate, and run a dozen plans of each task for real.

    Interrupted, the same command goes on from what is finished.
    """
    from shardopt.bench.tasks.batch import Asked, run_batch
    from shardopt.cli.bench.run import check_number
    from shardopt.cli.messages import note

    check_number("--rounds", rounds, 1, MAX_ROUNDS)
    check_number("--block", block, 1, MAX_BLOCK)
    asked = Asked(
        folder,
        seeds("--tasks", tasks),
        seeds("--repeat", repeat) if repeat is not None else (),
        rounds,
        block,
        ranks,
        link,
    )
    run_batch(asked, lambda text: note([text], quiet=quiet))


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
