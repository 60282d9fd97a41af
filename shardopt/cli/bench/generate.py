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
        help="Execution traces, with Kineto traces if there are any, or Kineto traces alone: "
        ".json, .json.gz, .tar.gz, or folders of these; one of each per rank.",
        show_default=False,
    ),
]
Folder = Annotated[
    Path,
    typer.Option("-o", "--output", metavar="DIR", help="Folder for the benchmark; it is created."),
]
Indices = Annotated[
    str,
    typer.Option(
        "--indices",
        metavar="uniform|zipf:ALPHA",
        help="Distribution of the ids of lookups, which traces do not hold.",
    ),
]
Kept = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-annotation",
        metavar="NAME",
        help="Keep the name of this annotation; may be repeated. Names of PyTorch and TorchRec are "
        "kept, all others become numbers.",
        show_default=False,
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Stop with an error if an op of the trace would be left out."),
]
Join = Annotated[
    bool,
    typer.Option(
        "--join",
        help="Treat each TRACE as a separate job (a folder if it has several ranks); an iteration "
        "runs one after the other.",
    ),
]
Scale = Annotated[
    str | None,
    typer.Option(
        "--scale",
        metavar="batch=N,tables=K",
        help="Multiply the batch of the trace by N; make K copies of each embedding module, of "
        "which the dense part reads the first.",
        show_default=False,
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        "--batch",
        metavar="N",
        help="Samples per rank in the trace, for --scale batch; needed if no lookup shows it.",
        show_default=False,
    ),
]
Tables = Annotated[
    Path | None,
    typer.Option(
        "--tables",
        metavar="MODEL",
        help="Model file with the tables that the lookups read: rows, widths, pooling factors and "
        "index distributions, which traces do not hold.",
        show_default=False,
    ),
]
Plan = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="PLAN",
        help="The plan that the trace was recorded with, of shardopt or TorchRec; it says which "
        "of --tables each rank has. Without it every rank has all of them.",
        show_default=False,
    ),
]
Doubled = Annotated[
    Path | None,
    typer.Option(
        "--doubled",
        metavar="TRACE",
        help="A trace of the same job at twice the batch, for --scale batch; it shows which sizes "
        "depend on the batch.",
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
    """Turn traces into a benchmark: a program that runs the same ops without the model.

    Run it with `shardopt bench replay DIR` or `torchrun DIR/benchmark.py`. It holds no parameter
    values, ids, paths or names of hosts and users.

    A Kineto trace alone (recorded with record_shapes=True) does not identify tensors, so ops use
    tensors that are made beforehand; the last complete ProfilerStep is used.
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
