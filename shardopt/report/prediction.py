"""Predictions on the console: where the time goes, ranks, provenance; plans side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from predictor.model.memory.peak import NEARLY_FULL
from predictor.model.memory.ranks import RankMemory, missing
from predictor.model.topology import Topology
from predictor.model.workload import DenseArch, MeasuredDense, Workload
from predictor.predict import PHASES, Prediction, RankLoad
from predictor.units import format_bytes
from shardopt.api.setting import Setting
from shardopt.explain.explanation import PredictedPlan
from shardopt.formatting import (
    gib_number,
    hbm_use,
    interval,
    ms,
    number,
    percent,
    phase_words,
    plural,
    range_lines,
    times,
    type_mix,
)
from shardopt.report.console import bar, heading, line, show, stacked, table

MAX_RANKS = 16
"""More ranks than this are shown by their busiest and idlest."""

_COMM = ("input_dist", "output_dist_forward", "output_dist_backward", "all_reduce", "replica_sync")
_PARTS = (
    ("embedding forward", "█", "cyan"),
    ("embedding backward", "▓", "blue"),
    ("dense and other", "▒", "green"),
    ("idle", "·", "dim"),
)


@dataclass(frozen=True)
class RankTimes:
    """One rank's iteration as the bars show it, in ms."""

    rank: int
    embedding_forward: float
    embedding_backward: float
    other: float
    idle: float
    comm: float

    @classmethod
    def of(cls, load: RankLoad, iteration_ms: float) -> RankTimes:
        """Compute is embedding and the rest; transfers overlap with it."""
        forward = load.busy_ms.get("embedding_forward", 0.0)
        backward = load.busy_ms.get("embedding_backward", 0.0)
        idle = min(load.idle_ms, iteration_ms)
        other = max(0.0, iteration_ms - idle - forward - backward)
        comm = sum(load.busy_ms.get(phase, 0.0) for phase in _COMM)
        return cls(load.rank, forward, backward, other, idle, comm)

    @property
    def embedding(self) -> float:
        """Time in lookups and their backward."""
        return self.embedding_forward + self.embedding_backward


def show_time(console: Console, prediction: Prediction, name: str = "") -> None:
    """The headline number, its interval and what it is based on.

    Args:
        name: of the plan, where it needs one.
    """
    of = f" with {name}" if name else ""
    between = f" (90 % interval {interval(prediction.interval_ms)} ms). "
    time_ms = (ms(prediction.iteration_ms), "bold green")
    console.print()
    console.print(
        Text.assemble(
            "Predicted ", time_ms, f" per iteration{of}{between}{provenance_text(prediction)}"
        )
    )


def show_breakdown(console: Console, prediction: Prediction) -> None:
    """The critical path by phase; the parts sum to the iteration time."""
    parts = prediction.breakdown
    made = table("<phase", ">ms", ">share", "<")
    width = max(10, min(40, console.width - 44))
    longest = max(parts.values(), default=1.0)
    for phase, value in parts.items():
        made.add_row(
            phase_words(phase),
            number(value),
            percent(value / prediction.iteration_ms),
            bar(value / longest, width),
        )
    show(console, made)
    text = dense_text(prediction)
    if text:
        show(console, Text(text))


MAX_MODULES = 6
"""Parts of the dense part that are named."""


def dense_text(prediction: Prediction) -> str:
    """The parts of a captured module that take most of the device's time; empty if none is."""
    found = prediction.dense_by_module
    slowest = sorted(found, key=lambda path: -sum(found[path]))
    if not slowest:
        return ""
    names = [f"{path} {number(sum(found[path]))}" for path in slowest[:MAX_MODULES]]
    more = sum(sum(found[path]) for path in slowest[MAX_MODULES:])
    rest = f", {len(slowest) - MAX_MODULES} others {number(more)}" if more else ""
    return f"Dense part by module, forward and backward (ms): {', '.join(names)}{rest}."


def show_ranks(console: Console, prediction: Prediction) -> None:
    """A bar per rank: what its compute stream does in an iteration."""
    times = [RankTimes.of(load, prediction.iteration_ms) for load in prediction.per_rank]
    shown = selected(times, MAX_RANKS)
    heading(
        console, "Ranks", f"what each computes in an iteration of {ms(prediction.iteration_ms)}"
    )
    made = table(
        ">rank",
        "<",
        ">emb fwd",
        ">emb bwd",
        ">comm",
        ">idle",
        f">{_memory_header(prediction.memory)}",
    )
    width = max(10, min(40, console.width - 54))
    for rank in shown:
        values = (rank.embedding_forward, rank.embedding_backward, rank.other, rank.idle)
        parts = [(v, mark, style) for v, (_, mark, style) in zip(values, _PARTS, strict=True)]
        made.add_row(
            str(rank.rank),
            stacked(parts, prediction.iteration_ms, width),
            number(rank.embedding_forward),
            number(rank.embedding_backward),
            number(rank.comm),
            number(rank.idle),
            hbm_use([prediction.memory[rank.rank]]),
        )
    show(console, made)
    legend = Text("  ")
    for name, mark, style in _PARTS:
        legend.append(mark * 2, style=style)
        legend.append(f" {name}   ", style="dim")
    console.print(legend)
    if len(shown) < len(times):
        line(
            console,
            f"  The {MAX_RANKS // 2} busiest and the {MAX_RANKS // 2} idlest of {len(times)} ranks "
            "are shown; the JSON output has all.",
            style="dim",
        )
    show_memory(console, prediction.memory)


