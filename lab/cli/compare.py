"""``python -m lab compare``: real models against their generated benchmarks, alternating."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardopt.cli import options
from shardopt.cli.bench.options import MEASURE

Output = Annotated[
    Path,
    typer.Option(
        "-o",
        "--output",
        metavar="DIR",
        help="Folder for cpu.json (models and their replays) and calls.jsonl (timed calls, from "
        "which kernel models of ops are fitted).",
    ),
]
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
        help="Number of rounds; each runs every model and its replay in new processes.",
        rich_help_panel=MEASURE,
    ),
]
Work = Annotated[
    Path | None,
    typer.Option(
        "--work",
        metavar="DIR",
        help="Keep benchmarks and finished rounds here, and continue from what is there.",
        rich_help_panel=MEASURE,
        show_default=False,
    ),
]
MAX_ROUNDS = 10_000


def compare(
    output: Output,
    models: Models = None,
    rounds: Rounds = 5,
    work: Work = None,
    quiet: options.Quiet = False,
) -> None:
    """Compare CPU models with the benchmarks generated from their traces.

    Calibration models are measured as well: their calls are timed inside their replays, and the
    kernel models that `bench predict --data DIR` uses are fitted on them.
    """
    from lab.replay.originals import MODELS
    from predictor.errors import InputError, did_you_mean
    from shardopt.cli.checks import check_number
    from shardopt.ranks.scratch import scratch_folder

    check_number("--rounds", rounds, 1, MAX_ROUNDS)
    for name in models or ():
        if name not in MODELS:
            raise InputError(
                f"--model {name!r}: there are {', '.join(MODELS)}{did_you_mean(name, MODELS)}"
            )
    for place in (output, work):
        if place is not None:
            _check_folder(place)
    names = list(models or MODELS)
    if work is not None:
        _run(names, output, rounds, work, quiet)
        return
    with scratch_folder() as here:
        _run(names, output, rounds, here, quiet)


def _check_folder(place: Path) -> None:
    from predictor.errors import InputError

    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{place}: cannot be a folder: {error.strerror}") from None


def _run(names: list[str], output: Path, rounds: int, work: Path, quiet: bool) -> None:
    from lab.replay.calibrate import prepare, replays, side_by_side, time_rounds
    from lab.replay.side_by_side import summary
    from shardopt.api.plan_file import versions
    from shardopt.cli.output import note, write_json
    from shardopt.replay.calls import FILE, write_models

    for name in prepare(names, work):
        note([f"{name}: benchmark made"], quiet=quiet)
    for name, number in time_rounds(names, work, rounds):
        note([f"round {number + 1} of {rounds}: {name}"], quiet=quiet)
    write_models(output / FILE, replays(names, work))
    rows = side_by_side(names, work)
    if rows:
        write_json(
            output / "cpu.json", {"summary": summary(rows), "versions": versions(), "rows": rows}
        )
