"""``python -m lab batch``: a folder of tasks, each drawn from a seed and measured for real."""

from __future__ import annotations

from typing import Annotated

import typer

from lab.cli.options import Folder, Models, Tasks, seeds
from shardopt.cli import options
from shardopt.cli.bench import options as bench
from shardopt.ranks.realtime import Runtime

Repeats = Annotated[
    str | None,
    typer.Option(
        "--repeat",
        metavar="SEEDS",
        help="Tasks to measure a second time, after all others.",
        rich_help_panel=bench.MEASURE,
        show_default=False,
    ),
]


def batch(
    folder: Folder,
    tasks: Tasks,
    repeat: Repeats = None,
    rounds: bench.Rounds = 10,
    block: bench.Block = 6,
    warmup: bench.Warmup = "auto",
    link: bench.LinkRate = None,
    runtime: options.RuntimeOption = Runtime.PLAIN,
    ranks: bench.Ranks = 2,
    models: Models = "random",
    quiet: options.Quiet = False,
) -> None:
    """Draw models, calibrate, and run a dozen plans of each for real.

    After an interruption the same command continues with what is left.
    """
    from lab.tasks.measure import TaskSetSettings, measure_task_set
    from shardopt.cli.checks import check_number
    from shardopt.cli.output import note

    check_number("--rounds", rounds, 1, bench.MAX_ROUNDS)
    check_number("--block", block, 1, bench.MAX_BLOCK)
    settings = TaskSetSettings(
        folder,
        seeds("--tasks", tasks),
        seeds("--repeat", repeat) if repeat is not None else (),
        rounds,
        block,
        ranks,
        link,
        runtime,
        models,
        warmup=bench.warmup_rounds(warmup),
    )
    measure_task_set(settings, lambda text: note([text], quiet=quiet))
