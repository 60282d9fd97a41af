"""``shardopt bench run``: plans run for real with TorchRec, predicted and measured."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardopt.cli import options
from shardopt.cli.bench import options as bench
from shardopt.ranks.realtime import Runtime

if TYPE_CHECKING:
    from shardopt.api.setting import Machine
    from shardopt.bench.job import Job

MAX_SILENCE = 10**6


class Backend(StrEnum):
    """How ranks talk, and where they compute."""

    GLOO = "gloo"
    NCCL = "nccl"


BackendOption = Annotated[
    Backend,
    typer.Option(
        "--backend", help="gloo runs on CPU cores, nccl on GPUs.", rich_help_panel=bench.MEASURE
    ),
]
OrderSeed = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        help="Seed of the input batches and of the order of the plans.",
        rich_help_panel=bench.MEASURE,
    ),
]
Silence = Annotated[
    float,
    typer.Option(
        "--silence",
        metavar="S",
        help="End the run if no rank reports anything for so many seconds, and say which hangs.",
        rich_help_panel=bench.MEASURE,
    ),
]
RowsFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="File for the measured rows, written after every round; an existing one is continued.",
        rich_help_panel=options.OUTPUT,
        show_default=False,
    ),
]


def run(
    model: options.Model,
    plans: options.Plans,
    backend: BackendOption = Backend.GLOO,
    rounds: bench.Rounds = 10,
    block: bench.Block = 6,
    warmup: bench.Warmup = "auto",
    seed: OrderSeed = 0,
    link: bench.LinkRate = None,
    silence: Silence = 600.0,
    runtime: options.RuntimeOption = Runtime.PLAIN,
    gpus: options.Gpus = None,
    hardware: options.Hardware = None,
    batch_size: options.BatchSize = None,
    output: RowsFile = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Run plans for real with TorchRec, interleaved, and save every sample.

    Starts one process per rank on this machine, or joins the processes that torchrun started.
    """
    from dataclasses import replace

    from shardopt.api.setting import Machine, check_machine
    from shardopt.bench.job import check_job
    from shardopt.bench.run import run_bench
    from shardopt.cli.checks import check_number
    from shardopt.cli.output import check_writable, note
    from shardopt.ranks.hosts import Link
    from shardopt.ranks.rank import end_process, rank_of_torchrun

    check_number("--rounds", rounds, 1, bench.MAX_ROUNDS)
    check_number("--block", block, 1, bench.MAX_BLOCK)
    check_number("--seed", seed, 0, 2**31 - 1)
    check_number("--silence", silence, 1, MAX_SILENCE)
    warm = bench.warmup_rounds(warmup)
    check_writable(output, [model, *plans])
    machine = Machine(gpus=gpus, hardware=hardware, batch_size=batch_size)
    check_machine(machine, needs_ranks=False)
    job, paths = _job(model, plans, machine, Backend(backend), rounds, block, warm, seed)
    job = replace(job, link=None if link is None else Link(link), runtime=runtime)
    join = rank_of_torchrun()
    check_job(job, given_ranks=join.world_size if join else gpus, joined=join is not None)
    quiet = quiet or bool(join and join.index)
    profile, predicted = _predicted(
        model, plans, list(paths), machine, Backend(backend), runtime, quiet
    )
    rows = run_bench(
        job,
        output,
        given_ranks=gpus,
        join=join,
        silence_s=silence,
        say=lambda text: note([text], quiet=quiet),
    )
    if rows is not None:
        if json:
            from shardopt.cli.output import print_json
            from shardopt.report.bench.run import run_object

            print_json({**run_object(rows, paths, predicted), "hardware": profile})
        else:
            from shardopt.report.bench.run import show_run
            from shardopt.report.console import make_console

            show_run(make_console(), rows, predicted, profile)
    if join is not None:
        end_process()


def _job(
    model: Path,
    plans: Sequence[Path],
    machine: Machine,
    backend: Backend,
    rounds: int,
    block: int,
    warmup: int | None,
    seed: int,
) -> tuple[Job, dict[str, str]]:
    """The job, and the path as given of each plan's name in it."""
    from predictor.errors import InputError
    from predictor.model.plan_check import check_plan
    from shardopt.bench.job import Job
    from shardopt.config import load_model_with_notes
    from shardopt.plan import load_plan

    workload, _ = load_model_with_notes(model, batch_size=machine.batch_size)
    if workload.replica_groups is not None:
        raise InputError(
            f"{model}: has replica_groups, and bench run trains one sharding group without the "
            "averaging of copies; leave them out to time a group by itself"
        )
    names = plan_names(plans)
    loaded = {
        name: check_plan(load_plan(path), workload, where=str(path))
        for name, path in zip(names, plans, strict=True)
    }
    job = Job(workload, loaded, backend.value, rounds, block, warmup, seed)
    return job, dict(zip(names, map(str, plans), strict=True))


def plan_names(plans: Sequence[Path]) -> list[str]:
    """What the plans are called in a rows file, which tells nothing of where they lie."""
    names: list[str] = []
    for path in plans:
        same = sum(name.split("#")[0] == path.stem for name in names)
        names.append(f"{path.stem}#{same + 1}" if same else path.stem)
    return names


def _predicted(
    model: Path,
    plans: Sequence[Path],
    names: Sequence[str],
    machine: Machine,
    backend: Backend,
    runtime: Runtime,
    quiet: bool,
):
    """Name of the profile, and the prediction of each plan."""
    from dataclasses import replace

    from shardopt.calibrate.profile import other_machine_note, other_runtime_note
    from shardopt.calibrate.run import origin
    from shardopt.cli.output import note
    from shardopt.cli.setting import predict_plans

    hardware = machine.hardware or ("cpu-gloo" if backend is Backend.GLOO else None)
    setting, found = predict_plans(model, plans, replace(machine, hardware=hardware))
    told = (
        other_machine_note(setting.hardware, origin(backend.value).machine),
        other_runtime_note(setting.hardware, runtime),
    )
    note([*setting.notes, *filter(None, told)], quiet=quiet)
    predictions = {name: item.prediction for name, item in zip(names, found, strict=True)}
    return setting.hardware_name, predictions
