"""``shardopt bench transformers``: training steps of small transformers, timed for real."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardopt.cli import options
from shardopt.cli.bench.options import MAX_ROUNDS, MEASURE

Output = Annotated[
    Path,
    typer.Option(
        "-o", "--output", metavar="DIR", help="Made if it is not there; taken up again if it is."
    ),
]
Rounds = Annotated[
    int,
    typer.Option(
        "--rounds",
        metavar="N",
        help="In each, every shape runs three steps.",
        rich_help_panel=MEASURE,
    ),
]
Ranks = Annotated[
    str,
    typer.Option(
        "--ranks",
        metavar="N,N",
        help="1 for one process, 2 for two with DistributedDataParallel over gloo.",
        rich_help_panel=MEASURE,
    ),
]


def transformers(
    output: Output, rounds: Rounds = 8, ranks: Ranks = "1,2", quiet: options.Quiet = False
) -> None:
    """Time training steps on CPU cores, for `shardopt validate transformers-cpu`.

    Interrupted, the same command goes on from what is finished.
    """
    from predictor.errors import InputError
    from shardopt.bench.transformers.run import RANKS, run_transformers
    from shardopt.cli.checks import check_number
    from shardopt.cli.output import note

    check_number("--rounds", rounds, 1, MAX_ROUNDS)
    asked = tuple(dict.fromkeys(ranks.split(",")))
    if not set(asked) <= {str(count) for count in RANKS}:
        raise InputError(f"--ranks is {ranks!r}; give 1, 2 or 1,2")
    run_transformers(output, rounds, tuple(map(int, asked)), lambda text: note([text], quiet=quiet))
