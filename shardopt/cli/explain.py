"""``shardopt explain``: where the time of a plan goes and what would help most."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardopt.cli import options

if TYPE_CHECKING:
    from predictor.predict import Prediction

Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Write the predicted timeline for Perfetto (ui.perfetto.dev) or chrome://tracing.",
        rich_help_panel=options.OUTPUT,
        show_default=False,
    ),
]


def explain(
    model: options.Model,
    plan: options.Plan,
    gpus: options.Gpus = None,
    gpus_per_node: options.GpusPerNode = None,
    cluster: options.Cluster = None,
    hardware: options.Hardware = None,
    hbm_gib: options.HbmGib = None,
    ddr_gib: options.DdrGib = None,
    reserve: options.Reserve = 0.15,
    batch_size: options.BatchSize = None,
    strict: options.Strict = False,
    trace: Trace = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show where the time of a plan goes: critical path, ranks, what would help most.

    Ranks and hardware are the plan's unless flags say otherwise.
    """
    from shardopt.cli.given_plans import predict_plans
    from shardopt.cli.messages import note
    from shardopt.cli.output import check_writable
    from shardopt.cli.resolve import Flags
    from shardopt.report.whatif import what_if

    check_writable(trace, [model, plan])
    flags = Flags(
        gpus, gpus_per_node, cluster, hardware, hbm_gib, ddr_gib, reserve, batch_size, strict
    )
    setting, (predicted,) = predict_plans(model, [plan], flags)
    changes = what_if(predicted.prediction)
    told = list(setting.notes)
    if trace is not None:
        _write_trace(trace, predicted.prediction, predicted.name)
        told.append(f"wrote {trace}; open it at ui.perfetto.dev")
    note(told, quiet=quiet)
    if json:
        from shardopt.cli.output import print_json
        from shardopt.cli.plan import setting_object
        from shardopt.report.explain_view import explain_object
        from shardopt.report.objects import prediction_object

        head = {**setting_object(setting), "plan": predicted.name}
        parts = prediction_object(predicted.prediction)
        print_json({**head, **parts, **explain_object(predicted.prediction, changes)})
        return
    from shardopt.report.console import make_console
    from shardopt.report.explain_view import show_explanation
    from shardopt.report.plan_view import show_setting
    from shardopt.report.predict_view import show_headlines

    console = make_console()
    if quiet:
        show_headlines(console, [predicted])
        return
    show_setting(console, setting)
    show_explanation(console, predicted.name, predicted.prediction, changes)


def _write_trace(path: Path, prediction: Prediction, plan: str) -> None:
    from predictor.trace import chrome_trace
    from shardopt.cli.output import versions, write_json

    write_json(path, chrome_trace(prediction, meta={"plan": plan, "versions": versions()}))
