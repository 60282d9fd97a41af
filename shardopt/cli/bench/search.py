"""``shardopt bench search``: the search against TorchRec's planner, on one model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardopt.cli import options

if TYPE_CHECKING:
    from shardopt.api.setting import Machine

MAX_REPEAT = 1000

Repeat = Annotated[
    int,
    typer.Option(
        "--repeat",
        metavar="N",
        help="Number of rounds; the medians are shown.",
        rich_help_panel=options.SEARCH,
    ),
]


def search(
    model: options.Model,
    gpus: options.Gpus = None,
    gpus_per_node: options.GpusPerNode = None,
    cluster: options.Cluster = None,
    hardware: options.Hardware = None,
    hbm_gib: options.HbmGib = None,
    ddr_gib: options.DdrGib = None,
    reserve: options.Reserve = None,
    batch_size: options.BatchSize = None,
    seed: options.Seed = 0,
    effort: options.Effort = 1.0,
    time_limit: options.TimeLimit = None,
    repeat: Repeat = 3,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare the search with TorchRec's planner: time to plan, and predicted plans."""
    from shardopt.api.setting import Machine
    from shardopt.cli.checks import check_number, check_search

    machine = Machine(gpus, gpus_per_node, cluster, hardware, hbm_gib, ddr_gib, reserve, batch_size)
    check_search(seed, effort, time_limit, top_k=1)
    check_number("--repeat", repeat, 1, MAX_REPEAT)
    _one_model(model, machine, seed, effort, time_limit, repeat, json=json, quiet=quiet)


def _one_model(
    model: Path,
    machine: Machine,
    seed: int,
    effort: float,
    time_limit: float | None,
    repeat: int,
    *,
    json: bool,
    quiet: bool,
) -> None:
    from shardopt.cli.output import note
    from shardopt.cli.setting import resolve

    setting = resolve(model, machine)

    # torch, torchrec and the solvers, once the input is known to be good
    from shardopt.bench.planners import ComparisonSettings, compare

    words = [str(model), *_words(machine), "--seed", str(seed), "--effort", repr(effort)]
    if time_limit is not None:
        words += ["--time-limit", repr(time_limit)]
    settings = ComparisonSettings(setting.problem(), words, seed, effort, time_limit, repeat)
    note(setting.notes, quiet=quiet)
    found = compare(
        settings, lambda name, at: note([f"round {at + 1} of {repeat}: {name}"], quiet=quiet)
    )
    if json:
        from shardopt.api.plan_file import versions
        from shardopt.cli.output import print_json
        from shardopt.report.bench.planners import bench_object

        head = {**setting.facts(), "seed": seed, "effort": effort, "repeat": repeat}
        print_json({**head, **bench_object(found), "versions": versions()})
        return
    from shardopt.report.bench.planners import show_bench, show_headline
    from shardopt.report.console import make_console
    from shardopt.report.setting import show_setting

    console = make_console()
    if quiet:
        show_headline(console, found)
        return
    show_setting(console, setting)
    show_bench(console, found)


def _words(machine: Machine) -> Sequence[str]:
    """The machine flags as they would be typed."""
    given: dict[str, int | float | str | Path | None] = {
        "--gpus": machine.gpus,
        "--gpus-per-node": machine.gpus_per_node,
        "--cluster": machine.cluster,
        "--hardware": machine.hardware,
        "--hbm-gib": machine.hbm_gib,
        "--ddr-gib": machine.ddr_gib,
        "--reserve": machine.reserve,
        "--batch-size": machine.batch_size,
    }
    return [
        word for flag, value in given.items() if value is not None for word in (flag, f"{value}")
    ]
