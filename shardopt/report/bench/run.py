"""The report of ``shardopt bench run``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from shardopt.api.document import PredictedPlan
from shardopt.api.json_object import JsonObject, key
from shardopt.bench.rows import BenchRows
from shardopt.bench.run import warmup_words
from shardopt.bench.summary import PlanSummary, reference_rounds, summaries
from shardopt.formatting import interval, number, percent, plural, times
from shardopt.report.blocks import Block, Heading, TextTable, View

BUSY_CORES = 0.15
"""Cores busy with other work that are worth a warning."""


class RunRow(JsonObject):
    """A measured plan."""

    plan: str = key("Path as given.")
    samples_ms: list[float] = key("Of rank 0, in the order measured.")
    median_ms: float
    p10_ms: float
    p90_ms: float
    rounds_ms: list[float] = key("Medians by round.")
    round_spread: float = key("Slowest round over the fastest, less one.")
    ranks_median_ms: list[float]
    stable: bool | None
    ratio: float | None = key("To the first plan; null for the first, as are the next two.")
    ratio_interval: tuple[float, float] | None = key("Null with fewer than 6 rounds, too.")
    significant: bool | None
    predicted_ms: float
    predicted_interval_ms: tuple[float, float]


class RunAnswer(JsonObject):
    """``shardopt bench run``."""

    model: Any = key("This and the next two as in the rows file.")
    settings: Any
    sessions: Any
    rounds: int
    rows: list[RunRow] = key("A plan each.")
    reference: dict[str, Any] = key(
        "Kernel -> ``rounds_ms`` and ``median_ms`` of fixed work timed in the same rounds."
    )
    other_cores: list[float | None] = key("Cores busy with something else, by round.")
    hardware: str = key("Profile that the predictions are from.")


def run_view(
    rows: BenchRows,
    paths: Mapping[str, str],
    predicted: Mapping[str, PredictedPlan],
    hardware: str,
) -> View:
    """``shardopt bench run``.

    Args:
        hardware: name of the profile that the predictions are from.
    """
    plans, reference = summaries(rows), reference_rounds(rows)
    answer = RunAnswer(
        model=rows.model,
        settings=rows.settings,
        sessions=rows.sessions,
        rounds=len(rows.rounds),
        rows=[_row(item, paths[item.name], predicted[item.name]) for item in plans],
        reference={
            kernel: {"median_ms": statistics.median(rounds), "rounds_ms": rounds}
            for kernel, rounds in reference.items()
        },
        other_cores=[r["other_cores"] for r in rows.rounds],
        hardware=hardware,
    )
    count = f"{plural(len(rows.rounds), 'round')} of {rows.settings['block']} iterations"
    link = rows.settings.get("link_gbit_s")
    over = rows.settings["backend"] + ("" if link is None else f" over {link:g} Gbit/s")
    several = len(plans) > 1
    columns = ["~plan", ">median", "<p10 – p90", ">rounds"]
    columns += [*([f"<vs {plans[0].name}"] if several else []), ">predicted", ">off by"]
    cells = [_cells(item, predicted[item.name], several=several) for item in plans]
    report: list[Block] = [
        Heading("Measured", f"ms per iteration on {over}, {count}"),
        TextTable(columns, cells),
        *run_words(rows, plans),
        f"Predictions use profile {hardware}, which was not fitted on these samples. Absolute "
        "times drift with the machine, so ratios are the fairer test.",
    ]
    return View(answer, report, report)


def _row(item: PlanSummary, path: str, predicted: PredictedPlan) -> RunRow:
    ratio, (low, high) = item.ratio, item.p10_p90_ms
    return RunRow(
        plan=path,
        samples_ms=item.samples_ms,
        median_ms=item.median_ms,
        p10_ms=low,
        p90_ms=high,
        rounds_ms=item.rounds_ms,
        round_spread=item.round_spread,
        ranks_median_ms=item.ranks_median_ms,
        stable=item.stable,
        ratio=ratio and ratio.value,
        ratio_interval=ratio and ratio.interval,
        significant=ratio and ratio.significant,
        predicted_ms=predicted.iteration_ms,
        predicted_interval_ms=predicted.interval_ms,
    )


def _cells(item: PlanSummary, prediction: PredictedPlan, *, several: bool) -> list[str]:
    cells = [item.name, number(item.median_ms), interval(item.p10_p90_ms)]
    cells.append(f"± {percent(item.round_spread / 2)}")
    ratio, value = item.ratio, prediction.iteration_ms
    if several and ratio is not None:
        shown = times(ratio.value) if ratio.significant else f"not significant ({ratio.value:.3f})"
        cells.append(shown)
    elif several:
        cells.append("")
    return [*cells, number(value), f"{100 * (value / item.median_ms - 1):+.0f} %"]


def run_words(rows: BenchRows, plans: list[PlanSummary]) -> list[str]:
    """Say how far to trust the measured table."""
    unstable = [item.name for item in plans if item.stable is False]
    notes = ["All samples are stable by pyperf's rules."]
    if unstable:
        notes = [
            f"Unstable by pyperf's rules (deviation above 10 %, or a sample 50 % off): "
            f"{', '.join(unstable)}. Medians are shown; an idle machine or more rounds would help."
        ]
    for i, session in enumerate(rows.sessions, start=1):
        load = f"load average before: {session['load']:.2f}"
        notes.append(f"Session {i}: {warmup_words(session['warmup'])}; {load}.")
    busy = [r["other_cores"] for r in rows.rounds if r["other_cores"] is not None]
    if max(busy, default=0.0) >= BUSY_CORES:
        notes.append(
            f"The machine was not idle: other work kept {statistics.median(busy):.2f} cores busy "
            f"in the median round and {max(busy):.2f} in the worst."
        )
    moved = {k: max(v) / min(v) - 1 for k, v in reference_rounds(rows).items()}
    parts = ", ".join(f"{k.replace('_', ' ')} {percent(v)}" for k, v in moved.items())
    notes.append(f"Reference kernels, slowest round against fastest: {parts}.")
    if len(rows.rounds) < 6:
        notes.append("With fewer than 6 rounds, no difference can be significant.")
    return notes
