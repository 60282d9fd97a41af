"""``shardopt bench search``: the search against TorchRec's planner, or a suite of planners."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardopt.cli import options

if TYPE_CHECKING:
    from shardopt.api.setting import Machine
    from shardopt.bench.planners.suite import SuiteSelection

MAX_REPEAT = 1000
SUITE = "A suite of instances"

Model = Annotated[
    Path | None,
    typer.Argument(metavar="[MODEL]", help="Model file (YAML); leave it out with --suite."),
]
Repeat = Annotated[
    int,
    typer.Option(
        "--repeat",
        metavar="N",
        help="Number of rounds; the medians are shown.",
        rich_help_panel=options.SEARCH,
    ),
]
Suite = Annotated[
    Path | None,
    typer.Option(
        "--suite",
        metavar="FILE",
        help="Run every planner on the instances of this file, instead of one model.",
        rich_help_panel=SUITE,
        show_default=False,
    ),
]
Rows = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="CSV",
        help="File for the rows of the suite; an existing one is continued.",
        rich_help_panel=SUITE,
        show_default=False,
    ),
]
Only = Annotated[
    str | None,
    typer.Option(
        "--only",
        metavar="PATTERN",
        help="Run only instances whose name matches, such as '100x8-*'.",
        rich_help_panel=SUITE,
        show_default=False,
    ),
]
Planners = Annotated[
    str | None,
    typer.Option(
        "--planners",
        metavar="NAMES",
        help="Planners to run, separated by commas; all by default.",
        rich_help_panel=SUITE,
        show_default=False,
    ),
]
WriteDocs = Annotated[
    Path | None,
    typer.Option(
        "--write-docs",
        metavar="FILE",
        help="Also write the results to this Markdown page, such as docs/benchmarks.md.",
        rich_help_panel=SUITE,
        show_default=False,
    ),
]


def search(
    model: Model = None,
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
    suite: Suite = None,
    rows: Rows = None,
    only: Only = None,
    planners: Planners = None,
    write_docs: WriteDocs = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare the search with TorchRec's planner: time to plan, and predicted plans.

    With --suite, every planner runs on every instance. The same command continues with what is left
    after an interruption, and runs again what came from other code.
    """
    from predictor.errors import InputError
    from shardopt.api.setting import Machine
    from shardopt.cli.checks import check_number, check_search

    machine = Machine(gpus, gpus_per_node, cluster, hardware, hbm_gib, ddr_gib, reserve, batch_size)
    check_search(seed, effort, time_limit, top_k=1)
    if (model is None) == (suite is None):
        raise InputError("give either a model file or --suite FILE")
    if suite is not None:
        _refuse(machine, time_limit)
        from shardopt.bench.planners.suite import SuiteSelection, check_planners

        names = [name.strip() for name in (planners or "").split(",") if name.strip()]
        _suite(
            suite,
            rows,
            SuiteSelection(only, check_planners(names), effort, seed),
            write_docs,
            quiet,
        )
        return
    for flag, value in (("-o", rows), ("--only", only), ("--planners", planners)):
        if value is not None:
            raise InputError(f"{flag} is only for --suite")
    check_number("--repeat", repeat, 1, MAX_REPEAT)
    assert model is not None
    _one_model(model, machine, seed, effort, time_limit, repeat, json=json, quiet=quiet)


def _refuse(machine: Machine, time_limit: float | None) -> None:
    """Flags of one model that a suite sets itself."""
    from predictor.errors import InputError

    named = [*_words(machine)[::2], *(["--time-limit"] if time_limit is not None else [])]
    if named:
        raise InputError(f"{named[0]} is for one model; the instances of a suite set their own")


def _suite(
    suite: Path, rows: Path | None, selection: SuiteSelection, write_docs: Path | None, quiet: bool
) -> None:
    from predictor.errors import InputError
    from shardopt.bench.planners.suite import load_suite, run_suite
    from shardopt.cli.output import check_writable, note

    if rows is None:
        raise InputError("--suite needs -o CSV, the file for its rows")
    check_writable(rows)
    check_writable(write_docs)
    found = run_suite(load_suite(suite), rows, selection, lambda text: note([text], quiet=quiet))
    from shardopt.report.bench.planners import show_summary
    from shardopt.report.console import make_console

    show_summary(make_console(), found)
    if write_docs is not None:
        from shardopt.files import atomic_write_text
        from shardopt.report.bench.planners_page import benchmarks_text

        atomic_write_text(write_docs, benchmarks_text(found))


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
    from shardopt.bench.planners.compare import ComparisonSettings, compare

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
