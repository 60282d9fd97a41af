"""``shardopt bench replay``: a generated benchmark, run for real."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Literal

from shardopt.api.request import check_number
from shardopt.report.blocks import View

MAX_ITERATIONS = 1_000_000
MAX_SECONDS = 10**7
STARTING = "trying every op"


def replay(
    folder: Path,
    subset: Literal["all", "compute", "comms"] = "all",
    ops: list[str] | None = None,
    from_annotation: str | None = None,
    ranks: int | None = None,
    indices: str | None = None,
    import_: list[str] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    warm_up: int = 5,
    iterations: int = 20,
    time_limit: float = 60.0,
    profile: Path | None = None,
    strict: bool = False,
    quiet: bool = False,
) -> View:
    """Run a generated benchmark and report its time and how much of the trace it covers.

    Starts one process per rank; under torchrun this process is one of the ranks.

    What is replayed:
        subset: Ops to run: all, only computation, or only collectives.
        ops (NAME): Run only this op, such as aten::mm or mm; may be repeated.
        from_annotation (NAME): Run only what the trace has under this annotation.
        ranks (N): Number of processes; by default as many as the traced job had.
        indices (uniform|zipf:ALPHA): Distribution of the ids of lookups; by default that of `bench
            generate`.
        import_ (MODULE): Import this module first, because it registers ops; may be repeated.

    Measurement:
        device: Where ops run; auto uses GPUs if there are any.
        warm_up (N): Iterations before the measurement.
        iterations (N): Iterations to measure.
        time_limit (SECONDS): Make fewer iterations where all of them would take longer; 0 for no
            limit.
        profile (FOLDER): Record one more iteration as an execution trace and a Kineto trace per
            rank.

    Options:
        strict: Stop with an error if an op cannot run.
    """
    from predictor.errors import InputError
    from shardopt.cli.output import words_of
    from shardopt.extras import require_packages
    from shardopt.replay.check import check_indices
    from shardopt.replay.launch import become_rank, check_benchmark, replay_rank
    from shardopt.replay.launch import replay as start
    from shardopt.report.bench.replay import replay_view
    from shardopt.report.progress import LineProgress

    check_number("warm_up", warm_up, 0, MAX_ITERATIONS)
    check_number("iterations", iterations, 1, MAX_ITERATIONS)
    check_number("time_limit", time_limit, 0, MAX_SECONDS)
    check_number("ranks", ranks, 1, 4096)
    if indices is not None:
        check_indices(indices)
    options = {
        "subset": subset,
        "device": device,
        "warm_up": warm_up,
        "iterations": iterations,
        "time_limit": time_limit,
        "indices": indices,
        "from_annotation": from_annotation,
        "profile": None if profile is None else profile.absolute(),
        "ops": ops,
        "import": import_,
        "strict": strict,
    }
    words = words_of(options)
    check_benchmark(folder)
    require_packages("torch")
    if "RANK" in os.environ:
        if ranks is not None:
            raise InputError("leave --ranks out under torchrun, which sets the number of ranks")
        if os.environ["RANK"] != "0":
            become_rank(folder, words)
        run = partial(replay_rank, folder, words)
    else:
        run = partial(start, folder, words, ranks)
    with LineProgress(STARTING, on=not quiet) as status:
        result = run(status.replaying)
    return replay_view(result)
