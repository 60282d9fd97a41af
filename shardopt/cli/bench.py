"""``shardopt bench``: ``search`` times the planners, ``run`` runs plans, ``batch`` many tasks,
``transformers`` training steps of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardopt.cli import bench_batch, bench_run, bench_transformers, options

if TYPE_CHECKING:
    from shardopt.cli.resolve import Flags

MAX_REPEAT = 1000

app = typer.Typer(help="Measure for real: the planners themselves, and plans in training.")

Repeat = Annotated[
    int,
    typer.Option(
        "--repeat", metavar="N", help="Rounds; medians are shown.", rich_help_panel=options.SEARCH
    ),
]


@app.callback()
def _bench() -> None:
    pass


app.command("run")(bench_run.run)
app.command("batch")(bench_batch.batch)
app.command("transformers")(bench_transformers.transformers)


@app.command("search")
def search(
    model: options.Model,
    gpus: options.Gpus = None,
    gpus_per_node: options.GpusPerNode = None,
    cluster: options.Cluster = None,
    hardware: options.Hardware = None,
    hbm_gib: options.HbmGib = None,
    ddr_gib: options.DdrGib = None,
    reserve: options.Reserve = 0.15,
    batch_size: options.BatchSize = None,
    seed: options.Seed = 0,
    effort: options.Effort = 1.0,
    time_limit: options.TimeLimit = None,
    repeat: Repeat = 3,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Time the search beside TorchRec's own planner, and compare the two plans."""
    from predictor.errors import InputError
    from shardopt.cli.messages import note
    from shardopt.cli.plan import check_search, problem_of, setting_object
    from shardopt.cli.resolve import Flags, resolve

    flags = Flags(gpus, gpus_per_node, cluster, hardware, hbm_gib, ddr_gib, reserve, batch_size)
    check_search(seed, effort, time_limit, top_k=1)
    if not 1 <= repeat <= MAX_REPEAT:
        raise InputError(f"--repeat is {repeat}; it must be at least 1 and at most {MAX_REPEAT}")
    setting = resolve(model, flags)

    # torch, torchrec and the solvers, once the input is known to be good
    from shardopt.bench.search import Asked, compare

    words = [str(model), *_words(flags), "--seed", str(seed), "--effort", repr(effort)]
    if time_limit is not None:
        words += ["--time-limit", repr(time_limit)]
    asked = Asked(problem_of(setting), words, seed, effort, time_limit, repeat)
    note(setting.notes, quiet=quiet)
    found = compare(
        asked, lambda name, at: note([f"round {at + 1} of {repeat}: {name}"], quiet=quiet)
    )
    if json:
        from shardopt.cli.output import print_json, versions
        from shardopt.report.bench_view import bench_object

        head = {**setting_object(setting), "seed": seed, "effort": effort, "repeat": repeat}
        print_json({**head, **bench_object(found), "versions": versions()})
        return
    from shardopt.report.bench_view import show_bench, show_headline
    from shardopt.report.console import make_console
    from shardopt.report.plan_view import show_setting

    console = make_console()
    if quiet:
        show_headline(console, found)
        return
    show_setting(console, setting)
    show_bench(console, found)


def _words(flags: Flags) -> Sequence[str]:
    """The machine flags as they would be typed."""
    given: dict[str, int | float | str | Path | None] = {
        "--gpus": flags.gpus,
        "--gpus-per-node": flags.gpus_per_node,
        "--cluster": flags.cluster,
        "--hardware": flags.hardware,
        "--hbm-gib": flags.hbm_gib,
        "--ddr-gib": flags.ddr_gib,
        "--reserve": flags.reserve,
        "--batch-size": flags.batch_size,
    }
    return [
        word for flag, value in given.items() if value is not None for word in (flag, f"{value}")
    ]