def show_memory(console: Console, memory: Sequence[RankMemory]) -> None:
    """The peak of the fullest rank, and a warning where that has little left."""
    for text in memory_lines(memory):
        line(console, text)
    tight = nearly_full_text(memory)
    if tight:
        line(console, f"Nearly full: {tight}.", style="yellow")


def selected(times: list[RankTimes], most: int) -> list[RankTimes]:
    """All ranks, or ``most`` of them: the busiest and the idlest, in order of rank."""
    if len(times) <= most:
        return times
    by_work = sorted(times, key=lambda t: (-t.embedding, t.rank))
    half = most // 2
    return sorted(by_work[:half] + by_work[-half:], key=lambda t: t.rank)


def _memory_header(memory: tuple[RankMemory, ...]) -> str:
    return "HBM GiB" if any(r.hbm_cap_bytes for r in memory) else "DDR GiB"


def memory_lines(memory: Sequence[RankMemory]) -> list[str]:
    """What the fullest rank takes of its memory at the peak, in tensors and from the device."""
    fullest = max(memory, key=lambda r: r.peak.reserved_bytes if r.peak else 0)
    peak = fullest.peak
    if peak is None:
        return []
    tensors = (
        f"tensors take {gib_number(peak.allocated_bytes)} GiB "
        f"({gib_number(peak.activations_bytes)} of activations)"
    )
    of = f"of {gib_number(peak.capacity_bytes)} GiB"
    if not peak.on_device:
        return [f"Memory at its peak: {tensors} {of} on rank {fullest.rank}."]
    return [
        f"Memory at its peak: {tensors}, PyTorch reserves {gib_number(peak.reserved_bytes)} {of} "
        f"on rank {fullest.rank}."
    ]


def nearly_full_text(memory: Sequence[RankMemory]) -> str:
    """A warning where a rank that fits has little left; empty if none."""
    shares = [
        (r.peak.reserved_bytes / max(r.peak.limit_bytes, 1), r.rank)
        for r in memory
        if r.peak is not None and r.fits
    ]
    share, rank = max(shares, default=(0.0, 0))
    if share <= NEARLY_FULL:
        return ""
    return (
        f"rank {rank} would reserve {share:.0%} of what it may: a batch larger than the mean may "
        "run out of memory"
    )


PROVENANCE_SENTENCES = {
    "measured": "Based on measurements.",
    "learned": "Based on measurements, corrected by what a job took.",
    "published": "Based on published figures, not measured on your GPUs; run `shardopt calibrate`.",
    "derived": "Based on published figures, not measured on your GPUs; run `shardopt calibrate`.",
    "not validated": "Based on a model that nothing has validated; run `shardopt calibrate`.",
}
"""Weakest provenance kind on the critical path -> the sentence after the headline number."""


def provenance_text(prediction: Prediction) -> str:
    """A sentence on the weakest provenance behind the headline number."""
    return PROVENANCE_SENTENCES[prediction.provenance]


def misfit_text(prediction: Prediction) -> str:
    """Which ranks lack memory for the plan; empty when it fits."""
    lacking = [rank for rank in prediction.memory if not rank.fits]
    if not lacking:
        return ""
    more = f"; {plural(len(lacking) - 1, 'more rank')} too" if len(lacking) > 1 else ""
    worst = max(lacking, key=lambda r: r.missing_hbm_bytes + r.missing_ddr_bytes)
    return f"does not fit: {missing([worst])}{more}"


def sync_text(prediction: Prediction) -> str:
    """What averaging the copies of tables takes; empty where there are none."""
    sync = prediction.replica_sync
    if sync is None:
        return ""
    weights, states = max(sync.weight_bytes), max(sync.state_bytes)
    if sync.within_step:
        return (
            f"Averaging the weights of copies, up to {format_bytes(weights)} per rank, takes "
            f"{ms(sync.sync_ms)} of every step, in part beside other work; optimizer states are "
            "not averaged."
        )
    return (
        f"Averaging the copies once takes {ms(sync.sync_ms)} for up to "
        f"{format_bytes(weights)} of weights and {format_bytes(states)} of optimizer state per "
        f"rank; a step with it takes {ms(sync.step_ms)}. The time per iteration has its share."
    )


