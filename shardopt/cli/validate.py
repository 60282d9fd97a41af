"""``shardopt validate``: predictions held against public measurements."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardopt.cli import options

if TYPE_CHECKING:
    from predictor.validate import Report


class Suites(StrEnum):
    """Suites that read files from ``--data``."""

    COLLECTIVES = "collectives"
    GEMM = "gemm"
    MLPERF_DLRM = "mlperf-dlrm"
    TORCHREC_P4D = "torchrec-p4d"
    ALL = "all"


Suite = Annotated[Suites, typer.Argument(metavar="SUITE", help="What to validate.")]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Folder with the public files that docs/data.md lists.",
        show_default=False,
    ),
]
WriteDocs = Annotated[
    Path | None,
    typer.Option(
        "--write-docs",
        metavar="FILE",
        help="Also write what was found to this file: docs/accuracy.md comes from `all`.",
        rich_help_panel=options.OUTPUT,
        show_default=False,
    ),
]


def validate(
    suite: Suite,
    data: Data = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    write_docs: WriteDocs = None,
) -> None:
    """Hold predictions against public measurements that they were not fitted on."""
    from shardopt.cli.output import check_writable, print_json
    from shardopt.report.accuracy import accuracy_text
    from shardopt.report.console import make_console
    from shardopt.report.validate_view import report_object, show_report

    check_writable(write_docs)
    reports = [_run(runner, data) for runner in _runners(suite)]
    if json:
        objects = {report.suite: report_object(report) for report in reports}
        print_json(objects if suite is Suites.ALL else next(iter(objects.values())))
    else:
        console = make_console()
        for report in reports:
            show_report(console, report, quiet=quiet)
    if write_docs is not None:
        from shardopt.files import atomic_write_text

        atomic_write_text(write_docs, accuracy_text(reports))


def _run(runner: Callable[[Path], Report], data: Path | None) -> Report:
    from predictor.errors import InputError

    if data is None:
        raise InputError(
            "this suite reads public files: give --data DIR; docs/data.md lists them and where "
            "they lie"
        )
    try:
        return runner(data)
    except ModuleNotFoundError as error:
        raise InputError(
            f"this suite fits curves and needs {error.name}: pip install 'shardopt[calibrate]'"
        ) from error


def _runners(suite: Suites) -> list[Callable[[Path], Report]]:
    from predictor.suites.collectives import validate_collectives
    from predictor.suites.gemm import validate_gemm
    from predictor.suites.mlperf_dlrm import validate_mlperf_dlrm
    from shardopt.suites.torchrec_p4d import validate_torchrec_p4d

    known: dict[Suites, Callable[[Path], Report]] = {
        Suites.COLLECTIVES: validate_collectives,
        Suites.GEMM: validate_gemm,
        Suites.MLPERF_DLRM: validate_mlperf_dlrm,
        Suites.TORCHREC_P4D: validate_torchrec_p4d,
    }
    return list(known.values()) if suite is Suites.ALL else [known[suite]]
