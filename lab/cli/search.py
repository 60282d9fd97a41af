"""``python -m lab search``: every planner on a suite of instances."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardopt.cli import options

Suite = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="Instances to plan.", show_default=False),
]
Rows = Annotated[
    Path,
    typer.Option(
        "-o",
        "--output",
        metavar="CSV",
        help="File for the rows of the suite; an existing one is continued.",
        show_default=False,
    ),
]
Only = Annotated[
    str | None,
    typer.Option(
        "--only",
        metavar="PATTERN",
        help="Run only instances whose name matches, such as '100x8-*'.",
        show_default=False,
    ),
]
Planners = Annotated[
    str | None,
    typer.Option(
        "--planners",
        metavar="NAMES",
        help="Planners to run, separated by commas; all by default.",
        show_default=False,
    ),
]
WriteDocs = Annotated[
    Path | None,
    typer.Option(
        "--write-docs",
        metavar="FILE",
        help="Also write the results to this Markdown page, such as docs/benchmarks.md.",
        show_default=False,
    ),
]


def search(
    suite: Suite,
    rows: Rows,
    only: Only = None,
    planners: Planners = None,
    seed: options.Seed = 0,
    effort: options.Effort = 1.0,
    write_docs: WriteDocs = None,
    quiet: options.Quiet = False,
) -> None:
    """Run every planner on every instance of a suite.

    The same command continues with what is left after an interruption, and runs again what came
    from other code.
    """
    from lab.pages.planners_page import benchmarks_text
    from lab.pages.planners_summary import show_summary
    from lab.planners.suite import SuiteSelection, check_planners, load_suite, run_suite
    from shardopt.cli.checks import check_search
    from shardopt.cli.output import check_writable, note
    from shardopt.files import atomic_write_text
    from shardopt.report.console import make_console

    check_search(seed, effort, None, top_k=1)
    check_writable(rows)
    check_writable(write_docs)
    names = [name.strip() for name in (planners or "").split(",") if name.strip()]
    selection = SuiteSelection(only, check_planners(names), effort, seed)
    found = run_suite(load_suite(suite), rows, selection, lambda text: note([text], quiet=quiet))
    show_summary(make_console(), found)
    if write_docs is not None:
        atomic_write_text(write_docs, benchmarks_text(found))
