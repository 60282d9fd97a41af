"""The report of ``shardopt bench search``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from predictor.model.plan_json import plan_to_dict
from shardopt.bench.planners import COMMAND, SEARCH, TORCHREC, Answer, Comparison
from shardopt.formatting import at_most, gap_of, hbm_use, ms, number, times, type_mix
from shardopt.measure.sampling import Samples
from shardopt.report.console import heading, line, show, table
from shardopt.report.objects import prediction_object
from shardopt.report.prediction import misfit_text

_WHAT = {
    SEARCH: "the search alone",
    COMMAND: "the whole command: start-up, reading the model, search, output",
    TORCHREC: "EmbeddingShardingPlanner alone, without imports and building the model",
}
_KEYS = {SEARCH: "shardopt_search", COMMAND: "shardopt_plan", TORCHREC: "torchrec_planner"}


def bench_object(found: Comparison) -> dict[str, Any]:
    """``shardopt bench search --json``, without what names the setting.

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
    bound = found.result.lower_bound_ms
    ours, theirs = _answer_object(found.ours), _answer_object(found.theirs)
    best = found.result.best
    return {
        "times": {_KEYS[name]: _samples_object(s) for name, s in found.times.items()},
        "start_up_s": _start_up(found),
        "ratio": found.times[TORCHREC].median_s / found.times[SEARCH].median_s,
        "significant": _significant(found),
        "plans": {
            "shardopt": ours
            and {
                **ours,
                "lower_bound_ms": bound,
                "gap": gap_of(best.iteration_ms, bound),
                "stopped_by": found.result.stopped_by,
                "found_by": best.found_by,
            },
            "torchrec": theirs and {**theirs, "rating_ms": found.rating_ms},
        },
        "machine": found.machine,
    }


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
        "tables": plan_to_dict(answer.plan)["tables"],
    }


def _start_up(found: Comparison) -> float:
    return found.times[COMMAND].median_s - found.times[SEARCH].median_s


def _significant(found: Comparison) -> bool | None:
    ours, theirs = found.times[SEARCH], found.times[TORCHREC]
    if len(ours.seconds) < 2:
        return None
    return not ours.overlaps(theirs)


def show_bench(console: Console, found: Comparison) -> None:
    """The whole report, below the setting."""
    show_times(console, found)
    show_plans(console, found)


def show_headline(console: Console, found: Comparison) -> None:
    """The report under ``--quiet``: one line per planner."""
    names = {"shardopt": (SEARCH, found.ours), "torchrec": (TORCHREC, found.theirs)}
    for name, (timed, answer) in names.items():
        prediction = answer.prediction
        plan = "no plan" if prediction is None else f"{ms(prediction.iteration_ms)} per iteration"
        doubt = ", which does not fit" if answer.fits is False else ""
        seconds = f"{found.times[timed].median_s:.2f} s"
        line(console, f"{name}: planned in {seconds}; {plan}{doubt}")


def show_times(console: Console, found: Comparison) -> None:
    """Seconds of each, and their ratio in words."""
    rounds = len(found.times[SEARCH].seconds)
    aside = (
        f"median of {rounds} interleaved runs"
        if rounds > 1
        else "one sample, so the spread is unknown"
    )
    heading(console, "Plan time", aside)
    made = table("<", ">s", "<min – max", "~what is timed")
    for name, samples in found.times.items():
        spread = f"{min(samples.seconds):.2f} – {max(samples.seconds):.2f}"
        made.add_row(name, f"{samples.median_s:.2f}", spread, _WHAT[name])
    show(console, made)
    for sentence in time_words(found):
        line(console, sentence)


def time_words(found: Comparison) -> list[str]:
    """What the times say, and how far to trust them."""
    ratio = found.times[SEARCH].median_s / found.times[TORCHREC].median_s
    faster = "as fast as" if times(ratio) == "same" else f"{times(ratio)} than"
    faster = "as fast as" if times(ratio) == "same" else f"{times(ratio)} than"
    rounds = len(found.times[SEARCH].seconds)
    doubt = {None: "", True: "", False: " (their samples overlap: not significant)"}
    lost = rounds > 1 and found.times[COMMAND].overlaps(found.times[SEARCH])
    start_up = "less than the spread" if lost else f"{_start_up(found):.2f} s"
    sentences = [
        f"The search is {faster} TorchRec's planner{doubt[_significant(found)]}; "
        f"starting the command and writing its result adds {start_up}."
    ]
    unstable = [name for name, samples in found.times.items() if samples.stable is False]
    if unstable:
        sentences.append(
            f"Unstable: the samples of {_listed(unstable)} vary widely; "
            "measure on an idle machine, or repeat more often."
        )
    load = found.machine["load_average"]
    if isinstance(load, list):
        sentences.append(f"Load average before: {load[0]:.2f} on {found.machine['cores']} cores.")
    return sentences


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def show_plans(console: Console, found: Comparison) -> None:
    """Both plans under shardopt's predictor."""
    heading(console, "Plans", "both predicted by shardopt")
    made = table("<planner", ">ms", "<", ">HBM GiB", "<fits", "~sharding")
    best = found.ours.prediction
    for name, answer in (("shardopt", found.ours), ("torchrec", found.theirs)):
        prediction = answer.prediction
        if answer.plan is None or prediction is None or best is None:
            made.add_row(name, "-", "found no plan", "-", "-", "-")
            continue
        ratio = prediction.iteration_ms / best.iteration_ms
        made.add_row(
            name,
            number(prediction.iteration_ms),
            "" if answer is found.ours else times(ratio),
            hbm_use(prediction.memory),
            "yes" if answer.fits else "no",
            type_mix(answer.plan),
        )
    show(console, made)
    for sentence in plan_words(found):
        line(console, sentence)


def plan_words(found: Comparison) -> list[str]:
    """What the table of the plans leaves out."""
    result = found.result
    gap = gap_of(result.best.iteration_ms, result.lower_bound_ms)
    sentences = []
    if gap is not None:
        sentences.append(f"shardopt's plan is {at_most(gap)} from optimal.")
    if found.rating_ms is not None:
        sentences.append(
            f"TorchRec rates its own plan at {number(found.rating_ms)} ms: the largest sum of "
            "shard costs on a rank, which is not an iteration time."
        )
    if found.theirs.prediction is not None and not found.theirs.fits:
        sentences.append(f"TorchRec's plan {misfit_text(found.theirs.prediction)}.")
    return sentences
