"""The report of ``shardopt bench search``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardopt.api.document import PredictedPlan, Tables
from shardopt.api.json_object import JsonObject, key
from shardopt.bench.planners import COMMAND, SEARCH, TORCHREC, Comparison, PlannerResult
from shardopt.formatting import at_most, gap_of, ms, number, times, type_mix
from shardopt.measure.sampling import Samples
from shardopt.report.blocks import Block, Heading, TextTable, View
from shardopt.report.prediction import memory_title, memory_use, misfit_text

_WHAT = {
    SEARCH: "the search alone",
    COMMAND: "the whole command: start-up, reading the model, search, output",
    TORCHREC: "EmbeddingShardingPlanner alone, without imports and building the model",
}
_KEYS = {SEARCH: "shardopt_search", COMMAND: "shardopt_plan", TORCHREC: "torchrec_planner"}


class PlannerPlan(PredictedPlan):
    """Plan of a planner, predicted by shardopt."""

    fits: bool = key("By shardopt's count of memory.")
    sharding: str = key("Tables by type.")
    tables: Tables = key("As in a plan file.")
    lower_bound_ms: float | None = key("Of the search; only its plan has this.", default=None)
    gap: float | None = key("The same.", default=None)
    stopped_by: str | None = key("The same.", default=None)
    found_by: str | None = key("The same.", default=None)
    rating_ms: float | None = key("TorchRec's own cost of its plan.", default=None)


class PlannerTimes(JsonObject):
    """Seconds of a planner."""

    samples_s: list[float] = key("In the order measured.")
    median_s: float
    min_s: float
    max_s: float
    stable: bool | None = key("Null for a single sample.")


class PlannersAnswer(JsonObject):
    """``shardopt bench search``, without what names the setting."""

    times: dict[str, PlannerTimes] = key(
        "``shardopt_search``, ``shardopt_plan`` (the command in its own process), "
        "``torchrec_planner``."
    )
    start_up_s: float = key("The command's median beyond the search's.")
    ratio: float = key("TorchRec's median over that of ``shardopt_search``.")
    significant: bool | None = key("Their samples do not overlap; null for a single sample.")
    plans: dict[str, PlannerPlan | None] = key(
        "``shardopt`` and ``torchrec``; null where there is none."
    )
    machine: dict[str, Any] = key("Where it was measured.")


def planners_view(comparison: Comparison) -> View:
    """``shardopt bench search``."""
    result = comparison.result
    ours = _plan(
        comparison.ours,
        lower_bound_ms=result.lower_bound_ms,
        stopped_by=result.stopped_by,
        gap=gap_of(result.best.iteration_ms, result.lower_bound_ms),
        found_by=result.best.found_by,
    )
    plans = {"shardopt": ours, "torchrec": _plan(comparison.theirs, rating_ms=comparison.rating_ms)}
    answer = PlannersAnswer(
        times={_KEYS[name]: _times_of(samples) for name, samples in comparison.times.items()},
        start_up_s=_start_up(comparison),
        ratio=comparison.times[TORCHREC].median_s / comparison.times[SEARCH].median_s,
        significant=_significant(comparison),
        plans=plans,
        machine=comparison.machine,
    )
    return View(answer, [*_times(comparison), *_plans(comparison, plans)], _headlines(comparison))


def _times_of(samples: Samples) -> PlannerTimes:
    least, most = min(samples.seconds), max(samples.seconds)
    return PlannerTimes(
        samples_s=list(samples.seconds),
        median_s=samples.median_s,
        min_s=least,
        max_s=most,
        stable=samples.stable,
    )


def _plan(found: PlannerResult, **keys: Any) -> PlannerPlan | None:
    if found.plan is None or found.prediction is None:
        return None
    own = {"fits": found.fits, "sharding": type_mix(found.plan), "tables": found.plan}
    return PlannerPlan.of(found.plan, found.prediction, **own, **keys)


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
        TextTable(["<", ">s", "<min – max", "~what is timed"], rows),
        *notes,
    ]


def _plans(comparison: Comparison, plans: Mapping[str, PlannerPlan | None]) -> list[Block]:
    ours, theirs = plans["shardopt"], plans["torchrec"]
    rows = []
    for name, plan in plans.items():
        if plan is None or ours is None:
            rows.append((name, "-", "found no plan", "-", "-", "-"))
            continue
        rows.append(
            (
                name,
                number(plan.iteration_ms),
                "" if plan is ours else times(plan.iteration_ms / ours.iteration_ms),
                memory_use(plan.memory),
                "yes" if plan.fits else "no",
                plan.sharding,
            )
        )
    gap = gap_of(comparison.result.best.iteration_ms, comparison.result.lower_bound_ms)
    notes = [] if gap is None else [f"shardopt's plan is {at_most(gap)} from optimal."]
    if comparison.rating_ms is not None:
        notes.append(
            f"TorchRec rates its own plan at {number(comparison.rating_ms)} ms: the largest sum of "
            "shard costs on a rank, which is not an iteration time."
        )
    if theirs is not None and not theirs.fits:
        notes.append(f"TorchRec's plan {misfit_text(theirs)}.")
    kind = "memory GiB" if ours is None else memory_title(ours.memory)
    columns = ["<planner", ">ms", "<", f">{kind}", "<fits", "~sharding"]
    return [Heading("Plans", "both predicted by shardopt"), TextTable(columns, rows), *notes]
