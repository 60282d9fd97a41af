"""Several machines side by side."""

from __future__ import annotations

from shardopt.api.document import MachineAnswer, MachinesAnswer, PlanAnswer
from shardopt.formatting import number, percent, rank_word
from shardopt.report.advice import advice_words
from shardopt.report.blocks import Block, Heading, TextTable, View, warning
from shardopt.report.constraints import constraints_words
from shardopt.report.prediction import memory_title, memory_use


def machines_view(answer: MachinesAnswer) -> View:
    """A row for each machine, in the order given; machines without a plan below."""
    machines = answer.machines
    plans = [machine.plan for machine in machines if machine.plan is not None]
    words = {rank_word(plan.device) for plan in plans}
    word = "GPU" if words == {"GPU"} else "rank"
    kind = memory_title([rank for plan in plans for rank in plan.best.memory])
    columns = ["~hardware", f">{word}s", ">ms", ">samples/s", f">a {word}", f">{kind}", ">gap"]
    columns.append("<bound by")
    if any(machine.price_per_million_samples is not None for machine in machines):
        columns.append(">per 10^6 samples")
    rows = [_cells(machine, machine.plan)[: len(columns)] for machine in machines]
    report: list[Block] = [
        Heading("Machines", "the best plan found on each, predicted"),
        TextTable(columns, rows),
        *(
            warning(f"{machine.hardware} with {machine.gpus} {word}s: {machine.no_plan}.")
            for machine in machines
            if machine.no_plan is not None
        ),
        *(
            f"{machine.hardware} with {machine.gpus} {word}s: {advice_words(machine.advice[0])}."
            for machine in machines
            if machine.advice
        ),
        *(
            f"{machine.hardware} with {machine.gpus} {word}s: {words}"
            for machine in machines
            if machine.plan is not None
            for words in constraints_words(machine.plan)
        ),
        *([f"Plans are written to {', '.join(answer.files)}."] if answer.files else []),
    ]
    notes = dict.fromkeys(note for plan in plans for note in plan.notes)
    return View(answer, report, report, [*notes])


def _cells(machine: MachineAnswer, plan: PlanAnswer | None) -> list[str]:
    start = [machine.hardware, str(machine.gpus)]
    if plan is None:
        return [*start, "no plan fits", *[""] * 6]
    price = machine.price_per_million_samples
    return [
        *start,
        number(plan.iteration_ms),
        f"{machine.samples_per_s:,.0f}",
        f"{machine.samples_per_s_per_gpu:,.0f}",
        memory_use(plan.best.memory),
        "?" if plan.gap is None else percent(plan.gap),
        machine.bound_by or "",
        "?" if price is None else f"{price:.3g}",
    ]
