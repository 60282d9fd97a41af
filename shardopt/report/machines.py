"""Several machines side by side, for the console and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from shardopt.api.machines import OnMachine
from shardopt.formatting import gap_of, hbm_use, memory_use, number, percent
from shardopt.report.console import heading, line, show, table
from shardopt.report.objects import tables_object


def show_machines(console: Console, found: Sequence[OnMachine], files: Sequence[Path]) -> None:
    """A row for each machine, in the order given; machines without a plan below."""
    heading(console, "Machines", "the best plan found on each, predicted")
    priced = any(one.price is not None for one in found)
    columns = ("~hardware", ">GPUs", ">ms", ">samples/s", ">a GPU", ">HBM GiB", ">gap", "<bound by")
    made = table(*columns, *[">per 10^6 samples"] * priced)
    for one in found:
        made.add_row(*_cells(one), *[_price(one)] * priced)
    show(console, made)
    for one in found:
        if one.answer is None:
            line(console, f"{one.hardware} with {one.gpus} GPUs: {one.lacks}.", style="yellow")
    if files:
        line(console, f"Plans are written to {', '.join(map(str, files))}.")


def _cells(one: OnMachine) -> tuple[str, ...]:
    if one.answer is None or one.samples_per_s is None:
        return one.hardware, str(one.gpus), "no plan fits", *[""] * 5
    best = one.answer.best
    gap = gap_of(best.iteration_ms, one.answer.result.lower_bound_ms)
    return (
        one.hardware,
        str(one.gpus),
        number(best.iteration_ms),
        f"{one.samples_per_s:,.0f}",
        f"{one.samples_per_s / one.gpus:,.0f}",
        hbm_use(best.memory),
        "?" if gap is None else percent(gap),
        one.bound_by or "",
    )


def _price(one: OnMachine) -> str:
    price = one.price_per_million
    return "?" if price is None else f"{price:.3g}"


def machines_object(found: Sequence[OnMachine], files: Sequence[Path]) -> dict[str, Any]:
    """``shardopt plan --json`` where several machines are named.

    Keys of each of ``machines``, in the order given; all but the first two are null where no plan
    fits:
        hardware, gpus: the machine.
        iteration_ms, interval_ms, gap: of the best plan, as of one machine.
        samples_per_s, samples_per_s_per_gpu: of all ranks, and of one.
        hbm_bytes: what the fullest rank reserves at its peak.
        bound_by: what takes most of the iteration.
        price_per_million_samples: null too where no price is known.
        tables: of the best plan, as in plan.json.
        no_plan: why none fits, else null.
    """
    return {
        "machines": [_object(one) for one in found],
        "files": [str(path) for path in files],
    }


def _object(one: OnMachine) -> dict[str, Any]:
    answer, rate = one.answer, one.samples_per_s
    best = None if answer is None else answer.best
    result = None if answer is None else answer.result
    return {
        "hardware": one.hardware,
        "gpus": one.gpus,
        "iteration_ms": best and best.iteration_ms,
        "interval_ms": best and list(best.interval_ms),
        "gap": best and result and gap_of(best.iteration_ms, result.lower_bound_ms),
        "samples_per_s": rate,
        "samples_per_s_per_gpu": rate and rate / one.gpus,
        "hbm_bytes": best and max(memory_use(rank)[0] for rank in best.memory),
        "bound_by": one.bound_by,
        "price_per_million_samples": one.price_per_million,
        "tables": result and tables_object(result.best.plan),
        "no_plan": one.lacks or None,
    }
