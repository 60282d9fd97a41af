"""``shardopt bench replay`` and ``predict``: a generated benchmark, run for real or predicted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from shardopt.api.request import check_number

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
    json: bool = False,
    quiet: bool = False,
) -> None:
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
    from shardopt.cli.output import print_json
    from shardopt.extras import require_packages
    from shardopt.replay.check import check_indices
    from shardopt.replay.launch import become_rank, check_benchmark, replay_rank
    from shardopt.replay.launch import replay as run
    from shardopt.report.bench.replay import show_replay
    from shardopt.report.console import make_console
    from shardopt.report.progress import LineProgress

    check_number("warm_up", warm_up, 0, MAX_ITERATIONS)
    check_number("iterations", iterations, 1, MAX_ITERATIONS)
    check_number("time_limit", time_limit, 0, MAX_SECONDS)
    if ranks is not None:
        check_number("ranks", ranks, 1, 4096)
    words = ["--subset", subset, "--device", device]
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
    words += [word for name in import_ or () for word in ("--import", name)]
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
    else:
        show_replay(make_console(), result, brief=quiet)


def predict(
    folder: Path,
    hardware: str = "cpu-gloo",
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Predict an iteration of a generated benchmark without running it.

    Ops that no calibration model ran have no kernel model: their recorded times are used instead,
    and they are listed.

    Machine:
        hardware (NAME|FILE): Profile of CPU ranks, whose collectives are used.
    """
    from shardopt.cli.output import print_json
    from shardopt.replay.predict import predict
    from shardopt.report.bench.replay import show_prediction
    from shardopt.report.console import make_console

    result = predict(folder, hardware)
    if json:
        print_json(result)
    else:
        show_prediction(make_console(), result, brief=quiet)
