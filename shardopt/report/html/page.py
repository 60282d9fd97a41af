"""``shardopt explain --html``: one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from xml.etree.ElementTree import Element

from predictor.model.plan import ShardingPlan, TablePlan
from predictor.model.workload import Table
from predictor.units import format_bytes
from shardopt.api.setting import Setting
from shardopt.explain.differences import table_diffs
from shardopt.explain.explanation import Explanation
from shardopt.formatting import KIND_WORDS, covered, number, percent, plural, ranks_text
from shardopt.report.blocks import Block, Cell, Grid, Heading
from shardopt.report.explain import report
from shardopt.report.hardware import error_words, iteration_words
from shardopt.report.html.nodes import element, node, section, sections, text_of
from shardopt.report.html.timeline import timeline
from shardopt.report.prediction import setting_facts

PLAN_TABLE = "plan"
MAX_OTHERS = 4
"""Other plans whose sharding is shown in the plan table where it differs."""


def page(setting: Setting, explanation: Explanation, versions: Mapping[str, str]) -> str:
    """The page: needs no network and no other file, readable without scripts; names are escaped."""
    given = explanation.given
    head = node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", name="viewport", content="width=device-width, initial-scale=1"),
        node("title", f"{setting.workload.name}: {given.name}"),
        node("style", _file("page.css")),
    )
    first, *others = sections([setting_facts(setting), *report(explanation)])
    aside = "one iteration of the steady state; the critical path is outlined"
    body = node(
        "body",
        node("header", node("h1", setting.workload.name, " ", node("small", given.name))),
        first,
        section("Timeline", aside, timeline(given.prediction)),
        *others,
        plan_section(setting, explanation),
        *sections(_provenance(setting, explanation.critical_groups)),
        _footer(setting, versions),
        node("div", id="tip", role="status"),
        node("script", _file("page.js")),
    )
    return text_of(node("html", head, body, lang="en"))


def _file(name: str) -> str:
    return (resources.files("shardopt.report.html") / name).read_text(encoding="utf-8")


def _provenance(setting: Setting, critical: frozenset[str]) -> list[Block]:
    hardware = setting.hardware
    columns = ["<constants", "<on the critical path", ">1 sigma", "<known error"]
    rows = []
    for name, group in hardware.groups.items():
        origin = group.provenance
        ranges = [covered(quantity, *bounds) for quantity, bounds in origin.range.items()]
        rows.append(
            (
                name,
                "yes" if name in critical else "",
                percent(group.rel_error),
                error_words(origin.error),
                "; ".join(ranges),
                f"{KIND_WORDS[origin.kind]}; from {hardware.origins[name]}",
                " ".join(origin.source.split()),
            )
        )
    return [
        Heading("Provenance", "where the constants come from"),
        *(f"Whole iterations on {hardware.name} {text}." for text in iteration_words(hardware)),
        Grid([*columns, "<fitted for", "<provenance", "<source"], rows),
    ]


def _footer(setting: Setting, versions: Mapping[str, str]) -> Element:
    facts = [f"{name} {version}" for name, version in versions.items()]
    facts.append(f"hardware {setting.hardware_name} ({setting.hardware_from})")
    if setting.workload.sha256:
        facts.append(f"model sha256 {setting.workload.sha256}")
    facts += setting.notes
    return node("footer", node("p", " · ".join(facts)))


def plan_section(setting: Setting, explanation: Explanation) -> Element:
    """The table of the explained plan, which sorts and filters, and what differs in the others."""
    given, others = explanation.given, explanation.others[:MAX_OTHERS]
    workload = setting.workload
    columns = ["<table", ">rows", ">dim", ">ids/sample", "<type", "<kernel", ">shards", "<ranks"]
    columns += [">weights", ">forward ms", ">backward ms", *(f"<in {one.name}" for one in others)]
    differing = [_differing(given.plan, other.plan) for other in others]
    rows = []
    for key, table in zip(workload.keys, workload.tables, strict=True):
        row = _row(key, table, given.plan.tables[key], *explanation.table_times[key])
        rows.append([*row, *(found.get(key, "same") for found in differing)])
    aside = f"{plural(len(rows), 'table')}; times of a table's shards alone, on the slowest rank"
    if len(explanation.others) > MAX_OTHERS:
        aside += f", with the first {MAX_OTHERS} of {len(explanation.others)} other plans"
    grid = element(Grid(columns, rows, name=PLAN_TABLE))
    return section("Plan", aside, _filters(given.plan), grid)


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
    return [
        key,
        f"{table.num_embeddings:,}",
        str(table.embedding_dim),
        f"{table.lookups_per_sample:g}",
        plan.sharding_type.short,
        plan.compute_kernel.value,
        str(len(plan.shards)),
        Cell(ranks_text(plan.ranks), min(plan.ranks)),
        Cell(format_bytes(table.weight_bytes), table.weight_bytes),
        number(forward),
        number(backward),
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
