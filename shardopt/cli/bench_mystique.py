"""``shardopt bench mystique``: steps of real models and of their generated benchmarks, in turns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shardopt.cli import options
from shardopt.cli.bench_run import MEASURE

Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Rows, as JSON.")]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model", metavar="NAME", help="Only this model. Repeat for more.", show_default=False
    ),
]
Rounds = Annotated[
    int,
    typer.Option(
        "--rounds",
        metavar="N",
        help="In each, the model and its replay run a block of steps.",
        rich_help_panel=MEASURE,
    ),
]
MAX_ROUNDS = 10_000


def mystique(
    output: Output, models: Models = None, rounds: Rounds = 12, quiet: options.Quiet = False
) -> None:
    """Capture CPU models, generate benchmarks, and hold the replays' times against the models'."""
    from predictor.errors import InputError, did_you_mean
    from shardopt.cli.bench_run import check_number
    from shardopt.cli.messages import note
    from shardopt.cli.output import check_writable, versions, write_json
    from shardopt.replay.originals import NAMES
    from shardopt.replay.side_by_side import measure, summary

    check_number("--rounds", rounds, 1, MAX_ROUNDS)
    check_writable(output)
    for name in models or ():
        if name not in NAMES:
            raise InputError(
                f"--model {name!r}: there are {', '.join(NAMES)}{did_you_mean(name, NAMES)}"
            )
    rows: list[dict[str, Any]] = []
    for name in models or NAMES:
        rows.append(measure(name, rounds))
        row = rows[-1]
        said = f"{row['original_ms']:.2f} ms, replayed in {row['replay_ms']:.2f}"
        note([f"{name}: {said} ({row['ratio'] - 1:+.1%})"], quiet=quiet)
        write_json(output, {"summary": summary(rows), "versions": versions(), "rows": rows})
