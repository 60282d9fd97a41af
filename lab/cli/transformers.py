"""``python -m lab transformers``: training steps of small transformers, timed for real."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardopt.cli import options
from shardopt.cli.bench.options import MAX_ROUNDS, MEASURE

Output = Annotated[
    Path,
    typer.Option(
        "-o",
        "--output",
        metavar="DIR",
        help="Folder for the measurements; it is created, or continued.",
    ),
]
Rounds = Annotated[
    int,
    typer.Option(
        "--rounds",
        metavar="N",
        help="Number of rounds; each runs three steps of every shape.",
        rich_help_panel=MEASURE,
    ),
]
Ranks = Annotated[
    str,
    typer.Option(
        "--ranks",
        metavar="N,N",
        help="1 for one process, 2 for DistributedDataParallel on two, 1,2 for both.",
        rich_help_panel=MEASURE,
    ),
]


def transformers(
    output: Output, rounds: Rounds = 8, ranks: Ranks = "1,2", quiet: options.Quiet = False
) -> None:
    """Measure training steps of transformers, for `python -m lab validate transformers-cpu`.

    After an interruption the same command continues with what is left.
    """
    from lab.transformers.run import RANKS, run_transformers
    from predictor.errors import InputError
    from shardopt.cli.checks import check_number
    from shardopt.cli.output import note

    check_number("--rounds", rounds, 1, MAX_ROUNDS)
    asked = tuple(dict.fromkeys(ranks.split(",")))
    if not set(asked) <= {str(count) for count in RANKS}:
        raise InputError(f"--ranks is {ranks!r}; give 1, 2 or 1,2")
    run_transformers(output, rounds, tuple(map(int, asked)), lambda text: note([text], quiet=quiet))
