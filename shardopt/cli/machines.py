"""``shardopt plan`` with several machines: a plan for each, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from predictor.errors import InfeasibleError, InputError
from shardopt.api.request import PlanRequest
from shardopt.cli.interrupts import EXIT_INTERRUPTED


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
    from shardopt.cli.output import check_writable, note, print_json
    from shardopt.files import atomic_write_text
    from shardopt.report.console import make_console
    from shardopt.report.machines import machines_object, show_machines

    if not gpus:
        raise InputError("how many GPUs? Give their number, such as 8 or 8,16", inputs=("gpus",))
    if request.cluster is not None or request.from_ is not None:
        raise InputError("several machines are planned without --cluster and --from")
    prices = {} if price is None else read_prices(price)
    check_writable(output, request.inputs)
    stops: list[Stop] = []

    def stop() -> Stop:
        stops.append(Stop(request.effort, request.time_limit, interruptible=True))
        return stops[-1]

    cache = None if no_cache else ResultCache.of_user()
    found: list[OnMachine] = []
    files: list[Path] = []
    for one in plan_machines(request, hardware, gpus, prices, cache, stop):
        found.append(one)
        if one.answer is None:
            continue
        if output is not None:
            name = f"{output.stem}.{Path(one.hardware).stem}.{one.gpus}{output.suffix}"
            files.append(output.with_name(name))
            atomic_write_text(files[-1], one.answer.plan_text())
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
