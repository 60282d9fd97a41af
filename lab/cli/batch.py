"""``python -m lab batch``: a folder of tasks, each drawn from a seed and measured for real."""

from __future__ import annotations

from pathlib import Path

from lab.cli.options import seeds
from shardopt.api.request import check_number
from shardopt.cli.bench.run import MAX_BLOCK, MAX_ROUNDS, warmup_rounds
from shardopt.ranks.realtime import Runtime


def batch(
    *,
    folder: Path,
    tasks: str,
    repeat: str | None = None,
    rounds: int = 10,
    block: int = 6,
    warmup: str = "auto",
    link: float | None = None,
    runtime: Runtime = Runtime.PLAIN,
    ranks: int = 2,
    models: str = "random",
    quiet: bool = False,
) -> None:
    """Draw models, calibrate, and run a dozen plans of each for real.

    After an interruption the same command continues with what is left.

    Arguments:
        folder (FOLDER): Folder for the measurements; it is created, or continued.

    Measurement:
        tasks (SEEDS): Tasks to draw, such as 0-19 or 3,7,10-12.
        ranks (N): Number of processes; each has one core.
        models (NAME): Family that models are drawn from: random (sized by predictions; the
            predictor was developed on it), published (DLRM-DCNv2, RM1 to RM3 and Meta's tables,
            scaled down) or shapes (many small tables, few wide ones, weighted, sequences and
            others), crossed (plans whose ranks wait for each other), architectures (crosses,
            experts, towers and attention in place of a DLRM) and drifting (windows of data that
            move).
        repeat (SEEDS): Tasks to measure a second time, after all others.
    """
    from lab.tasks.measure import TaskSetSettings, measure_task_set
    from shardopt.cli.output import note

    check_number("rounds", rounds, 1, MAX_ROUNDS)
    check_number("block", block, 1, MAX_BLOCK)
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
        warmup=warmup_rounds(warmup),
    )
    measure_task_set(settings, lambda text: note([text], quiet=quiet))
