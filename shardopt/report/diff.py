"""Report of the differences between two plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from predictor.model.plan import ShardingPlan, TablePlan
from shardopt.api.json_object import JsonObject, key
from shardopt.explain.differences import TableDiff, header_diffs, table_diffs
from shardopt.formatting import ms, plural, ranks_text, times, type_mix
from shardopt.report.blocks import Block, Heading, TextTable, View

ABSENT = "-"


class TableSide(JsonObject):
    """A table in one of the plans."""

    sharding_type: str
    compute_kernel: str
    ranks: tuple[int, ...]
    columns: int = key("Of a shard.", "shards", 0, "size", 1)


class TableDifference(JsonObject):
    """A table that two plans shard or place differently."""

    differs: list[str] = key(
        "``type``, ``kernel``, ``split``, ``ranks``, ``parameters``, or ``tables`` where one plan "
        "lacks it.",
        "what",
    )
    a: TableSide | None = key("Null where a plan lacks it.")
    b: TableSide | None


class DiffAnswer(JsonObject):
    """``shardopt diff``."""

    same: bool = key("No table differs and both are for the same ranks.")
    header: dict[str, tuple[Any, Any]] = key("Key of plan.json -> value in A and in B.")
    tables: dict[str, TableDifference]
    tables_same: int = key("Number of tables that do not differ.")


def diff_view(names: tuple[str, str], a: ShardingPlan, b: ShardingPlan) -> View:
    """``shardopt diff``."""
    diffs, header = table_diffs(a, b), header_diffs(a, b)
    same = len({*a.tables, *b.tables}) - len(diffs)
    answer = DiffAnswer.model_validate(
        {
            "same": not diffs and not {"world_size", "local_world_size"} & header.keys(),
            "header": header,
            "tables": {diff.table: diff for diff in diffs},
            "tables_same": same,
        }
    )
    report: list[Block] = [
        "",
        *(
            f"{side}  {name}: {type_mix(plan)} on {plural(plan.world_size, 'rank')}"
            for side, name, plan in zip("AB", names, (a, b), strict=True)
        ),
        *_header_lines(header),
    ]
    if diffs:
        rows = [(d.table, ", ".join(d.what), _words(d, d.a), _words(d, d.b)) for d in diffs]
        differ = "differs" if len(diffs) == 1 else "differ"
        do = "does" if same == 1 else "do"
        report.append(Heading(f"{plural(len(diffs), 'table')} {differ}, {same} {do} not"))
        report.append(TextTable(["~table", "~differs in", "~A", "~B"], rows))
    else:
        report.append(f"No table differs ({same}).")
    return View(answer, report)


def _header_lines(header: dict[str, tuple[Any, Any]]) -> Iterator[str]:
    a, b = header.get("iteration_ms", (None, None))
    if isinstance(a, int | float) and isinstance(b, int | float) and min(a, b) > 0:
        yield f"Predicted when written: A {ms(a)}, B {ms(b)} ({times(b / a)})."
    for name, (value_a, value_b) in header.items():
        if name not in ("iteration_ms", "lower_bound_ms", "seed"):
            yield f"{name}: {_value(value_a)} in A, {_value(value_b)} in B"


def _value(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {str(v)[:20]}" for k, v in value.items())
    return "nothing" if value is None else str(value)


def _words(diff: TableDiff, plan: TablePlan | None) -> str:
    """``CW32 on 0-3``, with kernel and parameters only where they differ."""
    if plan is None:
        return ABSENT
    parts = [plan.sharding_type.short]
    if "split" in diff.what:
        parts.append(_split(plan))
    if "kernel" in diff.what:
        parts.append(plan.compute_kernel.value)
    parts.append(f"on {ranks_text(plan.ranks)}")
    if "parameters" in diff.what:
        parameters: Sequence[str] = [f"{k} {v}" for k, v in plan.parameters.items()]
        parts.append(f"({', '.join(parameters) or 'no parameters'})")
    return " ".join(parts)


def _split(plan: TablePlan) -> str:
    widths = {s.size[1] for s in plan.shards}
    columns = "/".join(str(w) for w in sorted(widths))
    return f"{plural(len(plan.shards), 'shard')} of {columns} columns"
