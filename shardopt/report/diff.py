"""What differs between two plans, as data and on the console."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from predictor.model.plan import ShardingPlan, TablePlan
from shardopt.explain.differences import TableDiff, header_diffs, table_diffs
from shardopt.formatting import ms, plural, ranks_text, times, type_mix
from shardopt.report.console import heading, line, show, table

ABSENT = "-"


def diff_object(a: ShardingPlan, b: ShardingPlan) -> dict[str, Any]:
    """``shardopt diff --json``.

    Keys:
        same: no table differs and both are for the same ranks.
        header: key of plan.json -> ``[value in A, value in B]``, where they differ.
        tables: key -> ``differs`` (of ``type``, ``kernel``, ``split``, ``ranks``, ``parameters``,
            ``tables`` when one plan lacks it), ``a`` and ``b``: ``sharding_type``,
            ``compute_kernel``, ``ranks``, ``columns`` of a shard; null where a plan lacks it.
        tables_same: number of tables that do not differ.
    """
    diffs = table_diffs(a, b)
    header = header_diffs(a, b)
    ranks = ("world_size", "local_world_size")
    return {
        "same": not diffs and not any(key in header for key in ranks),
        "header": {key: list(values) for key, values in header.items()},
        "tables": {
            d.table: {"differs": list(d.what), "a": _side(d.a), "b": _side(d.b)} for d in diffs
        },
        "tables_same": len({*a.tables, *b.tables}) - len(diffs),
    }


def _side(plan: TablePlan | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    return {
        "sharding_type": plan.sharding_type.value,
        "compute_kernel": plan.compute_kernel.value,
        "ranks": list(plan.ranks),
        "columns": plan.shards[0].size[1],
    }


def show_diff(console: Console, names: tuple[str, str], a: ShardingPlan, b: ShardingPlan) -> None:
    """The whole report."""
    diffs = table_diffs(a, b)
    console.print()
    for side, name, plan in (("A", names[0], a), ("B", names[1], b)):
        line(console, f"{side}  {name}: {type_mix(plan)} on {plural(plan.world_size, 'rank')}")
    _show_header(console, header_diffs(a, b))
    same = len({*a.tables, *b.tables}) - len(diffs)
    if not diffs:
        line(console, f"No table differs ({same}).")
        return
    heading(console, f"{plural(len(diffs), 'table')} differ, {same} do not")
    made = table("~table", "~differs in", "~A", "~B")
    for diff in diffs:
        made.add_row(diff.table, ", ".join(diff.what), _words(diff, diff.a), _words(diff, diff.b))
    show(console, made)


def _show_header(console: Console, header: dict[str, tuple[Any, Any]]) -> None:
    times_ms = header.get("iteration_ms")
    if times_ms and all(isinstance(value, int | float) and value > 0 for value in times_ms):
        a, b = times_ms
        line(console, f"Predicted when written: A {ms(a)}, B {ms(b)} ({times(b / a)}).")
    for key, (left, right) in header.items():
        if key not in ("iteration_ms", "lower_bound_ms", "seed"):
            line(console, f"{key}: {_value(left)} in A, {_value(right)} in B")


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
        given: Sequence[str] = [f"{k} {v}" for k, v in plan.parameters.items()]
        parts.append(f"({', '.join(given) or 'no parameters'})")
    return " ".join(parts)


def _split(plan: TablePlan) -> str:
    widths = {s.size[1] for s in plan.shards}
    columns = "/".join(str(w) for w in sorted(widths))
    return f"{plural(len(plan.shards), 'shard')} of {columns} columns"
