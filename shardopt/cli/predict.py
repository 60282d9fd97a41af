"""``shardopt predict``: the predicted time of given plans, side by side, or of a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardopt.cli import options

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="Model file (YAML), or the folder of a generated benchmark, which needs no plan.",
        show_default=False,
    ),
]
Plans = Annotated[
    list[Path] | None,
    typer.Argument(metavar="PLAN...", help="Plan files (JSON), one or more.", show_default=False),
]


def predict(
    model: Model,
    plans: Plans = None,
    gpus: options.Gpus = None,
    gpus_per_node: options.GpusPerNode = None,
    cluster: options.Cluster = None,
    hardware: options.Hardware = None,
    hbm_gib: options.HbmGib = None,
    ddr_gib: options.DdrGib = None,
    reserve: options.Reserve = None,
    batch_size: options.BatchSize = None,
    strict: options.Strict = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Predict the iteration time of one or more plans.

    Ranks and hardware are those of the first plan unless you set them. A folder that `bench
    generate` wrote is predicted as `bench predict` does.
    """
    from predictor.errors import InputError

    if model.is_dir():
        from shardopt.cli.bench.benchmark import CPU_RANKS, predict_benchmark

        sizes = (gpus, gpus_per_node, cluster, hbm_gib, ddr_gib, batch_size)
        if plans or strict or any(of is not None for of in sizes):
            raise InputError(
                f"{model}: is the folder of a benchmark, which has its own ranks and batch; give "
                "no plan and no flags but --hardware, --json and --quiet"
            )
        predict_benchmark(model, hardware or CPU_RANKS, None, as_json=json, quiet=quiet)
        return
    if not plans:
        raise InputError(
            "no plan is given: shardopt predict MODEL PLAN..., or the folder of a benchmark as "
            "MODEL; see shardopt predict --help"
        )
    from shardopt.api.setting import Machine
    from shardopt.cli.output import note
    from shardopt.cli.setting import predict_plans

    machine = Machine(gpus, gpus_per_node, cluster, hardware, hbm_gib, ddr_gib, reserve, batch_size)
    setting, predicted = predict_plans(model, plans, machine, strict=strict)
    note(setting.notes, quiet=quiet)
    if json:
        from shardopt.cli.output import print_json
        from shardopt.report.objects import predict_object

        pairs = [(item.name, item.prediction) for item in predicted]
        print_json(predict_object(pairs, setting.facts()))
        return
    from shardopt.report.console import make_console
    from shardopt.report.prediction import show_headlines, show_predictions
    from shardopt.report.setting import show_setting

    console = make_console()
    if quiet:
        show_headlines(console, predicted)
        return
    show_setting(console, setting)
    show_predictions(console, predicted)
