"""``shardopt explain --html``: one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from xml.etree.ElementTree import Element

from predictor.model.plan import ShardingPlan, TablePlan
from predictor.model.workload import Table, Workload
from predictor.predict import PHASES, Prediction
from predictor.units import format_bytes
from shardopt.api.setting import Setting
from shardopt.explain.differences import table_diffs
from shardopt.explain.explanation import Explanation, PredictedPlan
from shardopt.formatting import (
    KIND_WORDS,
    covered,
    gib_number,
    hbm_use,
    interval,
    memory_use,
    ms,
    number,
    percent,
    phase_words,
    plural,
    range_lines,
    ranks_text,
    times,
    type_mix,
)
from shardopt.report.explain import in_words, signed, signed_percent
from shardopt.report.hardware import error_words, iteration_words
from shardopt.report.html.nodes import Cell, Column, Row, bar, grid, node, section, text_of
from shardopt.report.html.timeline import timeline
from shardopt.report.prediction import (
    RankTimes,
    by_bytes_text,
    misfit_text,
    nearly_full_text,
    provenance_text,
    selected,
)

MAX_BARS = 128
"""Ranks whose bars are drawn; of more, the busiest and the idlest."""

_RANK_PARTS = (
    ("embedding forward", "p-embedding_forward"),
    ("embedding backward", "p-embedding_backward"),
    ("dense and other", "p-dense_forward"),
    ("idle", "idle"),
)


def page(setting: Setting, explanation: Explanation, versions: Mapping[str, str]) -> str:
    """The page: needs no network and no other file, readable without scripts; names are escaped."""
    given = explanation.given
    title = f"{setting.workload.name}: {given.name}"
    head = node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", name="viewport", content="width=device-width, initial-scale=1"),
        node("title", title),
        node("style", _file("page.css")),
    )
    body = node(
        "body",
        _header(setting, explanation),
        _words_section(explanation),
        _timeline_section(given.prediction),
        _ranks_section(given.prediction),
        _changes_section(explanation),
        _what_if_section(explanation),
        comparison_section(explanation.plans) if explanation.others else "",
        plan_section(setting.workload, explanation),
        _provenance_section(setting, explanation.critical_groups),
        _footer(setting, versions),
        node("div", id="tip", role="status"),
        node("script", _file("page.js")),
    )
    return text_of(node("html", head, body, lang="en"))


def _file(name: str) -> str:
    return (resources.files("shardopt.report.html") / name).read_text(encoding="utf-8")


def _header(setting: Setting, explanation: Explanation) -> Element:
    workload, topology = setting.workload, setting.topology
    prediction = explanation.given.prediction
    facts = (
        f"{plural(len(workload.tables), 'table')}, "
        f"{gib_number(workload.embedding_bytes)} GiB of embeddings",
        f"{setting.hardware.title}; {plural(topology.world_size, 'rank')} on "
        f"{plural(topology.hosts, 'host')}",
        f"{workload.batch_size:,} samples per rank; {workload.train_pipeline} pipeline",
    )
    return node(
        "header",
        node("h1", workload.name, " ", node("small", explanation.given.name)),
        node(
            "p",
            node("strong", ms(prediction.iteration_ms), class_="headline"),
            f" predicted per iteration (90 % interval {interval(prediction.interval_ms)} ms). "
            f"{provenance_text(prediction)}",
        ),
        node("p", " · ".join(facts), class_="dim"),
        *_warnings(prediction),
    )


def _warnings(prediction: Prediction) -> list[Element]:
    misfit = misfit_text(prediction)
    lines = [f"This plan {misfit}."] if misfit else []
    tight = nearly_full_text(prediction.memory)
    lines += [f"Memory: {tight}."] if tight else []
    lines += [f"Extrapolated: {text}." for text in range_lines(prediction.out_of_range)]
    lines += filter(None, [by_bytes_text(prediction.dense_ops_by_bytes)])
    return [node("p", text, class_="warning") for text in lines]


def _words_section(explanation: Explanation) -> Element:
    prediction = explanation.given.prediction
    whole = prediction.iteration_ms
    rows: list[Row] = [
        [
            phase_words(phase),
            number(part),
            percent(part / whole),
            bar([(part, f"p-{phase}", f"{phase_words(phase)}\n{ms(part)}")], whole),
        ]
        for phase, part in prediction.breakdown.items()
    ]
    columns = [Column("phase"), Column("ms", True), Column("share", True), Column("")]
    return section(
        "Where the time goes",
        "along the critical path",
        node("ul", *(node("li", sentence) for sentence in in_words(explanation))),
        grid(columns, rows),
    )


def _timeline_section(prediction: Prediction) -> Element:
    aside = "one iteration of the steady state; the critical path is outlined"
    return section("Timeline", aside, timeline(prediction))


def _ranks_section(prediction: Prediction) -> Element:
    times = [RankTimes.of(load, prediction.iteration_ms) for load in prediction.per_rank]
    shown = selected(times, MAX_BARS)
    uses_hbm = any(rank.hbm_cap_bytes for rank in prediction.memory)
    columns = [
        Column("rank", True),
        Column("compute in one iteration"),
        Column("emb fwd", True),
        Column("emb bwd", True),
        Column("comm", True),
        Column("idle", True),
        Column("HBM GiB" if uses_hbm else "DDR GiB", True),
        Column("memory"),
    ]
    rows: list[Row] = []
    for time in shown:
        values = (time.embedding_forward, time.embedding_backward, time.other, time.idle)
        parts = [
            (value, kind, f"{name}\n{ms(value)}")
            for value, (name, kind) in zip(values, _RANK_PARTS, strict=True)
        ]
        memory = prediction.memory[time.rank]
        used, cap = memory_use(memory)
        shown_use = f"{gib_number(used)} / {gib_number(cap)}"
        full = [(used, "used" if used <= cap else "misfit", f"{shown_use} GiB")]
        rows.append(
            [
                Cell(str(time.rank), time.rank),
                Cell(bar(parts, prediction.iteration_ms), -time.idle),
                *(
                    Cell(number(value), value)
                    for value in (
                        time.embedding_forward,
                        time.embedding_backward,
                        time.comm,
                        time.idle,
                    )
                ),
                Cell(shown_use, used),
                Cell(bar(full, max(cap, used)), used),
            ]
        )
    legend = [
        node("span", node("i", class_=kind), f" {name}", class_="key") for name, kind in _RANK_PARTS
    ]
    some = f"; {len(shown)} of {len(times)} are shown" if len(shown) < len(times) else ""
    return section(
        "Ranks",
        f"load and memory{some}",
        node("p", *legend),
        grid(columns, rows, sortable="ranks"),
    )


def _changes_section(explanation: Explanation) -> Element:
    changes, before = explanation.changes, explanation.given.prediction.iteration_ms
    if not changes.found:
        return section("What would help most", "", node("p", f"{changes.none_words.capitalize()}."))
    columns = [
        Column("change"),
        Column("saves ms", True),
        Column("share", True),
        Column("then ms", True),
    ]
    rows: list[Row] = [
        [c.words, number(c.saving_ms), percent(c.saving_ms / before), number(c.iteration_ms)]
        for c in changes.found
    ]
    aside = f"best of {plural(changes.tried, 'change')} tried, each predicted on its own"
    return section("What would help most", aside, grid(columns, rows))


def _what_if_section(explanation: Explanation) -> Element:
    before = explanation.given.prediction.iteration_ms
    columns = [Column("change"), Column("ms", True), Column("change ms", True), Column("", True)]
    rows: list[Row] = [
        [
            item.change,
            number(item.iteration_ms),
            Cell(signed(item.change_ms), item.change_ms),
            signed_percent(item.change_ms / before),
        ]
        for item in explanation.what_if
    ]
    return section(
        "Sensitivity", "the same plan, predicted with one thing changed", grid(columns, rows)
    )


def _provenance_section(setting: Setting, critical: frozenset[str]) -> Element:
    hardware = setting.hardware
    columns = [
        Column("constants"),
        Column("on the critical path"),
        Column("1 sigma", True, "assumed error of times that use this group"),
        Column("known error (on rows not used for fitting)"),
        Column("fitted for"),
        Column("provenance"),
    ]
    rows: list[Row] = []
    for name, group in hardware.groups.items():
        origin = group.provenance
        ranges = [covered(quantity, *bounds) for quantity, bounds in origin.range.items()]
        source = node("details", node("summary", "source"), " ".join(origin.source.split()))
        kind = f"{KIND_WORDS[origin.kind]}; from {hardware.origins[name]}"
        rows.append(
            [
                name,
                "yes" if name in critical else "",
                percent(group.rel_error),
                "not validated" if origin.error is None else error_words(origin.error),
                "; ".join(ranges),
                node("div", kind, source),
            ]
        )
    return section(
        "Provenance",
        "where the constants come from",
        *(
            node("p", f"Whole iterations on {hardware.name} {text}.")
            for text in iteration_words(hardware)
        ),
        grid(columns, rows),
    )


def _footer(setting: Setting, versions: Mapping[str, str]) -> Element:
    facts = [f"{name} {version}" for name, version in versions.items()]
    facts.append(f"hardware {setting.hardware_name} ({setting.hardware_from})")
    if setting.workload.sha256:
        facts.append(f"model sha256 {setting.workload.sha256}")
    facts += setting.notes
    return node("footer", node("p", " · ".join(facts)))


PLAN_TABLE = "plan"
MAX_OTHERS = 4
"""Other plans whose sharding is shown in the plan table where it differs."""


def plan_section(workload: Workload, explanation: Explanation) -> Element:
    """The table of the explained plan, which sorts and filters, and what differs in the others."""
    given, others = explanation.given, explanation.others[:MAX_OTHERS]
    columns = [
        Column("table"),
        Column("rows", True),
        Column("dim", True),
        Column("ids/sample", True, "mean ids per sample, summed over its features"),
        Column("type"),
        Column("kernel"),
        Column("shards", True),
        Column("ranks"),
        Column("weights", True, "of the whole table, without optimizer state"),
        Column(
            "forward ms",
            True,
            "of its shards alone, on the rank where they take longest",
        ),
        Column(
            "backward ms",
            True,
            "of its shards alone, on the rank where they take longest",
        ),
        *(Column(f"in {other.name}") for other in others),
    ]
    differing = [_differing(given.plan, other.plan) for other in others]
    rows: list[Row] = []
    for key, table in zip(workload.keys, workload.tables, strict=True):
        row = _row(key, table, given.plan.tables[key], *explanation.table_times[key])
        rows.append([*row, *(found.get(key, "same") for found in differing)])
    aside = f"{plural(len(rows), 'table')}; click a column title to sort"
    if len(explanation.others) > MAX_OTHERS:
        aside += f", with the first {MAX_OTHERS} of {len(explanation.others)} other plans"
    return section(
        "Plan",
        aside,
        _filters(given.plan),
        grid(columns, rows, sortable=PLAN_TABLE),
    )


def _filters(plan: ShardingPlan) -> Element:
    types = sorted({table.sharding_type.short for table in plan.tables.values()})
    choices = [node("option", "all types", value="")]
    choices += [node("option", kind, value=kind) for kind in types]
    return node(
        "p",
        node("input", type="search", id="filter", placeholder="filter by any text"),
        " ",
        node("select", *choices, id="type", aria_label="sharding type"),
        " ",
        node("input", type="number", id="rank", min=0, max=plan.world_size - 1, placeholder="rank"),
        " ",
        node("output", "", id="count"),
        class_="tool needs-js",
    )


def _row(
    key: str, table: Table, plan: TablePlan, forward: float, backward: float
) -> list[Cell | str]:
    ids = table.lookups_per_sample
    return [
        key,
        Cell(f"{table.num_embeddings:,}", table.num_embeddings),
        Cell(str(table.embedding_dim), table.embedding_dim),
        Cell(f"{ids:g}", ids),
        plan.sharding_type.short,
        plan.compute_kernel.value,
        Cell(str(len(plan.shards)), len(plan.shards)),
        Cell(ranks_text(plan.ranks), min(plan.ranks)),
        Cell(format_bytes(table.weight_bytes), table.weight_bytes),
        Cell(number(forward), forward),
        Cell(number(backward), backward),
    ]


def _differing(plan: ShardingPlan, other: ShardingPlan) -> dict[str, str]:
    """Table -> its sharding in another plan, where that differs."""
    found = {}
    for diff in table_diffs(plan, other):
        if diff.b is not None:
            by_column = len({shard.offset[1] for shard in diff.b.shards}) > 1
            split = f" of {diff.b.shards[0].size[1]} columns" if by_column else ""
            found[diff.table] = f"{diff.b.sharding_type.short}{split} on {ranks_text(diff.b.ranks)}"
    return found


def comparison_section(plans: Sequence[PredictedPlan]) -> Element:
    """Plans side by side: times, memory, mix, and where the time of each goes."""
    best = min(item.prediction.iteration_ms for item in plans)
    longest = max(item.prediction.iteration_ms for item in plans)
    columns = [
        Column("plan"),
        Column("ms", True),
        Column("vs best"),
        Column("90 % interval"),
        Column("HBM GiB", True),
        Column("sharding"),
        Column("where the time goes"),
    ]
    rows: list[Row] = []
    for item in plans:
        prediction = item.prediction
        value = prediction.iteration_ms
        parts = [
            (part, f"p-{phase}", f"{phase_words(phase)}\n{ms(part)}")
            for phase, part in prediction.breakdown.items()
        ]
        fit = "" if all(rank.fits for rank in prediction.memory) else " (does not fit)"
        rows.append(
            [
                item.name,
                Cell(number(value), value),
                Cell("best" if value == best else times(value / best), value),
                Cell(interval(prediction.interval_ms), value),
                hbm_use(prediction.memory) + fit,
                type_mix(item.plan),
                Cell(bar(parts, longest), value),
            ]
        )
    return section(
        "Plans",
        "predicted iteration time for the same model and hardware",
        grid(columns, rows, sortable="plans"),
        _phases(plans),
    )


def _phases(plans: Sequence[PredictedPlan]) -> Element:
    """One row per phase, one column per plan."""
    columns = [Column("phase"), *(Column(item.name, True) for item in plans)]
    rows: list[Row] = []
    for phase in PHASES:
        parts = [item.prediction.breakdown.get(phase, 0.0) for item in plans]
        if any(parts):
            rows.append([phase_words(phase), *(Cell(number(p) if p else "", p) for p in parts)])
    return grid(columns, rows)
