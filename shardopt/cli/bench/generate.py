"""``shardopt bench generate``: a PyTorch program out of traces."""

from __future__ import annotations

from pathlib import Path

from shardopt.report.blocks import View


def generate(
    *,
    traces: list[Path],
    output: Path,
    indices: str = "uniform",
    keep_annotation: list[str] | None = None,
    strict: bool = False,
    join: bool = False,
    scale: str | None = None,
    doubled: Path | None = None,
    tables: Path | None = None,
    plan: Path | None = None,
) -> View:
    """Turn traces into a benchmark: a program that runs the same ops without the model.

    Run it with `shardopt bench replay DIR` or `torchrun DIR/benchmark.py`. It holds no parameter
    values, ids, paths or names of hosts and users.

    Arguments:
        traces (TRACE...): Execution traces, with Kineto traces if there are any: .json, .json.gz,
            .tar.gz, or folders of these; one of each per rank.

    Options:
        output (-o DIR): Folder for the benchmark; it is created.
        indices (uniform|zipf:ALPHA): Distribution of the ids of lookups, which traces do not hold.
        keep_annotation (NAME): Keep the name of this annotation; may be repeated. Names of PyTorch
            and TorchRec are kept, all others become numbers.
        strict: Stop with an error if an op of the trace would be left out.
        join: Treat each TRACE as a separate job (a folder if it has several ranks); an iteration
            runs one after the other.
        scale (batch=N,tables=K): Multiply the batch of the trace by N, with --doubled; make K
            copies of each embedding module, of which the dense part reads the first.
        doubled (TRACE): A trace of the same job at twice the batch, for --scale batch; it shows
            which sizes depend on the batch.
        tables (MODEL): Model file with the tables that the lookups read: rows, widths, pooling
            factors and index distributions, which traces do not hold.
        plan (PLAN): The plan that the trace was recorded with, of shardopt or TorchRec; it says
            which of --tables each rank has. Without it every rank has all of them.
    """
    from shardopt.formatting import plural
    from shardopt.replay.check import check_folder, check_indices, check_scale, check_tables
    from shardopt.replay.generate import generate as write
    from shardopt.replay.program.tables import load_tables

    check_indices(indices)
    check_folder(output)
    scales = check_scale(scale, doubled, join=join)
    check_tables(tables, plan, join=join)
    benchmark = write(
        traces,
        output,
        indices=indices,
        keep_annotations=keep_annotation or (),
        strict=strict,
        join=join,
        doubled=doubled,
        scale=scales,
        tables=None if tables is None else load_tables(tables, plan),
    )
    ranks, done = len(benchmark.programs), benchmark.ops_total - benchmark.ops_left_out
    return View(
        {
            "ranks": ranks,
            "ops_total": benchmark.ops_total,
            "ops_left_out": benchmark.ops_left_out,
            "notes": list(benchmark.notes),
        },
        [f"{done:,} of {benchmark.ops_total:,} ops on {plural(ranks, 'rank')}"],
        notes=[*benchmark.notes, f"wrote {output}: {', '.join(benchmark.sources)}"],
    )
