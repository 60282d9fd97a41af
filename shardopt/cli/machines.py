"""``shardopt plan`` with several machines: a plan for each, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from predictor.errors import InfeasibleError, InputError
from shardopt.api.request import PlanRequest
from shardopt.cli.interrupts import EXIT_INTERRUPTED
from shardopt.cli.output import check_writable, note
from shardopt.files import atomic_write_text, is_stream, read_numbers
from shardopt.report.blocks import View

if TYPE_CHECKING:
    from search.stop import Stop
    from shardopt.api.cache import ResultCache


def read_gpus(text: str | None) -> list[int]:
    """Numbers of GPUs, with commas between them.

    Raises:
        BadParameter: they are not whole numbers.
    """
    counts = []
    for word in [] if text is None else text.split(","):
        try:
            counts.append(int(word))
        except ValueError:
            raise typer.BadParameter(
                f"'{word}' is not a valid integer; give one number, or several as in 8,16,64",
                param_hint="'--gpus'",
            ) from None
    return counts


def plan_each(
    request: PlanRequest,
    hardware: Sequence[str | None],
    gpus: Sequence[int],
    price: Path | None,
    output: Path | None,
    cache: ResultCache | None,
    *,
    quiet: bool,
) -> View:
    """Search on every machine, and write each plan beside ``output``."""
    from shardopt.api.document import MachinesAnswer
    from shardopt.api.inputs import Inputs, stop_of
    from shardopt.api.machines import OnMachine, plan_machines
    from shardopt.report.machines import machines_view

    if len(hardware) > 1 and None in hardware:
        raise InputError(
            f"'{request.hardware}' has an empty name; give names with commas between them",
            inputs=("hardware",),
        )
    if not gpus:
        raise InputError("how many GPUs? Give their number, such as 8 or 8,16", inputs=("gpus",))
    if request.cluster is not None or request.from_ is not None:
        raise InputError("several machines are planned without --cluster and --from")
    prices = {}
    if price is not None:
        form = "hardware: price of a GPU for an hour"
        prices = read_numbers(price, "file of prices", form, 1e-9, 1e9)
    paths = _paths(output, hardware, gpus, request.inputs)
    stops: list[Stop] = []

    def stop(inputs: Inputs) -> Stop:
        stops.append(stop_of(inputs, interruptible=True))
        return stops[-1]

    planned_machines: list[OnMachine] = []
    files: list[Path] = []
    planned = plan_machines(request, hardware, gpus, prices, cache, stop)
    for machine, path in zip(planned, paths, strict=True):
        planned_machines.append(machine)
        if machine.answer is None:
            continue
        if path is not None:
            files.append(path)
            atomic_write_text(path, machine.answer.plan_text())
        note(
            [f"{machine.gpus} x {machine.hardware}: {machine.answer.best.iteration_ms:.4g} ms"],
            quiet=quiet,
        )
        if stops[-1].is_interrupted:
            break
    if all(machine.answer is None for machine in planned_machines):
        raise InfeasibleError(planned_machines[0].lacks)
    cut = stops[-1].is_interrupted
    answer = MachinesAnswer(
        machines=[machine.document() for machine in planned_machines],
        files=[str(path) for path in files],
    )
    return replace(machines_view(answer), code=EXIT_INTERRUPTED if cut else 0)


def _paths(
    output: Path | None, hardware: Sequence[str | None], gpus: Sequence[int], inputs: Sequence[Path]
) -> list[Path | None]:
    """Return the path for the plan of each machine, in the order in which they are planned.

    Raises:
        InputError: it cannot be written, or two go to the same file.
    """
    from predictor.hardware.loader import DEFAULT_HARDWARE

    machines = [(name or DEFAULT_HARDWARE, ranks) for name in hardware for ranks in gpus]
    if output is None:
        return [None] * len(machines)
    if is_stream(output):
        raise InputError(f"{output}: each machine has a plan of its own; give the name of a file")
    by_path: dict[Path, str] = {}
    for name, ranks in machines:
        path = output.with_name(f"{output.stem}.{Path(name).stem}.{ranks}{output.suffix}")
        if path in by_path:
            raise InputError(
                f"{path} would hold two plans, of {by_path[path]} and of {name} with {ranks} GPUs; "
                "name each machine once, and its profile by a file name of its own"
            )
        by_path[path] = name
        check_writable(path, inputs)
    return [*by_path]
