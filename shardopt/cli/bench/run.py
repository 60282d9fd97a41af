"""``shardopt bench run``: plans run for real with TorchRec, predicted and measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from predictor.errors import InputError
from shardopt.api.request import MAX_SEED, Machine, check_number
from shardopt.ranks.realtime import Runtime
from shardopt.report.blocks import View

MAX_ROUNDS, MAX_BLOCK, MAX_WARMUP = 10_000, 10_000, 1000
MAX_SILENCE = 10**6


def run(
    model: Path,
    plans: list[Path],
    backend: Literal["gloo", "nccl"] = "gloo",
    rounds: int = 10,
    block: int = 6,
    warmup: str = "auto",
    seed: int = 0,
    link: float | None = None,
    silence: float = 600.0,
    runtime: Runtime = Runtime.PLAIN,
    gpus: int | None = None,
    hardware: str | None = None,
    batch_size: int | None = None,
    output: Path | None = None,
    json: bool = False,
    quiet: bool = False,
) -> View | None:
    """Run plans for real with TorchRec, interleaved, and save every sample.

    Starts one process per rank on this machine, or joins the processes that torchrun started.

    Measurement:
        backend: gloo runs on CPU cores, nccl on GPUs.
        seed (N): Seed of the input batches and of the order of the plans.
        silence (S): End the run if no rank reports for this many seconds, and say which
            hangs.

    Output:
        output (-o FILE): File for the measured rows, written after every round; an existing one is
            continued.
    """
    from shardopt.bench.job import Job, check_job
    from shardopt.bench.run import run_bench
    from shardopt.calibrate.profile import elsewhere_notes
    from shardopt.calibrate.run import origin
    from shardopt.cli.output import check_writable, note, predict_plans, show
    from shardopt.ranks.hosts import Link
    from shardopt.ranks.rank import end_process, rank_of_torchrun
    from shardopt.report.bench.run import run_view

    check_number("rounds", rounds, 1, MAX_ROUNDS)
    check_number("block", block, 1, MAX_BLOCK)
    check_number("seed", seed, 0, MAX_SEED)
    check_number("silence", silence, 1, MAX_SILENCE)
    check_writable(output, [model, *plans])
    profile = hardware or ("cpu-gloo" if backend == "gloo" else None)
    machine = Machine(gpus=gpus, hardware=profile, batch_size=batch_size)
    given = predict_plans(model, plans, machine)
    setting, predictions = given.setting, given.predictions
    check_writable(output)
    if setting.workload.replica_groups is not None:
        raise InputError(
            f"{model}: has replica_groups, and bench run trains one sharding group without the "
            "averaging of copies; leave them out to time a group by itself"
        )
    names = plan_names(plans)
    job = Job(
        setting.workload,
        {name: item.sharding_plan for name, item in zip(names, predictions, strict=True)},
        backend,
        rounds,
        block,
        warmup_rounds(warmup),
        seed,
        link=None if link is None else Link(link),
        runtime=runtime,
    )
    join = rank_of_torchrun()
    check_job(job, given_ranks=join.world_size if join else gpus, joined=join is not None)
    quiet = quiet or bool(join and join.index)
    remarks = elsewhere_notes(setting.hardware, origin(backend).machine, runtime)
    note([*setting.notes, *remarks], quiet=quiet)
    rows = run_bench(
        job,
        output,
        given_ranks=gpus,
        join=join,
        silence_s=silence,
        say=lambda text: note([text], quiet=quiet),
    )
    view = None
    if rows is not None:
        predicted = dict(zip(names, predictions, strict=True))
        paths = dict(zip(names, map(str, plans), strict=True))
        view = run_view(rows, paths, predicted, setting.hardware_name)
    if join is not None:
        if view is not None:
            show(view, json=json, quiet=quiet)
        end_process()
    return view


def plan_names(plans: Sequence[Path]) -> list[str]:
    """Return the names of plans in a rows file: they do not tell where the plans lie."""
    names: list[str] = []
    for path in plans:
        same = sum(name.split("#")[0] == path.stem for name in names)
        names.append(f"{path.stem}#{same + 1}" if same else path.stem)
    return names


def warmup_rounds(warmup: str) -> int | None:
    """Rounds of warm-up as ``--warmup`` has them; None where the samples decide.

    Raises:
        InputError: it is neither ``auto`` nor a number in range.
    """
    if warmup == "auto":
        return None
    if not warmup.isdigit() or int(warmup) > MAX_WARMUP:
        raise InputError(
            f"--warmup is {warmup}; give auto, or a number of rounds of at most {MAX_WARMUP}"
        )
    return int(warmup)
