"""``shardopt bench against``: TorchRec's own plans and ours, side by side, on random models."""

from __future__ import annotations

from shardopt.cli import options
from shardopt.cli.bench import options as bench


def against(
    folder: bench.Folder,
    tasks: bench.Tasks,
    rounds: bench.Rounds = 16,
    block: bench.Block = 6,
    link: bench.LinkRate = None,
    ranks: bench.Ranks = 2,
    quiet: options.Quiet = False,
) -> None:
    """Draw random models, calibrate, and run the plans of TorchRec's planner and of shardopt.

    `shardopt validate against-torchrec --data DIR` reports the results of the folders in DIR. After
    an interruption the same command continues with what is left.
    """
    from shardopt.bench.tasks.against import draw_planners_task
    from shardopt.bench.tasks.measure import TaskSetSettings, measure_task_set
    from shardopt.cli.checks import check_number
    from shardopt.cli.output import note

    check_number("--rounds", rounds, 1, bench.MAX_ROUNDS)
    check_number("--block", block, 1, bench.MAX_BLOCK)
    tasks_drawn = bench.seeds("--tasks", tasks)
    # a missing torchrec is told now, not after the minutes of the calibration
    from shardopt.torchrec.planning import torchrec_planner  # noqa: F401

    settings = TaskSetSettings(
        folder,
        tasks_drawn,
        rounds=rounds,
        block=block,
        world_size=ranks,
        link_gbit_s=link,
        draw=draw_planners_task,
    )
    measure_task_set(settings, lambda text: note([text], quiet=quiet))
