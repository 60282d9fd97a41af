"""Predictions: where the time goes, ranks, memory, provenance; plans side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from predictor.model.memory.peak import NEARLY_FULL
from predictor.model.topology import Topology
from predictor.model.workload import DenseArch, MeasuredDense, Workload
from predictor.predict import PHASES, RankLoad
from predictor.units import format_bytes
from shardopt.api.document import GivenPlan, PredictAnswer, PredictedPlan, RankUse
from shardopt.api.setting import Setting
from shardopt.formatting import (
    gib_number,
    interval,
    ms,
    number,
    percent,
    phase_words,
    plural,
    range_lines,
    rank_word,
    shares,
    times,
    type_mix,
)
from shardopt.report.blocks import Bar, Block, Cell, Heading, Legend, Line, TextTable, View, warning

MAX_RANKS = 8
"""Most ranks shown; of more, only the busiest and the idlest."""
MAX_COLUMNS = 6
"""Plans whose breakdowns stand side by side."""
MAX_MODULES = 6
"""Parts of the dense part that are named."""
_COMM = ("input_dist", "output_dist_forward", "output_dist_backward", "all_reduce", "replica_sync")
_PARTS = {
    "embedding_forward": "embedding forward",
    "embedding_backward": "embedding backward",
    "dense_forward": "dense and other",
    "idle": "idle",
}
"""Work of a rank's compute stream, as the bars show it."""


def predict_view(answer: PredictAnswer) -> View:
    """``shardopt predict``."""
    plans = answer.predictions
    report = [setting_facts(answer.setting), *predictions(plans)]
    return View(answer, report, headlines(plans), answer.setting.notes)


# --- one plan -----------------------------------------------------------------------------------


def time_line(plan: GivenPlan) -> str:
    """The headline number, its interval, how tables are sharded, and what it is based on."""
    return (
        f"Predicted {ms(plan.iteration_ms)} per iteration with {plan.plan} (90 % interval "
        f"{interval(plan.interval_ms)} ms; {type_mix(plan.sharding_plan)}). {based_on(plan)}"
    )


def headlines(plans: Sequence[GivenPlan]) -> list[Block]:
    """The report under ``--quiet``: one line per plan, in the order given."""
    return [f"{plan.plan}: {ms(plan.iteration_ms)}" for plan in plans]


def breakdown(prediction: PredictedPlan) -> list[Block]:
    """The critical path by phase; the parts sum to the iteration time."""
    whole, parts = prediction.iteration_ms, prediction.breakdown
    rows = []
    for (phase, part), share in zip(parts.items(), shares([*parts.values()]), strict=True):
        words = phase_words(phase)
        bar = Bar([(part, phase, f"{words}\n{ms(part)}")], whole)
        rows.append((words, number(part), share, bar))
    by_module = dense_text(prediction)
    return [TextTable(["<phase", ">ms", ">share", "<"], rows), *filter(None, [by_module])]


def dense_text(prediction: PredictedPlan) -> str:
    """The parts of a captured module that take most of the device's time; empty if none is."""
    by_module = prediction.dense_by_module
    slowest = sorted(by_module, key=lambda path: -sum(by_module[path]))
    if not slowest:
        return ""
    names = [f"{path} {number(sum(by_module[path]))}" for path in slowest[:MAX_MODULES]]
    more = sum(sum(by_module[path]) for path in slowest[MAX_MODULES:])
    rest = f", {len(slowest) - MAX_MODULES} others {number(more)}" if more else ""
    return f"Dense part by module, forward and backward (ms): {', '.join(names)}{rest}."


def selected(loads: Sequence[RankLoad], most: int) -> list[RankLoad]:
    """Select all ranks, or ``most`` of them: the busiest and the idlest, in order of rank."""
    if len(loads) <= most:
        return list(loads)
    by_work = sorted(loads, key=lambda load: (-sum(_lookups(load)), load.rank))
    half = most // 2
    return sorted(by_work[:half] + by_work[-half:], key=lambda load: load.rank)


def _lookups(load: RankLoad) -> tuple[float, float]:
    """Time in lookups and in their backward."""
    return load.busy_ms.get("embedding_forward", 0.0), load.busy_ms.get("embedding_backward", 0.0)


