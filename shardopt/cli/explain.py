"""``shardopt explain``: where the time of a plan goes and what would help most."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardopt.cli import options

if TYPE_CHECKING:
    from shardopt.api.setting import Setting
    from shardopt.explain.explanation import Explanation

Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Write the predicted timeline to this file, for ui.perfetto.dev or chrome://tracing.",
        rich_help_panel=options.OUTPUT,
        show_default=False,
    ),
]


Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="Write a web page in one file: timeline, ranks, tables, comparison, sources.",
        rich_help_panel=options.OUTPUT,
        show_default=False,
    ),
]
Explained = Annotated[
    list[Path],
    typer.Argument(
        metavar="PLAN...",
        help="Plan file (JSON) to explain; further plans are compared with it.",
        show_default=False,
    ),
]


def explain(
    model: options.Model,
    plans: Explained,
    gpus: options.Gpus = None,
    gpus_per_node: options.GpusPerNode = None,
    cluster: options.Cluster = None,
    hardware: options.Hardware = None,
    hbm_gib: options.HbmGib = None,
    ddr_gib: options.DdrGib = None,
    reserve: options.Reserve = None,
    batch_size: options.BatchSize = None,
    strict: options.Strict = False,
    html: Html = None,
    trace: Trace = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show where the time of a plan goes and which changes would help most.

    Ranks and hardware are those of the first plan unless you set them.
    """
    from shardopt.api.setting import Machine
    from shardopt.cli.output import note
    from shardopt.cli.setting import predict_plans
    from shardopt.explain.explanation import explain_plan

    _check_outputs(html, trace, [model, *plans])
    machine = Machine(gpus, gpus_per_node, cluster, hardware, hbm_gib, ddr_gib, reserve, batch_size)
    setting, predicted = predict_plans(model, plans, machine, strict=strict)
    _check_outputs(html, trace, [])
    explanation = explain_plan(setting.problem(), predicted)
    told = [*setting.notes, *_written(html, trace, setting, explanation)]
    note(told, quiet=quiet)
    if json:
        _print_json(setting, explanation)
    else:
        _show(setting, explanation, quiet)


def _check_outputs(html: Path | None, trace: Path | None, inputs: list[Path]) -> None:
    """Refuse files that cannot be written, and two outputs in one file."""
    from predictor.errors import InputError
    from shardopt.cli.output import check_writable

    for path in (html, trace):
        check_writable(path, inputs)
    if html is not None and trace is not None and html.resolve() == trace.resolve():
        raise InputError(f"--html and --trace both name {html}; give them different files")


def _written(
    html: Path | None, trace: Path | None, setting: Setting, explanation: Explanation
) -> list[str]:
    """Write what is asked for; returns what to tell."""
    from shardopt.api.plan_file import versions
    from shardopt.cli.output import write_json

    told = []
    given = explanation.given
    if trace is not None:
        from predictor.trace import chrome_trace

        meta = {"plan": given.name, "versions": versions()}
        write_json(trace, chrome_trace(given.prediction, meta=meta))
        told.append(f"wrote {trace}; open it at ui.perfetto.dev")
    if html is not None:
        from shardopt.files import atomic_write_text
        from shardopt.report.html.page import page

        atomic_write_text(html, page(setting, explanation, versions()))
        told.append(f"wrote {html}; open it in a browser")
    return told


def _print_json(setting: Setting, explanation: Explanation) -> None:
    from shardopt.cli.output import print_json
    from shardopt.cli.planning.measuring import measuring_command
    from shardopt.report.explain import explain_object
    from shardopt.report.objects import deciding_object, prediction_object

    head = {**setting.facts(), "plan": explanation.given.name}
    parts = prediction_object(explanation.given.prediction)
    command = partial(measuring_command, device=setting.hardware.device)
    deciding = deciding_object(explanation.deciding, command)
    print_json({**head, **parts, **explain_object(explanation), "deciding": deciding})


def _show(setting: Setting, explanation: Explanation, quiet: bool) -> None:
    from shardopt.cli.planning.measuring import measuring_words
    from shardopt.explain.deciding import deciding_text
    from shardopt.report.console import make_console
    from shardopt.report.explain import show_explanation
    from shardopt.report.prediction import show_headlines
    from shardopt.report.setting import show_setting

    console = make_console()
    if quiet:
        show_headlines(console, explanation.plans)
        return
    show_setting(console, setting)
    deciding = [
        deciding_text(one, measuring_words(one.group, setting.hardware.device))
        for one in explanation.deciding
    ]
    show_explanation(console, explanation, deciding)
