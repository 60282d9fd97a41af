"""``shardopt bench predict``: what an iteration of a generated benchmark takes on CPU cores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardopt.cli import options
from shardopt.cli.bench.benchmark import CPU_RANKS, Folder, predict_benchmark

Hardware = Annotated[
    str,
    typer.Option(
        "--hardware",
        metavar="NAME|FILE",
        help="Profile of CPU ranks, whose collectives are used.",
        rich_help_panel=options.MACHINE,
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Fit kernel models on this folder of replays of CPU models. Without it, those "
        "that come with shardopt are used.",
        rich_help_panel=options.MACHINE,
        show_default=False,
    ),
]


def predict(
    folder: Folder,
    hardware: Hardware = CPU_RANKS,
    data: Data = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Predict an iteration of a generated benchmark without running it.

    Ops that no calibration model ran have no kernel model: their recorded times are used instead,
    and they are listed.
    """
    predict_benchmark(folder, hardware, data, as_json=json, quiet=quiet)
