"""Differences between two plans, and the shards that a new plan moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from predictor.model.plan import PARAMETER_FIELDS, ShardingPlan, ShardingType, TablePlan

COLUMN_TYPES = (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE)


@dataclass(frozen=True)
class TableDiff:
    """One table under plan A and under plan B; None where a plan does not place it."""

    table: str
    a: TablePlan | None
    b: TablePlan | None

    @property
    def what(self) -> tuple[str, ...]:
        """Differing parts: ``type``, ``kernel``, ``split``, ``ranks``, ``parameters``."""
        a, b = self.a, self.b
        if a is None or b is None:
            return ("tables",)
        differs = {
            "type": _type(a) != _type(b),
            "kernel": a.compute_kernel != b.compute_kernel,
            "split": [(s.offset, s.size) for s in a.shards]
            != [(s.offset, s.size) for s in b.shards],
            "ranks": a.ranks != b.ranks,
            "parameters": any(a.parameters.get(f) != b.parameters.get(f) for f in PARAMETER_FIELDS),
        }
        return tuple(name for name, differ in differs.items() if differ)


def _type(plan: TablePlan) -> ShardingType:
    """A table in one shard is table-wise, whatever its plan calls it."""
    whole = len(plan.shards) == 1 and plan.sharding_type in COLUMN_TYPES
    return ShardingType.TABLE_WISE if whole else plan.sharding_type


def table_diffs(a: ShardingPlan, b: ShardingPlan) -> list[TableDiff]:
    """List the tables that differ, in the order of A, then those that B alone places."""
    keys = dict.fromkeys((*a.tables, *b.tables))
    diffs = [TableDiff(key, a.tables.get(key), b.tables.get(key)) for key in keys]
    return [diff for diff in diffs if diff.what]


def header_diffs(a: ShardingPlan, b: ShardingPlan) -> dict[str, tuple[Any, Any]]:
    """Return the differences outside the tables, but for how the plans were made."""
    in_a = {**a.meta, "world_size": a.world_size, "local_world_size": a.local_world_size}
    in_b = {**b.meta, "world_size": b.world_size, "local_world_size": b.local_world_size}
    keys = [key for key in dict.fromkeys((*in_a, *in_b)) if key != "made_by"]
    return {k: (in_a.get(k), in_b.get(k)) for k in keys if in_a.get(k) != in_b.get(k)}
