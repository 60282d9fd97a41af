"""Flags of measurements, which commands that run plans share."""

from __future__ import annotations

from typing import Annotated

import typer

MEASURE = "Measurement"
MAX_ROUNDS, MAX_BLOCK = 10_000, 10_000
MAX_WARMUP = 1000

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
