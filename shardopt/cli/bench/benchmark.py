"""The benchmark that `bench generate` wrote: its folder as an argument, and its prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CPU_RANKS = "cpu-gloo"
Folder = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="Folder that `bench generate` wrote.", show_default=False),
]


def predict_benchmark(
    folder: Path, hardware: str, data: Path | None, *, as_json: bool, quiet: bool
) -> None:
    """Predict and print; arguments as of `bench predict`."""
    from shardopt.cli.output import print_json
    from shardopt.replay.predict import predict

    result = predict(folder, hardware, data)
    if as_json:
        print_json(result)
        return
    from shardopt.report.bench.replay import show_prediction
    from shardopt.report.console import make_console

    show_prediction(make_console(), result, brief=quiet)
