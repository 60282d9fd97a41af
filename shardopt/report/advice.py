"""Advice: changes besides the plan."""

from __future__ import annotations

from collections.abc import Sequence

from search.prefer import TOLERANCE
from search.tune.advice import OtherMachine
from shardopt.api.document import AdviceKeys, Change, Considered, SingleChange
from shardopt.formatting import ms, number, percent, plural, rank_word
from shardopt.report.blocks import Block, Heading, Line, TextTable

SHOWN_NAMES = 3
"""Settings without a price that are named per reason."""
SHOWN_REASONS = 3
SAME = 5e-4
"""Change of GPU time per sample below which it counts as none, a fraction."""


def advice(answer: AdviceKeys, device: str, applied: Sequence[int] = ()) -> list[Block]:
    """List the changes that gain most per sample, what they take, and what other machines give.

    Args:
        device: ``cuda`` or ``cpu``, of the profile.
        applied: numbers of the changes, from 1, that a model file was written with.
    """
    considered = answer.advice_considered
    if considered is None:
        return []
    title = Heading("Advice", "what to change besides the plan, by time per sample")
    blocks: list[Block] = [title]
    word = rank_word(device)
    machines = [Line(_machine_words(other, word), "dim") for other in answer.other_machines]
    machines += _not_tried(considered)
    if not answer.advice:
        return [*blocks, none_saves(considered), *machines]
    rows = [
        (str(place), entry.label, *_cells(entry))
        for place, entry in enumerate(answer.advice, start=1)
    ]
    together = answer.together
    if together is not None:
        parts = [str(i) for i, a in enumerate(answer.advice, 1) if a.label in together.labels]
        rows.append(("", f"{', '.join(parts[:-1])} and {parts[-1]} together", *_cells(together)))
    grid = TextTable([">#", "~change", ">time per sample", ">ms", "~what it takes"], rows)
    written = " (the model file is written)" if applied else ""
    to_do = [f"To do {n}{written}: {answer.advice[n - 1].how}." for n in applied or (1,)]
    return [*blocks, grid, *to_do, *machines]


def none_saves(considered: Considered) -> str:
    """Say that no setting helps."""
    if not considered.tried:
        return "No setting was priced."
    tried = plural(considered.tried, "setting")
    return f"None of the {tried} tried saves {percent(TOLERANCE)} or more."


def _not_tried(considered: Considered) -> list[Line]:
    """The number of settings without a price, and the reasons that hold for most of them."""
    settings = considered.not_tried
    if not settings:
        return []
    reasons: dict[str, list[str]] = {}
    for setting in settings:
        reason, *_ = setting.why.splitlines()  # more of them list what `--json` has in full
        reasons.setdefault(reason, []).append(setting.name)
    words = [
        f"{', '.join(names[:SHOWN_NAMES])}{', ...' if len(names) > SHOWN_NAMES else ''} ({why})"
        for why, names in sorted(reasons.items(), key=lambda entry: -len(entry[1]))[:SHOWN_REASONS]
    ]
    if len(reasons) > SHOWN_REASONS:
        more = plural(len(reasons) - SHOWN_REASONS, "more reason")
        words.append(f"{more} in --json")
    count = f"{len(settings)} of {plural(len(settings) + considered.tried, 'setting')}"
    return [Line(f"{count} not tried: {'; '.join(words)}.", "dim")]


def advice_words(entry: SingleChange) -> str:
    """``index_dedup: true on t_item saves 28 % of the time per sample``."""
    return f"{entry.label} saves {percent(entry.gain)} of the time per sample"


def _cells(entry: Change) -> tuple[str, str, str]:
    again = () if entry.same_plan else ("another plan",)
    return f"-{percent(entry.gain)}", number(entry.iteration_ms), ", ".join((*entry.costs, *again))


def _machine_words(other: OtherMachine, rank: str) -> str:
    rate = f"{ms(other.iteration_ms)}, {1 / (1 - other.gain):.2f} times the samples per second"
    if other.name != "gpus":
        return f"With a network {other.value:g} times as fast: {rate}."
    more = other.gpu_time - 1
    word = "more" if more > 0 else "less"
    change = "the same" if abs(more) < SAME else f"{percent(abs(more))} {word}"
    return f"With {other.value} {rank}s: {rate}, {change} {rank} time per sample."
