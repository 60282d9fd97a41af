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


def machines_view(found: Sequence[OnMachine], files: Sequence[Path]) -> View:
    """A row for each machine, in the order given; machines without a plan below.

    Keys of each of ``machines``; all but the first two and the last are null where no plan fits:
        hardware, gpus: the machine.
        iteration_ms, interval_ms, gap: of the best plan, as of one machine.
        samples_per_s, samples_per_s_per_gpu: of all ranks, and of one.
        hbm_bytes: what the fullest rank reserves at its peak.
        bound_by: what takes most of the iteration.
        price_per_million_samples: in the currency of the prices; null too where none is known.
        tables: of the best plan, as in plan.json.
        advice, together, advice_considered, other_machines: `advice_object`.
        constraint_costs, unconstrained: `constraints_object`.
        no_plan: why none fits, else null.
    """
    objects = [_object(one) for one in found]
    answers = [one.answer for one in found if one.answer is not None]
    words = {rank_word(answer.setting.hardware.device) for answer in answers}
    word = "GPU" if words == {"GPU"} else "rank"
    kind = memory_title([rank for answer in answers for rank in answer.best.memory])
    columns = ["~hardware", f">{word}s", ">ms", ">samples/s", f">a {word}", f">{kind}", ">gap"]
    columns.append("<bound by")
    priced = any(one.price is not None for one in found)
    rows = [_cells(one.answer, of) for one, of in zip(found, objects, strict=True)]
    report: list[Block] = [
        Heading("Machines", "the best plan found on each, predicted"),
        Grid([*columns, ">per 10^6 samples"][: 8 + priced], [row[: 8 + priced] for row in rows]),
        *(
            warning(f"{one.hardware} with {one.gpus} {word}s: {one.lacks}.")
            for one in found
            if one.answer is None
        ),
        *(
            f"{one.hardware} with {one.gpus} {word}s: {advice_words(one.answer.advised.advice[0])}."
            for one in found
            if one.answer is not None and one.answer.advised and one.answer.advised.advice
        ),
        *(
            f"{one.hardware} with {one.gpus} {word}s: {words}"
            for one in found
            if one.answer is not None
            for words in constraints_words(one.answer.constraint_costs)
        ),
        *([f"Plans are written to {', '.join(map(str, files))}."] if files else []),
    ]
    notes = dict.fromkeys(note for answer in answers for note in answer.setting.notes)
    data = {"machines": objects, "files": [str(path) for path in files]}
    return View(data, report, report, [*notes])


def _cells(answer: Answer | None, of: dict[str, Any]) -> list[str]:
    if answer is None:
        return [of["hardware"], str(of["gpus"]), "no plan fits", *[""] * 6]
    price = of["price_per_million_samples"]
    return [
        of["hardware"],
        str(of["gpus"]),
        number(of["iteration_ms"]),
        f"{of['samples_per_s']:,.0f}",
        f"{of['samples_per_s_per_gpu']:,.0f}",
        hbm_use(answer.best.memory),
        "?" if of["gap"] is None else percent(of["gap"]),
        of["bound_by"],
        "?" if price is None else f"{price:.3g}",
    ]


def _object(one: OnMachine) -> dict[str, Any]:
    keys = ("iteration_ms", "interval_ms", "gap", "samples_per_s", "samples_per_s_per_gpu")
    more = ("hbm_bytes", "bound_by", "price_per_million_samples", "tables", *advice_object(None))
    more += (*constraints_object(None),)
    found = {"hardware": one.hardware, "gpus": one.gpus, **dict.fromkeys((*keys, *more))}
    if one.answer is None:
        return {**found, "no_plan": one.lacks}
    best, result = one.answer.best, one.answer.result
    samples = one.answer.setting.workload.batch_size
    rate = 1e3 * samples / best.iteration_ms
    parts: dict[str, float] = {}
    for phase, ms in best.breakdown.items():
        part = PARTS.get(phase, phase.replace("_", " "))
        parts[part] = parts.get(part, 0.0) + ms
    price = None
    if one.price is not None:
        price = 1e6 * one.price * best.iteration_ms / MS_PER_HOUR / samples
    return {
        **found,
        **picked(best, "iteration_ms", "interval_ms"),
        "gap": gap_of(best.iteration_ms, result.lower_bound_ms),
        "samples_per_s": rate * one.gpus,
        "samples_per_s_per_gpu": rate,
        "hbm_bytes": max(memory_use(rank)[0] for rank in best.memory),
        "bound_by": max(parts, key=lambda part: parts[part]),
        "price_per_million_samples": price,
        "tables": tables_object(result.best.plan),
        **advice_object(one.answer.advised),
        **constraints_object(one.answer.constraint_costs),
        "no_plan": None,
    }