def show_doubts(console: Console, prediction: Prediction, name: str = "") -> None:
    """A line for every group of the profile that was used beyond what it was fitted on, and one for
    ops of the dense part without a kernel model.

    Args:
        name: of the plan, where there are several.
    """
    of = f" ({name})" if name else ""
    for text in range_lines(prediction.out_of_range):
        line(console, f"Extrapolated{of}: {text}.", style="yellow")
    text = by_bytes_text(prediction.dense_ops_by_bytes)
    if text:
        line(console, text, style="yellow")


def by_bytes_text(found: Mapping[str, int]) -> str:
    """What is said of ops that have no kernel model; empty if there are none."""
    if not found:
        return ""
    ops = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in found.items())
    return f"Priced by the bytes they touch, as no kernel model knows them: {ops}."


MAX_COLUMNS = 6
"""Plans whose breakdowns stand side by side."""


def show_predictions(console: Console, given: Sequence[PredictedPlan]) -> None:
    """One plan in full, or several ranked, best first."""
    ranked = sorted(given, key=lambda p: p.prediction.iteration_ms)
    show_comparison(console, ranked)
    best = ranked[0].prediction
    if len(ranked) == 1:
        heading(console, "Where the time goes", "along the critical path")
        show_breakdown(console, best)
        show_ranks(console, best)
    else:
        show_breakdowns(console, ranked)
    show_time(console, best, ranked[0].name)
    for item in ranked:
        problem = misfit_text(item.prediction)
        if problem:
            line(console, f"{item.name} {problem}", style="bold red")
        tight = nearly_full_text(item.prediction.memory)
        if tight and len(ranked) > 1:
            line(console, f"{item.name} is nearly full: {tight}.", style="yellow")
        copies = sync_text(item.prediction)
        if copies:
            line(console, copies)
        name = item.name if len(ranked) > 1 else ""
        show_doubts(console, item.prediction, name)


def show_headlines(console: Console, given: Sequence[PredictedPlan]) -> None:
    """The report under ``--quiet``: one line per plan, in the order given."""
    for item in given:
        line(console, f"{item.name}: {ms(item.prediction.iteration_ms)}")


def show_comparison(console: Console, ranked: Sequence[PredictedPlan]) -> None:
    """One row per plan."""
    heading(console, "Plans", "predicted iteration time, best first")
    made = table(">#", "~plan", ">ms", "<vs best", "<90 % interval", ">HBM GiB", "~sharding")
    best = ranked[0].prediction.iteration_ms
    for place, item in enumerate(ranked, start=1):
        value = item.prediction.iteration_ms
        made.add_row(
            str(place),
            item.name,
            number(value),
            "best" if place == 1 else times(value / best),
            interval(item.prediction.interval_ms),
            hbm_use(item.prediction.memory),
            type_mix(item.plan),
            style="bold" if place == 1 else "",
        )
    show(console, made)


def show_breakdowns(console: Console, ranked: Sequence[PredictedPlan]) -> None:
    """One row per phase, one column per plan; empty where a phase is not on the critical path."""
    shown = ranked[:MAX_COLUMNS]
    aside = "ms on the critical path; plans are numbered as above"
    heading(console, "Where the time goes", aside)
    places = [f">#{i}" for i in range(1, len(shown) + 1)]
    made = table("<phase", *places)
    for phase in PHASES:
        parts = [item.prediction.breakdown.get(phase, 0.0) for item in shown]
        if any(parts):
            made.add_row(phase_words(phase), *(number(v) if v else "" for v in parts))
    made.add_row("iteration", *(number(item.prediction.iteration_ms) for item in shown))
    show(console, made)
    if len(shown) < len(ranked):
        line(
            console,
            f"  The {MAX_COLUMNS} fastest plans are shown; the JSON output has all.",
            style="dim",
        )


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
        *([("replica groups", _copies_words(setting))] if workload.replica_groups else []),
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


def _copies_words(setting: Setting) -> str:
    """How ranks form groups, and how often their copies meet."""
    groups, job = setting.workload.replica_groups, setting.installed
    assert groups is not None
    if groups.count(job.world_size) == 1:
        return f"one group of all {job.world_size} ranks, so tables have one copy"
    apart = "in a row" if groups.use_inter_host_allreduce else "with their copies on neighbours"
    averaged = (
        "its weights averaged between forward and backward of every step"
        if groups.fully_sharded
        else f"averaged every {plural(groups.sync_interval, 'step')}"
    )
    return (
        f"{groups.count(job.world_size)} groups of {plural(groups.size, 'rank')} {apart}; each has "
        f"all tables, {averaged}"
    )


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
