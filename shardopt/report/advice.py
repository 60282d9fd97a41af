"""Advice: changes beside the plan."""

from __future__ import annotations

from typing import Any

from predictor.model.plan_json import plan_to_dict
from search.prefer import TOLERANCE
from search.tune.advice import Advice, Advised, OtherMachine
from shardopt.formatting import ms, number, percent, picked, plural, rank_word
from shardopt.report.blocks import Block, Grid, Heading, Line

SHOWN_NAMES = 3
"""Settings without a price that are named per reason."""
SHOWN_REASONS = 3


def advice(advised: Advised | None, device: str) -> list[Block]:
    """List the changes that gain most per sample, what they take, and what other machines give.

    Args:
        device: ``cuda`` or ``cpu``, of the profile.
    """
    if advised is None:
        return []
    blocks: list[Block] = [Heading("Advice", "what to change beside the plan, by time per sample")]
    machines = [Line(_machine_words(other, rank_word(device)), "dim") for other in advised.machines]
    machines += _not_tried(advised)
    if not advised.advice:
        return [*blocks, none_saves(advised), *machines]
    rows = [
        (str(place), entry.steps[0].label, *_cells(entry))
        for place, entry in enumerate(advised.advice, start=1)
    ]
    together = advised.together
    if together is not None:
        parts = [str(i) for i, a in enumerate(advised.advice, 1) if a.steps[0] in together.steps]
        rows.append(("", f"{', '.join(parts[:-1])} and {parts[-1]} together", *_cells(together)))
    grid = Grid([">#", "~change", ">time per sample", ">ms", "~what it takes"], rows)
    return [*blocks, grid, f"To do 1: {advised.advice[0].steps[0].how}.", *machines]


def none_saves(advised: Advised) -> str:
    """Say that no setting helps."""
    if not advised.tried:
        return "No setting was priced."
    tried = plural(advised.tried, "setting")
    return f"None of the {tried} tried saves {percent(TOLERANCE)} or more."


def _not_tried(advised: Advised) -> list[Line]:
    """The number of settings without a price, and the reasons that hold for most of them."""
    settings = advised.not_tried
    if not settings:
        return []
    reasons: dict[str, list[str]] = {}
    for setting in settings:
        reasons.setdefault(setting.why, []).append(setting.name)
    words = [
        f"{', '.join(names[:SHOWN_NAMES])}{', ...' if len(names) > SHOWN_NAMES else ''} ({why})"
        for why, names in sorted(reasons.items(), key=lambda entry: -len(entry[1]))[:SHOWN_REASONS]
    ]
    if len(reasons) > SHOWN_REASONS:
        more = plural(len(reasons) - SHOWN_REASONS, "more reason")
        words.append(f"{more} in --json")
    count = f"{len(settings)} of {plural(len(settings) + advised.tried, 'setting')}"
    return [Line(f"{count} not tried: {'; '.join(words)}.", "dim")]


def advice_words(entry: Advice) -> str:
    """``index_dedup: true on t_item saves 28 % of the time per sample``."""
    return f"{entry.steps[0].label} saves {percent(entry.gain)} of the time per sample"


def _cells(entry: Advice) -> tuple[str, str, str]:
    again = () if entry.same_plan else ("another plan",)
    return f"-{percent(entry.gain)}", number(entry.iteration_ms), ", ".join((*entry.costs, *again))


def _machine_words(other: OtherMachine, rank: str) -> str:
    rate = f"{ms(other.iteration_ms)}, {1 / (1 - other.gain):.2f} times the samples per second"
    if other.name != "gpus":
        return f"With a network {other.value:g} times as fast: {rate}."
    more = other.gpu_time - 1
    word = "more" if more > 0 else "less"
    return (
        f"With {other.value} {rank}s: {rate}, {percent(abs(more))} {word} {rank} time per sample."
    )


def advice_object(advised: Advised | None) -> dict[str, Any]:
    """Return the advice as ``plan --json`` and ``explain --json`` hold it.

    Keys:
        advice: best first: ``name`` of the setting, ``target`` (a table, or null for the model),
            ``value``, ``iteration_ms``, ``gain`` (share of the time per sample), ``costs``,
            ``how``, and ``same_plan`` (false: the time is of another plan, in ``tables``).
        together: null, or what several of them give: ``names``, ``targets``, ``values`` and the
            same keys.
        advice_considered: ``tried`` (number of settings that were predicted) and ``not_tried``,
            each with ``name`` and ``why``; null where no advice was asked for.
        other_machines: ``name`` (``gpus`` or ``network``, in times of its rate), ``value``,
            ``iteration_ms`` of the plan placed again, ``gain`` (as above, of the whole job) and
            ``gpu_time`` (of a sample, as a multiple).
    """
    considered = advised and {
        "tried": advised.tried,
        "not_tried": [vars(entry) for entry in advised.not_tried],
    }
    advised = advised or Advised()
    together = advised.together
    return {
        "advice": [
            {**picked(entry.steps[0], "name", "target", "value", "how"), **_result(entry)}
            for entry in advised.advice
        ],
        "together": together
        and {
            "names": [step.name for step in together.steps],
            "targets": [step.target for step in together.steps],
            "values": [step.value for step in together.steps],
            **_result(together),
        },
        "advice_considered": considered,
        "other_machines": [vars(other) for other in advised.machines],
    }


def _result(entry: Advice) -> dict[str, Any]:
    tables = {} if entry.same_plan else {"tables": plan_to_dict(entry.plan)["tables"]}
    return {**picked(entry, "iteration_ms", "gain", "costs", "same_plan"), **tables}
