"""``shardopt bench generate``: a PyTorch program out of traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardopt.cli import options

Traces = Annotated[
    list[Path],
    typer.Argument(
        metavar="TRACE...",
        help="Execution traces, with their Kineto traces where there are any, or Kineto traces "
        "alone: .json, .json.gz, .tar.gz, or folders of these; one of each a rank.",
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
        metavar="batch=N,tables=K",
        help="N times the traces' batch; K copies of each embedding module, of which the dense "
        "part reads the first.",
        show_default=False,
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        "--batch",
        metavar="N",
        help="Samples of a rank in the trace, where its lookups do not tell; for --scale batch.",
        show_default=False,
    ),
]
Tables = Annotated[
    Path | None,
    typer.Option(
        "--tables",
        metavar="MODEL",
        help="Model file with the tables that the lookups read, such as `shardopt stats` writes: "
        "rows, widths, pooling factors and how ids are drawn. Traces do not hold them.",
        show_default=False,
    ),
]
Plan = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="PLAN",
        help="The plan that the trace was recorded with, of shardopt or TorchRec: it says which "
        "of --tables a rank has. Without it a rank has all of them.",
        show_default=False,
    ),
]
Doubled = Annotated[
    Path | None,
    typer.Option(
        "--doubled",
        metavar="TRACE",
        help="The same job at twice the batch: it tells which sizes are the batch's where one "
        "trace does not.",
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
    batch: Samples = None,
    doubled: Doubled = None,
    tables: Tables = None,
    plan: Plan = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Turn traces into a program that replays them, without the model.

    A Kineto trace alone (recorded with record_shapes=True) does not tell tensors apart: ops take
    ones made up front. Its last whole ProfilerStep is taken.

    It holds no parameter values, ids, paths or names of hosts and users, and runs with
    `shardopt bench replay DIR` or `torchrun DIR/benchmark.py`.
    """
    from shardopt.cli.output import note, print_json
    from shardopt.formatting import plural
    from shardopt.replay.check import check_folder, check_indices, check_scale, check_tables
    from shardopt.replay.generate import generate as write
    from shardopt.replay.program.tables import load_tables

    check_indices(indices)
    check_folder(output)
    scales = check_scale(scale, doubled, batch, join=join)
    check_tables(tables, plan, join=join)
    made = write(
        traces,
        output,
        indices=indices,
        keep_annotations=keep_annotation or (),
        strict=strict,
        join=join,
        doubled=doubled,
        samples=batch,
        scale=scales,
        tables=None if tables is None else load_tables(tables, plan),
    )
    note([*made.notes, f"wrote {output}: {', '.join(made.sources)}"], quiet=quiet)
    counts = {"ranks": len(made.programs), "ops_total": made.ops_total, "ops_left_out": made.left}
    if json:
        print_json({**counts, "notes": list(made.notes)})
    elif not quiet:
        ranks = plural(counts["ranks"], "rank")
        print(f"{made.ops_total - made.left:,} of {made.ops_total:,} ops on {ranks}")
