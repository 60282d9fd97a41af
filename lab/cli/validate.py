"""``python -m lab validate``: predictions compared with measurements."""

from __future__ import annotations

from pathlib import Path

from lab.suites import ALL, SUITES


def _list(title: str, *, committed: bool) -> str:
    suites = (f"{s.name} ({s.about})" for s in SUITES if s.committed == committed)
    return f"{title}: {', '.join(suites)}."


EPILOG = "\n\n".join(
    [
        _list("Suites on public files, which --data names", committed=False),
        _list("Suites on measurements that a source checkout has", committed=True),
    ]
)


def validate(
    suite: str,
    data: Path | None = None,
    json: bool = False,
    quiet: bool = False,
    write_docs: Path | None = None,
) -> None:
    """Compare predictions with measurements that they were not fitted on.

    Arguments:
        suite (SUITE): Name of a suite, or 'all'.

    Options:
        data (DIR): Folder with the measurements: the public files that docs/data.md lists, or
            another folder than that of the source checkout.
        write_docs (FILE): Also write the results to this Markdown page, and their rows as CSV into
            the folder of its name.
    """
    from lab.pages.accuracy import write_accuracy
    from lab.pages.scores import report_object, show_report
    from lab.suites import run_suites
    from shardopt.cli.output import check_writable, print_json
    from shardopt.report.console import make_console

    check_writable(write_docs)
    reports = run_suites(suite, data)
    if json:
        objects = {report.suite: report_object(report) for report in reports}
        print_json(objects if suite == ALL else next(iter(objects.values())))
    else:
        console = make_console()
        for report in reports:
            show_report(console, report, quiet=quiet)
    if write_docs is not None:
        write_accuracy(write_docs, reports)
