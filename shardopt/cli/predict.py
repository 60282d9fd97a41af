"""``shardopt predict``: the predicted time of given plans, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardopt.cli import options

Model = Annotated[
    Path,
    typer.Argument(metavar="MODEL", help="Model file (YAML).", show_default=False),
]
Plans = Annotated[
    list[Path],
    typer.Argument(metavar="PLAN...", help="Plan files (JSON), one or more.", show_default=False),
]


def predict(
    model: Model,
    plans: Plans,
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

    Ranks and hardware are those of the first plan unless you set them. For a benchmark that `bench
    generate` wrote, see `bench predict`.
    """
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
