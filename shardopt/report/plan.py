"""The report of ``shardopt plan``: ranking, baselines, where the time goes, what is proved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from predictor.model.measured_dense import MeasuredDense
from predictor.model.plan import ComputeKernel, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import DenseArch, Workload
from predictor.predict import Prediction
from predictor.units import format_bytes
from search.expected_gain import TORCHREC, ExpectedGain
from search.in_use.price import Move
from search.problem import Result
from shardopt.api.setting import Setting
from shardopt.explain.stakes import Alternatives, instead_text
from shardopt.formatting import (
    at_most,
    gap_of,
    gib_number,
    hbm_use,
    interval,
    ms,
    number,
    percent,
    plural,
    points,
    ranks_text,
    times,
    type_mix,
)
from shardopt.report.console import bar, heading, line, show, table
from shardopt.report.prediction import (
    misfit_text,
    provenance_text,
    show_breakdown,
    show_doubts,
    show_ranks,
)

WORDS = {TORCHREC: "TorchRec's plan"}
"""Baselines -> what the report calls their plans."""
MAX_BAR = 3.0
"""Bars of baselines are cut off at this multiple of the best plan's time."""


@dataclass(frozen=True)
class PlanReport:
    """Everything the report shows.

    Args:
        predictions: of ``result.plans``, in their order.
        written: where the best plan was written, if it was.
        next_command: what to type next.
        move: from the plan in use to the best plan, where there is one.
        gain: of the best plan over TorchRec's, where that has one.
        instead: what matters more, where sharding does not.
    """

    setting: Setting
    result: Result
    predictions: Sequence[Prediction]
    written: str | None
    next_command: str
    move: Move | None = None
    gain: ExpectedGain | None = None
    instead: Alternatives | None = None


def show_plan(console: Console, report: PlanReport) -> None:
    """The whole report."""
    best = report.predictions[0]
    if report.instead is not None:
        line(console, instead_text(report.instead), style="bold")
        console.print()
    show_setting(console, report.setting)
    show_ranking(console, report.result, report.predictions)
    show_baselines(console, report.result.baselines, best.iteration_ms)
    show_gain(console, report.gain)
    show_move(console, report.result, report.move)
    heading(console, "Where the time goes", "plan 1, along its critical path")
    show_breakdown(console, best)
    show_ranks(console, best)
    show_verdict(console, report.result, best)
    show_end(console, report)


def show_headline(console: Console, report: PlanReport) -> None:
    """The report under ``--quiet``: one line; before it one that sharding does not matter."""
    best, result = report.predictions[0], report.result
    if report.instead is not None:
        console.print(Text(instead_text(report.instead)), soft_wrap=True)
    gap = gap_of(best.iteration_ms, result.lower_bound_ms)
    proved = "" if gap is None else f", {at_most(gap)} from optimal"
    text = (
        f"{ms(best.iteration_ms)} per iteration{proved}; {type_mix(result.best.plan)}. "
        f"{provenance_text(best)}"
    )
    console.print(Text(text), soft_wrap=True)


