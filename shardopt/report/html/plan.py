"""The tables of the page: the plan, one row per table, and plans side by side."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from predictor.model.plan import ShardingPlan, TablePlan
from predictor.model.workload import Table, Workload
from predictor.predict import PHASES
from predictor.units import format_bytes
from shardopt.explain.differences import table_diffs
from shardopt.explain.explanation import Explanation, PredictedPlan
from shardopt.formatting import (
    hbm_use,
    interval,
    ms,
    number,
    phase_words,
    plural,
    ranks_text,
    times,
    type_mix,
)
from shardopt.report.html.nodes import Cell, Column, Row, bar, grid, node, section

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
