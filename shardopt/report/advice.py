"""What to change beside the plan, for the console and JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from predictor.model.plan_json import plan_to_dict
from search.tune.advice import Advice, Advised, OtherMachine
from search.tune.knobs import Step
from shardopt.formatting import ms, number, percent, plural
from shardopt.report.console import heading, line, show, table


def show_advice(console: Console, advised: Advised | None, before_ms: float) -> None:
    """What gains most per sample, with what it takes, and what other machines would give.

    Args:
        before_ms: of the best plan as it is.
    """
    if advised is None:
        return
    heading(console, "Advice", "settings outside the plan, by time per sample")
    if not advised.advice:
        tried = plural(advised.tried, "setting")
        line(console, f"  None of {tried} tried gains more than plans that tie may differ.")
    else:
        made = table(">#", "~change", ">time per sample", ">ms", "~costs")
        for place, one in enumerate(advised.advice, start=1):
            (step,) = one.steps
            made.add_row(str(place), step_words(step), *_cells(one))
        if advised.together is not None:
            numbers = [i for i, one in enumerate(advised.advice, 1) if _is_in(one, advised)]
            names = f"{' and '.join(map(str, numbers))} together"
            made.add_row("", names, *_cells(advised.together))
        show(console, made)
        line(console, f"  Now {ms(before_ms)}. To do 1: {advised.advice[0].steps[0].how}.")
    for other in advised.machines:
        line(console, f"  {_machine_words(other)}", style="dim")


def _is_in(one: Advice, advised: Advised) -> bool:
    return advised.together is not None and one.steps[0] in advised.together.steps


def step_words(step: Step) -> str:
    """``index_dedup: true on t_item``."""
    value = str(step.value).lower() if isinstance(step.value, bool) else f"{step.value}"
    return f"{step.name}: {value}" + (f" on {step.target}" if step.target is not None else "")


def _cells(one: Advice) -> tuple[str, str, str]:
    again = () if one.same_plan else ("another plan",)
    return f"-{percent(one.gain)}", number(one.iteration_ms), ", ".join((*one.costs, *again))


def _machine_words(other: OtherMachine) -> str:
    what = f"{other.value} GPUs" if other.name == "gpus" else f"{other.value:g} x the network"
    job = f"{1 - other.gain:.2f} x the time per sample"
    words = f"With {what}, plan 1 placed again: {ms(other.iteration_ms)}, {job}"
    return f"{words}, {other.gpu_time:.2f} x the GPU time." if other.name == "gpus" else f"{words}."


def advice_object(advised: Advised | None) -> dict[str, Any]:
    """What ``plan --json`` and ``explain --json`` hold of the advisor.

    Keys:
        advice: best first: ``name`` of the setting, ``target`` (a table, or null for the model),
            ``value``, ``iteration_ms``, ``gain`` (share of the time per sample), ``costs``,
            ``how``, and ``same_plan`` (false: the time is of another plan, in ``tables``).
        together: null, or what several of them give: ``names``, ``targets``, ``values`` and the
            same keys.
        other_machines: ``name`` (``gpus`` or ``network``, in times of its rate), ``value``,
            ``iteration_ms`` of the plan placed again, ``gain`` (as above, of the whole job) and
            ``gpu_time`` (of a sample, as a multiple).
    """
    advised = advised or Advised()
    together = advised.together
    return {
        "advice": [
            {
                "name": one.steps[0].name,
                "target": one.steps[0].target,
                "value": one.steps[0].value,
                **_result(one),
                "how": one.steps[0].how,
            }
            for one in advised.advice
        ],
        "together": together
        and {
            "names": [step.name for step in together.steps],
            "targets": [step.target for step in together.steps],
            "values": [step.value for step in together.steps],
            **_result(together),
        },
        "other_machines": [vars(other) for other in advised.machines],
    }


def _result(one: Advice) -> dict[str, Any]:
    tables = {} if one.same_plan else {"tables": plan_to_dict(one.plan)["tables"]}
    return {
        "iteration_ms": one.iteration_ms,
        "gain": one.gain,
        "costs": list(one.costs),
        "same_plan": one.same_plan,
        **tables,
    }
