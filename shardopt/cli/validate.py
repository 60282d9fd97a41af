"""``shardopt validate``: predictions held against public measurements."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardopt.cli import options

if TYPE_CHECKING:
    from shardopt.validate.report import Report


class Suites(StrEnum):
    """Suites, by their names on the command line."""

    COLLECTIVES = "collectives"
    GEMM = "gemm"
    MLPERF_DLRM = "mlperf-dlrm"
    TORCHREC_P4D = "torchrec-p4d"
    TORCHREC_CPU = "torchrec-cpu"
    AGAINST_TORCHREC = "against-torchrec"
    TRANSFORMERS_CPU = "transformers-cpu"
    REPLAY = "replay"
    TRANSFORMERS = "transformers"
    TRACES = "traces"
    ALL = "all"


Suite = Annotated[Suites, typer.Argument(metavar="SUITE", help="What to validate.")]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Folder with the public files that docs/data.md lists; of torchrec-cpu, "
        "against-torchrec, transformers-cpu and replay the measurements, those of a source "
        "checkout unless given.",
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
    """Hold predictions against measurements that they were not fitted on."""
    from shardopt.cli.output import check_writable, print_json
    from shardopt.report.accuracy_page import accuracy_text
    from shardopt.report.console import make_console
    from shardopt.report.validate import report_object, show_report

    check_writable(write_docs)
    reports = [_run(runner, folder) for runner, folder in _runs(suite, data)]
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


def _runs(suite: Suites, data: Path | None) -> list[tuple[Callable[[Path], Report], Path | None]]:
    """What runs, each on its folder; our own rows lie in the source checkout."""
    from shardopt.validate.collectives import validate_collectives
    from shardopt.validate.gemm import validate_gemm
    from shardopt.validate.measured.against_torchrec import DEFAULT_FOLDER as AGAINST
    from shardopt.validate.measured.against_torchrec import validate_against_torchrec
    from shardopt.validate.measured.batch import batch_folders
    from shardopt.validate.measured.torchrec_cpu import DEFAULT_FOLDER, validate_torchrec_cpu
    from shardopt.validate.mlperf.suite import validate_mlperf_dlrm
    from shardopt.validate.replay import DEFAULT_FOLDER as REPLAYS
    from shardopt.validate.replay import has_replays, validate_replay
    from shardopt.validate.torchrec_p4d import validate_torchrec_p4d
    from shardopt.validate.traces import validate_traces
    from shardopt.validate.transformers import validate_transformers
    from shardopt.validate.transformers_cpu import DEFAULT_FOLDER as TRANSFORMERS
    from shardopt.validate.transformers_cpu import has_transformers, validate_transformers_cpu

    public: dict[Suites, Callable[[Path], Report]] = {
        Suites.COLLECTIVES: validate_collectives,
        Suites.GEMM: validate_gemm,
        Suites.MLPERF_DLRM: validate_mlperf_dlrm,
        Suites.TORCHREC_P4D: validate_torchrec_p4d,
        Suites.TRANSFORMERS: validate_transformers,
        Suites.TRACES: validate_traces,
    }
    if suite is Suites.TORCHREC_CPU:
        return [(validate_torchrec_cpu, data or DEFAULT_FOLDER)]
    if suite is Suites.AGAINST_TORCHREC:
        return [(validate_against_torchrec, data or AGAINST)]
    if suite is Suites.TRANSFORMERS_CPU:
        return [(validate_transformers_cpu, data or TRANSFORMERS)]
    if suite is Suites.REPLAY:
        return [(validate_replay, data or REPLAYS)]
    if suite is not Suites.ALL:
        return [(public[suite], data)]
    own = [(validate_torchrec_cpu, DEFAULT_FOLDER)] if batch_folders(DEFAULT_FOLDER) else []
    own += [(validate_against_torchrec, AGAINST)] if batch_folders(AGAINST) else []
    own += [(validate_transformers_cpu, TRANSFORMERS)] if has_transformers(TRANSFORMERS) else []
    own += [(validate_replay, REPLAYS)] if has_replays(REPLAYS) else []
    return [*((runner, data) for runner in public.values()), *own]