def show_setting(console: Console, setting: Setting) -> None:
    """Model, machine and batch."""
    workload, topology = setting.workload, setting.installed
    lookups = sum(t.lookups_per_sample for t in workload.tables)
    default = " (default)" if setting.hardware_from == "default" else ""
    batch, ranks = workload.batch_size, topology.world_size
    rows = (
        (
            workload.name,
            f"{plural(len(workload.tables), 'table')}, "
            f"{gib_number(workload.embedding_bytes)} GiB of embeddings, "
            f"{lookups:,.4g} ids per sample",
        ),
        (
            f"{setting.hardware.name}{default}",
            f"{plural(ranks, 'GPU')} ({plural(topology.hosts, 'host')} of "
            f"{topology.local_world_size}, NVLink domain of {topology.nvlink_domain}"
            f"{_network_words(topology)}), "
            f"{_memory_words(setting)}",
        ),
        (
            "batch",
            f"{batch:,} per GPU, {batch * ranks:,} in total; {workload.train_pipeline} pipeline",
        ),
        ("dense part", dense_words(workload)),
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", overflow="fold", max_width=console.width // 2)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)


def _network_words(topology: Topology) -> str:
    """Levels of the network that cost something beyond the NICs."""
    found = []
    for level in topology.network:
        facts = []
        if level.oversubscription > 1:
            facts.append(f"{level.oversubscription:g}:1 oversubscribed")
        if level.gbit_s is not None:
            facts.append(f"{level.gbit_s:g} Gbit/s a rank")
        if level.latency_us:
            facts.append(f"+{level.latency_us:g} us")
        if facts:
            found.append(f"{level.name} joins {level.parts} parts, {', '.join(facts)}")
    return "".join(f"; {words}" for words in found)


def dense_words(workload: Workload) -> str:
    """Which of the three forms says what the dense part is."""
    dense = workload.dense
    if isinstance(dense, DenseArch):
        return "from the layers in the model file"
    if not isinstance(dense, MeasuredDense):
        return "from the ops captured from the module"
    scaled = dense.batch_size != workload.batch_size
    return f"measured at a batch of {dense.batch_size:,}{', scaled in proportion' * scaled}"


def _memory_words(setting: Setting) -> str:
    installed, left = setting.installed, setting.topology
    if any(installed.hbm_cap_bytes):
        return (
            f"{gib_number(min(left.hbm_cap_bytes))} of "
            f"{gib_number(min(installed.hbm_cap_bytes))} GiB HBM for tables"
        )
    return f"{gib_number(min(left.ddr_cap_bytes))} GiB host memory for tables"


def show_ranking(console: Console, result: Result, predictions: Sequence[Prediction]) -> None:
    """Plans, best first."""
    heading(console, "Plans", "predicted iteration time, best first")
    made = table(
        [
            ("#", "right"),
            ("ms", "right"),
            ("vs bound", "right"),
            ("90 % interval", "left"),
            ("HBM GiB", "right"),
            ("sharding", "fold"),
            ("found by", "fold"),
        ]
    )
    for place, (ranked, prediction) in enumerate(
        zip(result.plans, predictions, strict=True), start=1
    ):
        gap = gap_of(prediction.iteration_ms, result.lower_bound_ms)
        made.add_row(
            str(place),
            number(prediction.iteration_ms),
            "?" if gap is None else _above(gap),
            interval(prediction.interval_ms),
            hbm_use(prediction.memory),
            type_mix(ranked.plan),
            ranked.found_by.replace("_", " "),
            style="bold" if place == 1 else "",
        )
    show(console, made)


def _above(gap: float) -> str:
    shown = percent(gap)
    return shown if shown.startswith("<") else f"+{shown}"


def show_baselines(console: Console, baselines: Mapping[str, float], best_ms: float) -> None:
    """Plans of other methods under the same predictor, fastest first."""
    if not baselines:
        return
    heading(console, "Baselines", "plans of other methods, predicted the same way")
    made = table([("method", "left"), ("ms", "right"), ("vs plan 1", "left"), ("", "left")])
    # one method that is far off must not flatten the bars of all others
    longest = min(max(baselines.values()), MAX_BAR * best_ms)
    width = max(10, min(30, console.width - 60))
    for name, value in sorted(baselines.items(), key=lambda item: (item[1], item[0])):
        made.add_row(
            name.replace("_", " "),
            number(value),
            times(value / best_ms),
            bar(value / longest, width, "yellow"),
        )
    show(console, made)


def show_gain(console: Console, gain: ExpectedGain | None) -> None:
    """What the best plan is expected to gain over TorchRec's, priced by the costs' known errors."""
    if gain is not None:
        line(console, gain_text(gain))


def gain_text(gain: ExpectedGain) -> str:
    """One sentence; says so where the errors could hide the gain."""
    low, high = gain.interval
    hidden = "; the known errors of the costs could hide it" if low < 0 < gain.mean else ""
    return (
        f"Expected gain over {WORDS.get(gain.baseline, gain.baseline)} {points(gain.mean)} %, "
        f"90 % interval {points(low)} to {points(high)}{hidden}."
    )


def preferred_text(result: Result) -> str | None:
    """Why the best plan is not the fastest one, where it is not."""
    if result.fastest is None:
        return None
    slower = result.best.iteration_ms / result.fastest.iteration_ms - 1
    if result.in_use is not None:
        return (
            f"A plan predicted to be {percent(slower)} faster does not pay for its move in "
            f"{result.in_use.horizon:,} steps."
        )
    return (
        f"Plan 1 is preferred to one predicted to be {percent(slower)} faster: under the known "
        "errors of the costs it is expected to be as fast, and it is simpler or better balanced."
    )


def show_verdict(console: Console, result: Result, best: Prediction) -> None:
    """The headline number, what it is based on and what is proved."""
    console.print()
    console.print(
        Text.assemble(
            ("Predicted ", ""),
            (ms(best.iteration_ms), "bold green"),
            f" per iteration (90 % interval {interval(best.interval_ms)} ms). "
            f"{provenance_text(best)}",
        )
    )
    line(console, _claim(best.iteration_ms, result))
    preferred = preferred_text(result)
    if preferred:
        line(console, preferred)
    show_doubts(console, best)
    problem = misfit_text(best)
    if problem:
        line(console, problem, style="bold red")


def _claim(best_ms: float, result: Result) -> str:
    """What the bound proves, and of which plans."""
    gap = gap_of(best_ms, result.lower_bound_ms)
    given = result.in_use
    limited = given is not None and given.max_moves and given.max_moves < len(given.plan.tables)
    which = "no plan"
    if given is not None and limited:
        which = f"no plan that moves {plural(given.max_moves or 0, 'table')} or fewer"
    if gap is None:
        return "Nothing is proved about optimality: the lower bound is 0 ms."
    if gap <= 1e-9:
        return f"Proved: {which} is predicted to be faster; plan 1 is optimal."
    return (
        f"Proved: {which} is predicted to be faster than {ms(result.lower_bound_ms)}; "
        f"plan 1 is {at_most(gap)} from optimal."
    )


_STOPPED = {
    "work": "stopped at its work budget (a larger effort searches further)",
    "gap": "stopped because the gap to the lower bound is closed",
    "time": "stopped at the time limit, so another run may find another plan",
    "interrupted": "interrupted, so this is the best plan of a part of the search",
}


def show_end(console: Console, report: PlanReport) -> None:
    """Why the search ended, notes, the file and the next command."""
    result = report.result
    reason = _STOPPED.get(result.stopped_by, result.stopped_by)
    line(
        console,
        f"Searched for {result.search_seconds:.1f} s and scored {result.evaluations:,} plans; "
        f"{reason}.",
    )
    for note in filter(None, ("; ".join(result.bound_notes), *report.setting.notes)):
        line(console, f"Note: {note}.", style="yellow")
    if report.written:
        line(console, f"Plan 1 is written to {report.written}. Next:")
    else:
        line(console, "No plan was written. Next:")
    line(console, f"  {report.next_command}", style="bold")


USUAL_KERNELS = (ComputeKernel.FUSED, ComputeKernel.DENSE)
SHOWN_MOVES = 12
"""Tables that are named; the others are counted."""


def show_move(console: Console, result: Result, move: Move | None) -> None:
    """The plan in use compared with plan 1: times, what moves, what that takes, why it cannot
    stay."""
    given, best = result.in_use, result.best
    if given is None or move is None:
        return
    heading(console, "The plan in use", "and what plan 1 would change")
    gain = best.iteration_ms / given.iteration_ms
    line(console, f"Now {ms(given.iteration_ms)}, after {ms(best.iteration_ms)} ({times(gain)}).")
    for reason in given.misfits:
        line(console, f"It cannot stay as it is: {reason}.", style="yellow")
    if not move.tables:
        line(console, f"No table moves. {_most_to_gain(result)}")
        return
    line(
        console,
        f"{len(move.tables)} of {plural(len(best.plan.tables), 'table')} change; "
        f"{format_bytes(move.bytes)} of weights and optimizer state move to other ranks"
        f"{_over_links(move)}.",
    )
    line(console, _move_words(move, given.iteration_ms, best.iteration_ms))
    made = table([("table", "fold"), ("now", "fold"), ("after", "fold")])
    for key in move.tables[:SHOWN_MOVES]:
        made.add_row(key, *(_placed_words(p.tables[key]) for p in (given.plan, best.plan)))
    show(console, made)
    if len(move.tables) > SHOWN_MOVES:
        line(
            console,
            f"and {len(move.tables) - SHOWN_MOVES} more; `shardopt diff` lists all of them.",
        )


def _most_to_gain(result: Result) -> str:
    """What staying gives up at most."""
    given = result.in_use
    assert given is not None
    if result.lower_bound_ms <= 0:
        return ""
    most = max(0.0, 1 - result.lower_bound_ms / given.iteration_ms)
    return f"Staying is best: proved, no plan within the limits gains more than {percent(most)}."


def _over_links(move: Move) -> str:
    parts = [f"{format_bytes(size)} {link}" for link, size in move.link_bytes.items() if size]
    return f" ({', '.join(parts)})" if len(parts) > 1 else ""


def _move_words(move: Move, before_ms: float, after_ms: float) -> str:
    """How long the move takes, and when it has paid for itself."""
    how = (
        "TorchRec can move them while the job runs"
        if move.in_place
        else "TorchRec moves them through a checkpoint (not counted): it reshards only table-wise "
        "and column-wise tables in place, with memory for both copies"
    )
    steps = move.pays_back_after(before_ms, after_ms)
    pays = "" if steps is None else f" and pays for itself after {max(1, round(steps)):,} steps"
    return (
        f"The move takes {move.seconds:.2g} s{pays}; {how}. Old and new, a "
        f"rank would hold up to {format_bytes(move.both_copies_bytes)} of tables."
    )


def _placed_words(plan: TablePlan) -> str:
    kernel = "" if plan.compute_kernel in USUAL_KERNELS else f" {plan.compute_kernel}"
    return f"{plan.sharding_type.short}{kernel} on {ranks_text(plan.ranks)}"
