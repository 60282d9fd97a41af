"""Several machines side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardopt.api.answer import Answer
from shardopt.api.machines import OnMachine
from shardopt.formatting import (
    gap_of,
    hbm_use,
    memory_title,
    memory_use,
    number,
    percent,
    picked,
    rank_word,
)
from shardopt.report.advice import advice_object, advice_words
from shardopt.report.blocks import Block, Grid, Heading, View, warning
from shardopt.report.constraints import constraints_object, constraints_words
from shardopt.report.prediction import tables_object

MS_PER_HOUR = 3.6e6
PARTS = {
    "embedding_forward": "lookups",
    "embedding_backward": "lookups",
    "prefetch": "lookups",
    "input_dist": "communication",
    "output_dist_forward": "communication",
    "output_dist_backward": "communication",
    "all_reduce": "communication",
    "dense_forward": "dense part",
    "dense_backward": "dense part",
    "optimizer": "dense part",
}
"""Phase of a breakdown -> the part of a machine that is short; others by their own names."""


def machines_view(machines: Sequence[OnMachine], files: Sequence[Path]) -> View:
    """A row for each machine, in the order given; machines without a plan below.

    Keys of each of ``machines``; all but the first two and the last are null where no plan fits:
        hardware, gpus: the machine.
        iteration_ms, interval_ms, gap: of the best plan, as of one machine.
        samples_per_s, samples_per_s_per_gpu: of all ranks, and of one.
        hbm_bytes: reserved by the fullest rank at its peak.
        bound_by: the part that takes most of the iteration.
        price_per_million_samples: in the currency of the prices; null too where none is known.
        tables: of the best plan, as in plan.json.
        advice, together, advice_considered, other_machines: `advice_object`.
        constraint_costs, unconstrained: `constraints_object`.
        no_plan: why none fits, else null.
    """
    objects = [_object(machine) for machine in machines]
    answers = [machine.answer for machine in machines if machine.answer is not None]
    words = {rank_word(answer.setting.hardware.device) for answer in answers}
    word = "GPU" if words == {"GPU"} else "rank"
    kind = memory_title([rank for answer in answers for rank in answer.best.memory])
    columns = ["~hardware", f">{word}s", ">ms", ">samples/s", f">a {word}", f">{kind}", ">gap"]
    columns.append("<bound by")
    priced = any(machine.price is not None for machine in machines)
    rows = [_cells(machine.answer, cells) for machine, cells in zip(machines, objects, strict=True)]
    report: list[Block] = [
        Heading("Machines", "the best plan found on each, predicted"),
        Grid([*columns, ">per 10^6 samples"][: 8 + priced], [row[: 8 + priced] for row in rows]),
        *(
            warning(f"{machine.hardware} with {machine.gpus} {word}s: {machine.lacks}.")
            for machine in machines
            if machine.answer is None
        ),
        *(
            f"{machine.hardware} with {machine.gpus} {word}s: {advice_words(advised.advice[0])}."
            for machine in machines
            for advised in (machine.answer and machine.answer.advised,)
            if advised and advised.advice
        ),
        *(
            f"{machine.hardware} with {machine.gpus} {word}s: {words}"
            for machine in machines
            if machine.answer is not None
            for words in constraints_words(machine.answer.constraint_costs)
        ),
        *([f"Plans are written to {', '.join(map(str, files))}."] if files else []),
    ]
    notes = dict.fromkeys(note for answer in answers for note in answer.setting.notes)
    data = {"machines": objects, "files": [str(path) for path in files]}
    return View(data, report, report, [*notes])


def _cells(answer: Answer | None, row: dict[str, Any]) -> list[str]:
    if answer is None:
        return [row["hardware"], str(row["gpus"]), "no plan fits", *[""] * 6]
    price = row["price_per_million_samples"]
    return [
        row["hardware"],
        str(row["gpus"]),
        number(row["iteration_ms"]),
        f"{row['samples_per_s']:,.0f}",
        f"{row['samples_per_s_per_gpu']:,.0f}",
        hbm_use(answer.best.memory),
        "?" if row["gap"] is None else percent(row["gap"]),
        row["bound_by"],
        "?" if price is None else f"{price:.3g}",
    ]


def _object(machine: OnMachine) -> dict[str, Any]:
    keys = ("iteration_ms", "interval_ms", "gap", "samples_per_s", "samples_per_s_per_gpu")
    more = ("hbm_bytes", "bound_by", "price_per_million_samples", "tables", *advice_object(None))
    more += (*constraints_object(None),)
    base = {"hardware": machine.hardware, "gpus": machine.gpus, **dict.fromkeys((*keys, *more))}
    if machine.answer is None:
        return {**base, "no_plan": machine.lacks}
    best, result = machine.answer.best, machine.answer.result
    samples = machine.answer.setting.workload.batch_size
    rate = 1e3 * samples / best.iteration_ms
    parts: dict[str, float] = {}
    for phase, ms in best.breakdown.items():
        part = PARTS.get(phase, phase.replace("_", " "))
        parts[part] = parts.get(part, 0.0) + ms
    price = None
    if machine.price is not None:
        price = 1e6 * machine.price * best.iteration_ms / MS_PER_HOUR / samples
    return {
        **base,
        **picked(best, "iteration_ms", "interval_ms"),
        "gap": gap_of(best.iteration_ms, result.lower_bound_ms),
        "samples_per_s": rate * machine.gpus,
        "samples_per_s_per_gpu": rate,
        "hbm_bytes": max(memory_use(rank)[0] for rank in best.memory),
        "bound_by": max(parts, key=lambda part: parts[part]),
        "price_per_million_samples": price,
        "tables": tables_object(result.best.plan),
        **advice_object(machine.answer.advised),
        **constraints_object(machine.answer.constraint_costs),
        "no_plan": None,
    }
