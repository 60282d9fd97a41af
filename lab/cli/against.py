"""``python -m lab against``: TorchRec's own plans and ours, side by side, on random models."""

from __future__ import annotations

from typing import Annotated

import typer

from lab.cli.options import Folder, Models, Tasks, seeds
from shardopt.cli import options
from shardopt.cli.bench import options as bench
from shardopt.ranks.realtime import Runtime

MAX_RANDOM_PLANS = 10_000

RandomPlans = Annotated[
    int,
    typer.Option(
        "--random-plans",
        metavar="N",
        help="Random plans of each task to run beside the chosen ones.",
        rich_help_panel=bench.MEASURE,
    ),
]


def against(
    folder: Folder,
    tasks: Tasks,
    rounds: bench.Rounds = 16,
    block: bench.Block = 6,
    link: bench.LinkRate = None,
    runtime: options.RuntimeOption = Runtime.PLAIN,
    ranks: bench.Ranks = 2,
    models: Models = "random",
    random_plans: RandomPlans = 4,
    quiet: options.Quiet = False,
) -> None:
    """Draw models, calibrate, and run the plans of TorchRec's planner and of shardopt of each.

    `python -m lab validate against-torchrec --data DIR` reports the results of the folders in DIR.
    After an interruption the same command continues with what is left.
    """
    from lab.tasks.against import check_models, draw_planners_task
    from lab.tasks.measure import TaskSetSettings, measure_task_set
    from shardopt.cli.checks import check_number
    from shardopt.cli.output import note

    check_number("--rounds", rounds, 1, bench.MAX_ROUNDS)
    check_number("--block", block, 1, bench.MAX_BLOCK)
    check_number("--random-plans", random_plans, 0, MAX_RANDOM_PLANS)
    check_models(models)
    tasks_drawn = seeds("--tasks", tasks)
    # a missing torchrec is told now, not after the minutes of the calibration
    from shardopt.training import torchrec_planner  # noqa: F401

    settings = TaskSetSettings(
        folder,
        tasks_drawn,
        rounds=rounds,
        block=block,
        world_size=ranks,
        link_gbit_s=link,
        runtime=runtime,
        models=models,
        random_plans=random_plans,
        draw=draw_planners_task,
    )
    measure_task_set(settings, lambda text: note([text], quiet=quiet))