def ranks(prediction: PredictedPlan) -> list[Block]:
    """A bar per rank: what its compute stream does in an iteration; then memory."""
    shown, whole = selected(prediction.per_rank, MAX_RANKS), prediction.iteration_ms
    memory = prediction.memory
    rows: list[Sequence[str | Cell]] = []
    for load in shown:
        forward, backward = _lookups(load)
        idle = min(load.idle_ms, whole)
        other = max(0.0, whole - idle - forward - backward)
        # transfers overlap with the rest
        comm = sum(load.busy_ms.get(phase, 0.0) for phase in _COMM)
        named = zip((forward, backward, other, idle), _PARTS.items(), strict=True)
        bar = Bar([(v, part, f"{words}\n{ms(v)}") for v, (part, words) in named], whole)
        use = memory_use([memory[load.rank]])
        figures = map(number, (forward, backward, comm, idle))
        rows.append((str(load.rank), Cell(bar, -idle), *figures, use))
    excerpt = ""
    if len(shown) < len(memory):
        excerpt = (
            f"; the {MAX_RANKS // 2} busiest and the {MAX_RANKS // 2} least busy of {len(memory)}"
        )
    columns = [">rank", "<", ">emb fwd", ">emb bwd", ">comm", ">idle", f">{memory_title(memory)}"]
    return [
        Heading("Ranks", f"what each computes in an iteration of {ms(whole)}{excerpt}"),
        TextTable(columns, rows, name="ranks"),
        Legend(_PARTS),
        *memory_lines(memory),
    ]


def memory_lines(memory: Sequence[RankUse]) -> list[Block]:
    """Say how much memory the fullest rank takes at the peak, in tensors and from the device, and
    warn where it has little left."""
    fullest = max(memory, key=lambda rank: rank.peak_reserved_bytes)
    reserved = ""
    if fullest.on_device:
        reserved = f", PyTorch reserves {gib_number(fullest.peak_reserved_bytes)}"
    tight = nearly_full_text(memory)
    return [
        f"Memory at its peak: tensors take {gib_number(fullest.peak_allocated_bytes)} GiB "
        f"({gib_number(fullest.activations_bytes)} of activations){reserved} of "
        f"{gib_number(fullest.capacity_bytes)} GiB on rank {fullest.rank}.",
        *([warning(f"Nearly full: {tight}.")] if tight else []),
    ]


def memory_use(memory: Sequence[RankUse]) -> str:
    """Return the memory that the fullest rank's process reserves at its peak, and has, in GiB."""
    fullest = max(memory, key=lambda r: r.peak_reserved_bytes / max(r.capacity_bytes, 1))
    return f"{gib_number(fullest.peak_reserved_bytes)} / {gib_number(fullest.capacity_bytes)}"


def memory_title(memory: Sequence[RankUse]) -> str:
    """Return the title of a column of `memory_use`."""
    return "HBM GiB" if all(rank.on_device for rank in memory) else "memory GiB"


def nearly_full_text(memory: Sequence[RankUse]) -> str:
    """A warning where a rank that fits has little left; empty if none."""
    shares = [
        (rank.peak_reserved_bytes / max(rank.limit_bytes, 1), rank.rank)
        for rank in memory
        if rank.fits
    ]
    share, rank = max(shares, default=(0.0, 0))
    if share <= NEARLY_FULL:
        return ""
    return (
        f"rank {rank} would reserve {percent(share)} of what it may: a batch larger than the mean "
        "may run out of memory"
    )


PROVENANCE_SENTENCES = {
    "measured": "Based on measurements of the profile's machine.",
    "learned": "Based on measurements, corrected by a trace of your job.",
    "published": "Based on published figures, not measured on your GPUs; run `shardopt calibrate`.",
    "derived": "Based on published figures, not measured on your GPUs; run `shardopt calibrate`.",
    "not validated": "Based on a model that is not validated; run `shardopt calibrate`.",
}
"""Weakest provenance kind on the critical path -> the sentence after the headline number."""


def based_on(prediction: PredictedPlan) -> str:
    """Say what the headline number rests on, and what its interval does not."""
    caveat = (
        "" if prediction.interval_calibrated else " Intervals of GPU iterations are uncalibrated."
    )
    return PROVENANCE_SENTENCES[prediction.provenance] + caveat


def misfit_text(prediction: PredictedPlan) -> str:
    """Say which ranks lack memory for the plan; empty when it fits."""
    lacking = [rank for rank in prediction.memory if not rank.fits]
    if not lacking:
        return ""
    more = f"; {plural(len(lacking) - 1, 'more rank')} too" if len(lacking) > 1 else ""
    worst = max(lacking, key=lambda rank: rank.missing_bytes)
    return f"does not fit: {worst.lacks}{more}"


