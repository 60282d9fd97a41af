"""``shardopt bench generate``: a PyTorch program out of an execution trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardopt.cli import options

Traces = Annotated[
    list[Path],
    typer.Argument(
        metavar="TRACE...",
        help="Execution traces, with their Kineto traces where there are any: .json, .json.gz, "
        ".tar.gz, or folders of these; one of each a rank.",
        show_default=False,
    ),
]
Folder = Annotated[
    Path, typer.Option("-o", "--output", metavar="DIR", help="Made if it is not there.")
]
Indices = Annotated[
    str,
    typer.Option(
        "--indices",
        metavar="uniform|zipf:ALPHA",
        help="How ids of lookups are drawn; traces do not hold them.",
    ),
]
Kept = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-annotation",
        metavar="NAME",
        help="Write this annotation's name as it is; PyTorch's and TorchRec's own are kept, others "
        "become numbers. Repeat it for more.",
        show_default=False,
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse a trace of which something is left out.")
]
Join = Annotated[
    bool,
    typer.Option(
        "--join",
        help="Each TRACE is a job of its own (a folder for one of several ranks); an iteration "
        "runs them one after the other.",
    ),
]
Scale = Annotated[
    str | None,
    typer.Option(
        "--scale",
        metavar="batch=N",
        help="N times the traces' batch; needs --doubled.",
        show_default=False,
    ),
]
Doubled = Annotated[
    Path | None,
    typer.Option(
        "--doubled",
        metavar="TRACE",
        help="The same job at twice the batch: it tells which sizes are the batch's.",
        show_default=False,
    ),
]


def generate(
    traces: Traces,
    output: Folder,
    indices: Indices = "uniform",
    keep_annotation: Kept = None,
    strict: Strict = False,
    join: Join = False,
    scale: Scale = None,
    doubled: Doubled = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Turn execution traces into a program that replays them, without the model.

    It holds no parameter values, ids, paths or names of hosts and users, and runs with
    `shardopt bench replay DIR` or `torchrun DIR/benchmark.py`.
    """
    from shardopt.cli.messages import note
    from shardopt.cli.output import print_json
    from shardopt.replay.check import check_folder, check_indices, check_scale
    from shardopt.replay.generate import generate as write

    check_indices(indices)
    check_folder(output)
    times = check_scale(scale, doubled, join=join)
    made = write(
        traces,
        output,
        indices=indices,
        keep_annotations=keep_annotation or (),
        strict=strict,
        join=join,
        doubled=doubled,
        batch_times=times,
    )
    note([*made.notes, f"wrote {output}: {', '.join(made.sources)}"], quiet=quiet)
    counts = {"ranks": len(made.programs), "ops_total": made.ops_total, "ops_left_out": made.left}
    if json:
        print_json({**counts, "notes": list(made.notes)})
    elif not quiet:
        print(
            f"{made.ops_total - made.left:,} of {made.ops_total:,} ops on {counts['ranks']} ranks"
        )
