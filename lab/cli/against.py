"""``python -m lab against``: TorchRec's own plans and ours, side by side, on random models."""

from __future__ import annotations

from pathlib import Path

from lab.cli.options import seeds
from shardopt.api.request import check_number
from shardopt.cli.bench.run import MAX_BLOCK, MAX_ROUNDS
from shardopt.ranks.realtime import Runtime

MAX_RANDOM_PLANS = 10_000


def against(
    *,
    folder: Path,
    tasks: str,
    rounds: int = 16,
    block: int = 6,
    link: float | None = None,
    runtime: Runtime = Runtime.PLAIN,
    ranks: int = 2,
    models: str = "random",
    random_plans: int = 4,
    quiet: bool = False,
) -> None:
    """Draw models, calibrate, and run the plans of TorchRec's planner and of shardopt of each.

    `python -m lab validate against-torchrec --data DIR` reports the results of the folders in DIR.
    After an interruption the same command continues with what is left.

    Arguments:
        folder (FOLDER): Folder for the measurements; it is created, or continued.

    Measurement:
        tasks (SEEDS): Tasks to draw, such as 0-19 or 3,7,10-12.
        ranks (N): Number of processes; each has one core.
        models (NAME): Family that models are drawn from: random (sized by predictions; the
            predictor was developed on it), published (DLRM-DCNv2, RM1 to RM3 and Meta's tables,
            scaled down) or shapes (many small tables, few wide ones, weighted, sequences and
            others).
        random_plans (N): Random plans of each task to run beside the chosen ones.
    """
    from lab.tasks.against import check_models, draw_planners_task
    from lab.tasks.measure import TaskSetSettings, measure_task_set
    from shardopt.cli.output import note

    check_number("rounds", rounds, 1, MAX_ROUNDS)
    check_number("block", block, 1, MAX_BLOCK)
    check_number("random_plans", random_plans, 0, MAX_RANDOM_PLANS)
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