def sync_text(prediction: PredictedPlan) -> str:
    """Say how long averaging the copies of tables takes; empty where there are none."""
    sync = prediction.replica_sync
    if sync is None:
        return ""
    weights, states = max(sync.weight_bytes), max(sync.state_bytes)
    if sync.within_step:
        return (
            f"Averaging the weights of copies, up to {format_bytes(weights)} per rank, takes "
            f"{ms(sync.sync_ms)} of every step, partly overlapped; optimizer states are "
            "not averaged."
        )
    return (
        f"Averaging the copies once takes {ms(sync.sync_ms)} for up to "
        f"{format_bytes(weights)} of weights and {format_bytes(states)} of optimizer state per "
        f"rank; a step with it takes {ms(sync.step_ms)}. The iteration time includes its share."
    )


def doubts(prediction: PredictedPlan, name: str = "This plan") -> list[Line | str]:
    """List why a plan may not run as predicted: it does not fit, its copies are averaged, a group
    of the profile was used beyond what it was fitted on, or ops have no kernel model."""
    lines: list[Line | str] = []
    misfit, copies = misfit_text(prediction), sync_text(prediction)
    if misfit:
        lines.append(Line(f"{name} {misfit}", "red"))
    if copies:
        lines.append(copies)
    lines += [warning(f"Extrapolated: {t}.") for t in range_lines(prediction.out_of_range)]
    calls = prediction.dense_ops_by_bytes
    if calls:
        ops = ", ".join(f"{op} ({count})" if count > 1 else op for op, count in calls.items())
        lines.append(
            warning(f"Priced by the bytes they touch, as no kernel model knows them: {ops}.")
        )
    return lines


# --- plans side by side -------------------------------------------------------------------------


def predictions(plans: Sequence[GivenPlan]) -> list[Block]:
    """Show one plan in full, or several ranked, best first."""
    if len(plans) == 1:
        item = plans[0]
        return [
            "",
            time_line(item),
            *doubts(item, item.plan),
            Heading("Where the time goes", "along the critical path"),
            *breakdown(item),
            *ranks(item),
        ]
    blocks = side_by_side(plans)
    blocks.append(based_on(_ranked(plans)[0]))
    for item in _ranked(plans):
        tight = nearly_full_text(item.memory)
        blocks += [warning(f"{item.plan} is nearly full: {tight}.")] if tight else []
    return [*blocks, *_shared_doubts(_ranked(plans))]


def _shared_doubts(predicted: Sequence[GivenPlan]) -> list[Block]:
    """The doubts about several plans, each once; one that not all plans share names its plans."""
    names: dict[Line | str, dict[str, None]] = {}
    for item in predicted:
        for doubt in doubts(item, item.plan):
            names.setdefault(doubt, {})[item.plan] = None
    every = {item.plan for item in predicted}
    return [
        doubt if plans.keys() == every else _prefixed(doubt, plans)
        for doubt, plans in names.items()
    ]


def _prefixed(doubt: Line | str, plans: Iterable[str]) -> Line | str:
    """A doubt after its plans; a refusal begins with its plan as it is."""
    where = ", ".join(plans)
    if isinstance(doubt, str):
        return f"{where}: {doubt}"
    return doubt if doubt.style == "red" else replace(doubt, text=f"{where}: {doubt.text}")


def _ranked(plans: Sequence[GivenPlan]) -> list[GivenPlan]:
    return sorted(plans, key=lambda p: p.iteration_ms)


def side_by_side(plans: Sequence[GivenPlan]) -> list[Block]:
    """A row per plan, best first, and where the time of each goes."""
    ranked = _ranked(plans)
    best = ranked[0].iteration_ms
    rows = [
        (
            str(place),
            item.plan,
            number(item.iteration_ms),
            "best" if place == 1 else times(item.iteration_ms / best),
            interval(item.interval_ms),
            memory_use(item.memory),
            type_mix(item.sharding_plan),
        )
        for place, item in enumerate(ranked, start=1)
    ]
    kind = memory_title(ranked[0].memory)
    columns = [">#", "~plan", ">ms", "<vs best", "<90 % interval", f">{kind}", "~sharding"]
    shown = ranked[:MAX_COLUMNS]
    by_phase = []
    for phase in PHASES:
        parts = [item.breakdown.get(phase, 0.0) for item in shown]
        if any(parts):
            by_phase.append((phase_words(phase), *(number(v) if v else "" for v in parts)))
    by_phase.append(("iteration", *(number(item.iteration_ms) for item in shown)))
    excerpt = f"; the {MAX_COLUMNS} fastest" if len(shown) < len(ranked) else ""
    return [
        Heading("Plans", "predicted iteration time, best first"),
        TextTable(columns, rows, strong=0, name="plans"),
        Heading(
            "Where the time goes", f"ms on the critical path; plans as numbered above{excerpt}"
        ),
        TextTable(["<phase", *(f">#{i}" for i in range(1, len(shown) + 1))], by_phase),
    ]


