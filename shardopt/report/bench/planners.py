"""The report of ``shardopt bench search``."""

from __future__ import annotations

from typing import Any

from shardopt.bench.planners import COMMAND, SEARCH, TORCHREC, Answer, Comparison
from shardopt.formatting import (
    at_most,
    gap_of,
    hbm_use,
    memory_title,
    ms,
    number,
    picked,
    times,
    type_mix,
)
from shardopt.measure.sampling import Samples
from shardopt.report.blocks import Block, Grid, Heading, View
from shardopt.report.prediction import misfit_text, prediction_object, tables_object

_WHAT = {
    SEARCH: "the search alone",
    COMMAND: "the whole command: start-up, reading the model, search, output",
    TORCHREC: "EmbeddingShardingPlanner alone, without imports and building the model",
}
_KEYS = {SEARCH: "shardopt_search", COMMAND: "shardopt_plan", TORCHREC: "torchrec_planner"}


def planners_view(comparison: Comparison) -> View:
    """``shardopt bench search``, without what names the setting.

    Keys:
        times: ``shardopt_search``, ``shardopt_plan`` (the command in its own process) and
            ``torchrec_planner`` -> ``samples_s`` in the order measured, ``median_s``, ``min_s``,
            ``max_s``, ``stable`` (null for a single sample).
        start_up_s: the command's median beyond the search's.
        ratio: TorchRec's median over that of ``shardopt_search``; ``significant`` tells whether
            the samples of the two do not overlap (null for a single sample).
        plans: ``shardopt`` and ``torchrec`` -> what a prediction holds, ``fits`` (by shardopt's
            count of memory), ``sharding`` and ``tables`` as in a plan file; null where TorchRec
            found none. ``shardopt`` has ``lower_bound_ms``, ``gap``, ``stopped_by``, ``found_by``;
            ``torchrec`` has ``rating_ms``, its own cost of its plan.
        machine: where it was measured.
    """
    result = comparison.result
    ours, theirs = _answer_object(comparison.ours), _answer_object(comparison.theirs)
    if ours is not None:
        ours |= {
            **picked(result, "lower_bound_ms", "stopped_by"),
            "gap": gap_of(result.best.iteration_ms, result.lower_bound_ms),
            "found_by": result.best.found_by,
        }
    data = {
        "times": {_KEYS[name]: _samples_object(s) for name, s in comparison.times.items()},
        "start_up_s": _start_up(comparison),
        "ratio": comparison.times[TORCHREC].median_s / comparison.times[SEARCH].median_s,
        "significant": _significant(comparison),
        "plans": {
            "shardopt": ours,
            "torchrec": theirs and {**theirs, "rating_ms": comparison.rating_ms},
        },
        "machine": comparison.machine,
    }
    return View(data, [*_times(comparison), *_plans(comparison)], _headlines(comparison))


def _samples_object(samples: Samples) -> dict[str, Any]:
    return {
        "samples_s": list(samples.seconds),
        "median_s": samples.median_s,
        "min_s": min(samples.seconds),
        "max_s": max(samples.seconds),
        "stable": samples.stable,
    }


def _answer_object(answer: Answer) -> dict[str, Any] | None:
    if answer.plan is None or answer.prediction is None:
        return None
    return {
        **prediction_object(answer.prediction),
        "fits": answer.fits,
        "sharding": type_mix(answer.plan),
        "tables": tables_object(answer.plan),
    }


def _start_up(comparison: Comparison) -> float:
    return comparison.times[COMMAND].median_s - comparison.times[SEARCH].median_s


def _significant(comparison: Comparison) -> bool | None:
    ours, theirs = comparison.times[SEARCH], comparison.times[TORCHREC]
    return None if len(ours.seconds) < 2 else not ours.overlaps(theirs)


def _headlines(comparison: Comparison) -> list[Block]:
    """The report under ``--quiet``: one line per planner."""
    lines: list[Block] = []
    for name, timed, answer in (
        ("shardopt", SEARCH, comparison.ours),
        ("torchrec", TORCHREC, comparison.theirs),
    ):
        prediction = answer.prediction
        plan = "no plan" if prediction is None else f"{ms(prediction.iteration_ms)} per iteration"
        doubt = ", which does not fit" if answer.fits is False else ""
        lines.append(f"{name}: planned in {comparison.times[timed].median_s:.2f} s; {plan}{doubt}")
    return lines


def _times(comparison: Comparison) -> list[Block]:
    """Show the seconds of each planner, their ratio, and how far to trust them."""
    rounds = len(comparison.times[SEARCH].seconds)
    aside = f"median of {rounds} interleaved runs"
    rows = [
        (
            name,
            f"{samples.median_s:.2f}",
            f"{min(samples.seconds):.2f} – {max(samples.seconds):.2f}",
            _WHAT[name],
        )
        for name, samples in comparison.times.items()
    ]
    ratio = times(comparison.times[SEARCH].median_s / comparison.times[TORCHREC].median_s)
    faster = "as fast as" if ratio == "same" else f"{ratio} than"
    doubt = " (their samples overlap: not significant)" if _significant(comparison) is False else ""
    lost = rounds > 1 and comparison.times[COMMAND].overlaps(comparison.times[SEARCH])
    start_up = "less than the spread" if lost else f"{_start_up(comparison):.2f} s"
    unstable = [name for name, samples in comparison.times.items() if samples.stable is False]
    load = comparison.machine["load_average"]
    notes = [
        f"The search is {faster} TorchRec's planner{doubt}; starting the command and writing its "
        f"result adds {start_up}."
    ]
    if unstable:
        notes.append(
            f"Unstable: the samples of {', '.join(unstable)} vary widely; measure on an idle "
            "machine, or repeat more often."
        )
    if isinstance(load, list):
        notes.append(f"Load average before: {load[0]:.2f} on {comparison.machine['cores']} cores.")
    return [
        Heading("Plan time", aside if rounds > 1 else "one sample, so the spread is unknown"),
        Grid(["<", ">s", "<min – max", "~what is timed"], rows),
        *notes,
    ]


def _plans(comparison: Comparison) -> list[Block]:
    rows = []
    best = comparison.ours.prediction
    for name, answer in (("shardopt", comparison.ours), ("torchrec", comparison.theirs)):
        prediction = answer.prediction
        if answer.plan is None or prediction is None or best is None:
            rows.append((name, "-", "found no plan", "-", "-", "-"))
            continue
        ratio = times(prediction.iteration_ms / best.iteration_ms)
        rows.append(
            (
                name,
                number(prediction.iteration_ms),
                "" if answer is comparison.ours else ratio,
                hbm_use(prediction.memory),
                "yes" if answer.fits else "no",
                type_mix(answer.plan),
            )
        )
    gap = gap_of(comparison.result.best.iteration_ms, comparison.result.lower_bound_ms)
    notes = [] if gap is None else [f"shardopt's plan is {at_most(gap)} from optimal."]
    if comparison.rating_ms is not None:
        notes.append(
            f"TorchRec rates its own plan at {number(comparison.rating_ms)} ms: the largest sum of "
            "shard costs on a rank, which is not an iteration time."
        )
    if comparison.theirs.prediction is not None and not comparison.theirs.fits:
        notes.append(f"TorchRec's plan {misfit_text(comparison.theirs.prediction)}.")
    kind = (
        "memory GiB"
        if comparison.ours.prediction is None
        else memory_title(comparison.ours.prediction.memory)
    )
    columns = ["<planner", ">ms", "<", f">{kind}", "<fits", "~sharding"]
    return [Heading("Plans", "both predicted by shardopt"), Grid(columns, rows), *notes]
