"""``shardopt plan`` with several machines: a plan for each, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from predictor.errors import InfeasibleError, InputError
from shardopt.api.request import PlanRequest
from shardopt.cli.interrupts import EXIT_INTERRUPTED
from shardopt.files import is_stream


def read_gpus(text: str | None) -> list[int]:
    """Numbers of GPUs, with commas between them.

    Raises:
        BadParameter: they are not whole numbers.
    """
    found = []
    for word in [] if text is None else text.split(","):
        try:
            found.append(int(word))
        except ValueError:
            raise typer.BadParameter(
                f"'{word}' is not a valid integer; give one number, or several as in 8,16,64",
                param_hint="'--gpus'",
            ) from None
    return found


def plan_each(
    request: PlanRequest,
    hardware: Sequence[str | None],
    gpus: Sequence[int],
    price: Path | None,
    output: Path | None,
    *,
    no_cache: bool,
    json: bool,
    quiet: bool,
) -> None:
    """Search on every machine, print one table, and write each plan beside ``output``."""
    from search.stop import Stop
    from shardopt.api.cache import ResultCache
    from shardopt.api.machines import OnMachine, plan_machines, read_prices
    from shardopt.cli.output import note, print_json
    from shardopt.files import atomic_write_text
    from shardopt.report.console import make_console
    from shardopt.report.machines import machines_object, show_machines

    if not gpus:
        raise InputError("how many GPUs? Give their number, such as 8 or 8,16", inputs=("gpus",))
    if request.cluster is not None or request.from_ is not None:
        raise InputError("several machines are planned without --cluster and --from")
    prices = {} if price is None else read_prices(price)
    paths = _paths(output, hardware, gpus, request.inputs)
    stops: list[Stop] = []

    def stop() -> Stop:
        stops.append(Stop(request.effort, request.time_limit, interruptible=True))
        return stops[-1]

    cache = None if no_cache else ResultCache.of_user()
    found: list[OnMachine] = []
    files: list[Path] = []
    planned = plan_machines(request, hardware, gpus, prices, cache, stop)
    for one, path in zip(planned, paths, strict=True):
        found.append(one)
        if one.answer is None:
            continue
        if path is not None:
            files.append(path)
            atomic_write_text(path, one.answer.plan_text())
        done = f"{one.gpus} x {one.hardware}: {one.answer.best.iteration_ms:.4g} ms"
        note([done], quiet=quiet or json)
        if stops[-1].is_interrupted:
            break
    if all(one.answer is None for one in found):
        raise InfeasibleError(found[0].lacks)
    if json:
        print_json(machines_object(found, files))
    else:
        show_machines(make_console(), found, files)
    if stops[-1].is_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _paths(
    output: Path | None, hardware: Sequence[str | None], gpus: Sequence[int], inputs: Sequence[Path]
) -> list[Path | None]:
    """Where the plan of each machine goes, in the order in which they are planned.

    Raises:
        InputError: it cannot be written, or two go to the same file.
    """
    from predictor.hardware.loader import DEFAULT_HARDWARE
    from shardopt.cli.output import check_writable

    machines = [(name or DEFAULT_HARDWARE, ranks) for name in hardware for ranks in gpus]
    if output is None:
        return [None] * len(machines)
    if is_stream(output):
        raise InputError(f"{output}: each machine has a plan of its own; give the name of a file")
    found: dict[Path, str] = {}
    for name, ranks in machines:
        path = output.with_name(f"{output.stem}.{Path(name).stem}.{ranks}{output.suffix}")
        if path in found:
            raise InputError(
                f"{path} would hold two plans, of {found[path]} and of {name} with {ranks} GPUs; "
                "name each machine once, and its profile by a file name of its own"
            )
        found[path] = name
        check_writable(path, inputs)
    return [*found]