# --- what they are predicted for ----------------------------------------------------------------


def setting_facts(setting: Setting) -> TextTable:
    """Model, machine and batch."""
    workload, topology = setting.workload, setting.installed
    lookups = sum(t.lookups_per_sample for t in workload.tables)
    default = " (default)" if setting.hardware_from == "default" else ""
    batch, world = workload.batch_size, topology.world_size
    word = rank_word(setting.hardware.device)
    domain = f", NVLink domain of {topology.nvlink_domain}" if word == "GPU" else ""
    rows = [
        (
            workload.name,
            f"{plural(len(workload.tables), 'table')}, "
            f"{format_bytes(workload.embedding_bytes)} of embeddings, "
            f"{lookups:,.4g} ids per sample",
        ),
        (
            f"{setting.hardware.name}{default}",
            f"{plural(world, word)} ({plural(topology.hosts, 'host')} of "
            f"{topology.local_world_size}{domain}"
            f"{_network_words(topology)}){_kind_words(setting)}, {_memory_words(setting)}",
        ),
        (
            "batch",
            f"{batch:,} per {word}, {batch * world:,} in total; {workload.train_pipeline} pipeline"
            f"{'' if workload.training else ', inference'}"
            f"{_dense_words(workload)}",
        ),
    ]
    if workload.replica_groups:
        rows.append(("replica groups", _copies_words(setting)))
    return TextTable((), rows)


def _kind_words(setting: Setting) -> str:
    """The kind of network between hosts, where somebody named it."""
    named = setting.network is not None and setting.installed.groups > 1
    return f" over {setting.network.kind}" if named and setting.network else ""


def _network_words(topology: Topology) -> str:
    """Levels of the network that cost something beyond the NICs."""
    words = []
    for level in topology.network:
        facts = []
        if level.oversubscription > 1:
            facts.append(f"{level.oversubscription:g}:1 oversubscribed")
        if level.gbit_s is not None:
            facts.append(f"{level.gbit_s:g} Gbit/s a rank")
        if level.latency_us:
            facts.append(f"+{level.latency_us:g} us")
        if facts:
            words.append(f"; {level.name} joins {level.parts} parts, {', '.join(facts)}")
    return "".join(words)


def _copies_words(setting: Setting) -> str:
    """Say how ranks form groups, and how often their copies are averaged."""
    groups, world = setting.workload.replica_groups, setting.installed.world_size
    assert groups is not None
    if groups.count(world) == 1:
        return f"one group of all {world} ranks, so tables have one copy"
    apart = "in a row" if groups.use_inter_host_allreduce else "with their copies on neighbours"
    averaged = (
        "its weights averaged between forward and backward of every step"
        if groups.fully_sharded
        else f"averaged every {plural(groups.sync_interval, 'step')}"
    )
    return (
        f"{groups.count(world)} groups of {plural(groups.size, 'rank')} {apart}; each has all "
        f"tables, {averaged}"
    )


def _dense_words(workload: Workload) -> str:
    """Say where the dense part is from, if not from the layers in the model file."""
    dense = workload.dense
    if isinstance(dense, DenseArch):
        return ""
    if not isinstance(dense, MeasuredDense):
        return "; dense part as captured from the module"
    batch_size = dense.measured.batch_size
    scaled = batch_size != workload.batch_size
    at = f"; dense part measured at a batch of {batch_size:,}"
    return f"{at}{', scaled in proportion' * scaled}"


def _memory_words(setting: Setting) -> str:
    installed, for_tables = setting.installed, setting.topology
    kind = "HBM" if setting.hardware.device == "cuda" else "memory"
    if any(installed.hbm_cap_bytes):
        return (
            f"{gib_number(min(for_tables.hbm_cap_bytes))} of "
            f"{gib_number(min(installed.hbm_cap_bytes))} GiB {kind} for tables"
        )
    return f"{gib_number(min(for_tables.ddr_cap_bytes))} GiB host memory for tables"
