"""The report of ``shardopt bench run``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from predictor.predict import Prediction
from shardopt.bench.rows import BenchRows
from shardopt.bench.run import warmup_words
from shardopt.bench.summary import PlanSummary, reference_rounds, summaries
from shardopt.formatting import interval, number, percent, picked, plural, times
from shardopt.report.blocks import Block, Grid, Heading, View

BUSY_CORES = 0.15
"""Cores busy with other work that are worth a warning."""


def run_view(
    rows: BenchRows,
    paths: Mapping[str, str],
    predicted: Mapping[str, Prediction],
    hardware: str,
) -> View:
    """``shardopt bench run``.

    Args:
        hardware: name of the profile that the predictions are from.

    Keys:
        rows: a plan each: ``plan`` (the path as given), ``samples_ms`` (rank 0's, in the order
            measured), ``median_ms``, ``p10_ms``, ``p90_ms``, ``rounds_ms`` (medians),
            ``round_spread`` (slowest round over fastest - 1), ``ranks_median_ms``, ``stable``,
            ``ratio`` to the first plan, ``ratio_interval``, ``significant`` (all three null for
            the first; the interval also with fewer than 6 rounds), ``predicted_ms``,
            ``predicted_interval_ms``.
        reference: kernel -> ``rounds_ms``, ``median_ms``: fixed work timed in the same rounds.
        other_cores: by round, how many cores were busy with something else (or null).
        model, settings, sessions: as in the rows file.
        hardware: as given.
    """
    plans, reference = summaries(rows), reference_rounds(rows)
    data = {
        **picked(rows, "model", "settings", "sessions"),
        "rounds": len(rows.rounds),
        "rows": [_row(item, paths[item.name], predicted[item.name]) for item in plans],
        "reference": {
            kernel: {"median_ms": statistics.median(rounds), "rounds_ms": rounds}
            for kernel, rounds in reference.items()
        },
        "other_cores": [r["other_cores"] for r in rows.rounds],
        "hardware": hardware,
    }
    count = f"{plural(len(rows.rounds), 'round')} of {rows.settings['block']} iterations"
    link = rows.settings.get("link_gbit_s")
    over = rows.settings["backend"] + ("" if link is None else f" over {link:g} Gbit/s")
    several = len(plans) > 1
    columns = ["~plan", ">median", "<p10 – p90", ">rounds"]
    columns += [*([f"<vs {plans[0].name}"] if several else []), ">predicted", ">off by"]
    cells = [_cells(item, predicted[item.name], several=several) for item in plans]
    report: list[Block] = [
        Heading("Measured", f"ms per iteration on {over}, {count}"),
        Grid(columns, cells),
        *run_words(rows, plans),
        f"Predictions use profile {hardware}, which was not fitted on these samples. Absolute "
        "times drift with the machine, so ratios are the fairer test.",
    ]
    return View(data, report, report)


def _row(item: PlanSummary, path: str, prediction: Prediction) -> dict[str, Any]:
    ratio, (low, high) = item.ratio, item.p10_p90_ms
    return {
        "plan": path,
        **picked(item, "samples_ms", "median_ms"),
        "p10_ms": low,
        "p90_ms": high,
        **picked(item, "rounds_ms", "round_spread", "ranks_median_ms", "stable"),
        "ratio": ratio and ratio.value,
        "ratio_interval": list(ratio.interval) if ratio and ratio.interval else None,
        "significant": ratio and ratio.significant,
        "predicted_ms": prediction.iteration_ms,
        "predicted_interval_ms": list(prediction.interval_ms),
    }


def _cells(item: PlanSummary, prediction: Prediction, *, several: bool) -> list[str]:
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
