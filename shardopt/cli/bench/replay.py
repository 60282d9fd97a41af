"""``shardopt bench replay``: runs a generated benchmark and says how much of the trace it is."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shardopt.cli import options
from shardopt.cli.bench.benchmark import Folder
from shardopt.cli.bench.options import MEASURE

WHICH = "What is replayed"
MAX_ITERATIONS = 1_000_000
MAX_SECONDS = 10**7
STARTING = "trying every op"


class Subset(StrEnum):
    """Which ops run."""

    ALL = "all"
    COMPUTE = "compute"
    COMMS = "comms"


class Device(StrEnum):
    """Where they run."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


Which = Annotated[
    Subset,
    typer.Option(
        "--subset",
        help="Ops to run: all, only computation, or only collectives.",
        rich_help_panel=WHICH,
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--ops",
        metavar="NAME",
        help="Run only this op, such as aten::mm or mm; may be repeated.",
        rich_help_panel=WHICH,
        show_default=False,
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from-annotation",
        metavar="NAME",
        help="Run only what the trace has under this annotation.",
        rich_help_panel=WHICH,
        show_default=False,
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        metavar="N",
        help="Number of processes; by default as many as the traced job had.",
        rich_help_panel=WHICH,
        show_default=False,
    ),
]
Indices = Annotated[
    str | None,
    typer.Option(
        "--indices",
        metavar="uniform|zipf:ALPHA",
        help="Distribution of the ids of lookups; by default that of `bench generate`.",
        rich_help_panel=WHICH,
        show_default=False,
    ),
]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Import this module first, because it registers ops; may be repeated.",
        rich_help_panel=WHICH,
        show_default=False,
    ),
]
Where = Annotated[
    Device,
    typer.Option(
        "--device", help="Where ops run; auto uses GPUs if there are any.", rich_help_panel=MEASURE
    ),
]
WarmUp = Annotated[
    int,
    typer.Option(
        "--warm-up",
        metavar="N",
        help="Iterations before the measurement.",
        rich_help_panel=MEASURE,
    ),
]
Iterations = Annotated[
    int,
    typer.Option(
        "--iterations", metavar="N", help="Iterations to measure.", rich_help_panel=MEASURE
    ),
]
TimeLimit = Annotated[
    float,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help="Make fewer iterations where all of them would take longer; 0 for no limit.",
        rich_help_panel=MEASURE,
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FOLDER",
        help="Record one more iteration as an execution trace and a Kineto trace per rank.",
        rich_help_panel=MEASURE,
        show_default=False,
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Stop with an error if an op cannot run.")]


def replay(
    folder: Folder,
    subset: Which = Subset.ALL,
    ops: Names = None,
    from_annotation: From = None,
    ranks: Ranks = None,
    indices: Indices = None,
    imports: Imports = None,
    device: Where = Device.AUTO,
    warm_up: WarmUp = 5,
    iterations: Iterations = 20,
    time_limit: TimeLimit = 60.0,
    profile: Profile = None,
    strict: Strict = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Run a generated benchmark and report its time and how much of the trace it covers.

    Starts one process per rank; under torchrun this process is one of the ranks.
    """
    from predictor.errors import InputError
    from shardopt.cli.checks import check_number
    from shardopt.cli.output import print_json
    from shardopt.extras import require_packages
    from shardopt.replay.check import check_indices
    from shardopt.replay.launch import become_rank, check_benchmark, replay_rank
    from shardopt.replay.launch import replay as run
    from shardopt.report.progress import LineProgress

    check_number("--warm-up", warm_up, 0, MAX_ITERATIONS)
    check_number("--iterations", iterations, 1, MAX_ITERATIONS)
    check_number("--time-limit", time_limit, 0, MAX_SECONDS)
    if ranks is not None:
        check_number("--ranks", ranks, 1, 4096)
    words = ["--subset", subset.value, "--device", device.value]
    words += ["--warm-up", str(warm_up), "--iterations", str(iterations)]
    words += ["--time-limit", str(time_limit)]
    if indices is not None:
        check_indices(indices)
        words += ["--indices", indices]
    if from_annotation is not None:
        words += ["--from-annotation", from_annotation]
    if profile is not None:
        words += ["--profile", str(profile.absolute())]
    words += [word for name in ops or () for word in ("--ops", name)]
    words += [word for name in imports or () for word in ("--import", name)]
    words += ["--strict"] if strict else []
    check_benchmark(folder)
    require_packages("torch")
    if "RANK" in os.environ:
        if ranks is not None:
            raise InputError("leave --ranks out under torchrun, which sets the number of ranks")
        if os.environ["RANK"] != "0":
            become_rank(folder, words)
        with LineProgress(STARTING, on=not quiet) as status:
            result = replay_rank(folder, words, status.replaying)
    else:
        with LineProgress(STARTING, on=not quiet) as status:
            result = run(folder, words, ranks, status.replaying)
    if json:
        print_json(result)
        return
    from shardopt.report.bench.replay import show_replay
    from shardopt.report.console import make_console

    show_replay(make_console(), result, brief=quiet)
