"""``python -m lab search``: every planner on a suite of instances."""

from __future__ import annotations

from pathlib import Path

from shardopt.api.request import MAX_SEED, check_number


def search(
    *,
    suite: Path,
    rows: Path,
    only: str | None = None,
    planners: str | None = None,
    seed: int = 0,
    effort: float = 1.0,
    write_docs: Path | None = None,
    quiet: bool = False,
) -> None:
    """Run every planner on every instance of a suite.

    The same command continues with what is left after an interruption, and runs again what came
    from other code.

    Arguments:
        suite (FILE): Instances to plan.

    Options:
        rows (-o --output CSV): File for the rows of the suite; an existing one is continued.
        only (PATTERN): Run only instances whose name matches, such as '100x8-*'.
        planners (NAMES): Planners to run, separated by commas; all by default.
        write_docs (FILE): Also write the results to this Markdown page, such as
            docs/benchmarks.md.
    """
    from lab.pages.planners_page import benchmarks_text
    from lab.pages.planners_summary import show_summary
    from lab.planners.suite import SuiteSelection, check_planners, load_suite, run_suite
    from search.stop import Stop
    from shardopt.cli.output import check_writable, note
    from shardopt.files import atomic_write_text
    from shardopt.report.console import make_console

    check_number("seed", seed, 0, MAX_SEED)
    Stop(effort)
    check_writable(rows)
    check_writable(write_docs)
    names = [name.strip() for name in (planners or "").split(",") if name.strip()]
    selection = SuiteSelection(only, check_planners(names), effort, seed)
    found = run_suite(load_suite(suite), rows, selection, lambda text: note([text], quiet=quiet))
    show_summary(make_console(), found)
    if write_docs is not None:
        atomic_write_text(write_docs, benchmarks_text(found))
