"""Matches recorded lookups with their embedding tables, out of a table summary and a plan.

TorchRec runs the tables of a module and a sharding type that agree in data type, pooling and
optimizer as one lookup (`predictor.model.lookup_group.group_of`), in the order of the module's
tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from predictor.cost.loads import shard_bins
from predictor.errors import InputError
from predictor.model.distribution import Uniform
from predictor.model.lookup_group import LookupGroup, group_of
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.plan_check import check_plan
from predictor.model.plan_json import load_plan
from predictor.model.workload import Feature, Table, Workload

IdSkew = str | dict[str, Any]
DIGITS = 6
"""Significant digits of the distributions of ids."""


@dataclass(frozen=True)
class LookupTables:
    """The tables of one lookup in order, with sizes and ids by feature.

    Lists are by feature, as FBGEMM's are: features of one table have its place in the weights.

    Args:
        first_rows: rows of the tables before the feature's.
        first_elements: weights of the tables before the feature's.
        shares: mean ids of a sample that fall on the shard's rows, >= 0; empty where unknown.
        skews: distribution of ids: ``uniform``, or rows by popularity as ``counts`` of rows with
            ``weights`` each, the hottest first; ``hot_first`` where low ids are the hot ones.
        total_rows: of all tables.
        elements: of all weights.
    """

    rows: list[int]
    widths: list[int]
    first_rows: list[int]
    first_elements: list[int]
    shares: list[float]
    skews: list[IdSkew]
    total_rows: int
    elements: int

    def __str__(self) -> str:
        return (
            f"features: {len(self.rows)}, sum of their widths: {sum(self.widths)}, weights: "
            f"{self.elements:,}"
        )


def join_tables(
    tables: Iterable[tuple[int, int, Sequence[tuple[float, IdSkew]]]], *, with_ids: bool = True
) -> LookupTables:
    """Join tables into one lookup.

    Args:
        tables: rows, width, and share and skew of each feature.
        with_ids: False: shares and skews are unknown.
    """
    features = []
    total_rows = elements = 0
    for count, width, ids in tables:
        features += [(count, width, total_rows, elements, *id_shares) for id_shares in ids]
        total_rows += count
        elements += count * width
    columns: list[list[Any]] = [list(column) for column in zip(*features, strict=True)]
    rows, widths, first_rows, first_elements, shares, skews = columns
    if not with_ids:
        shares, skews = [], []
    return LookupTables(
        rows, widths, first_rows, first_elements, shares, skews, total_rows, elements
    )


@dataclass(frozen=True)
class TableSummary:
    """A model file, and the plan that its tables were trained under.

    Args:
        plan: of `load`; None: each rank has all tables whole.
        sources: names of the files, for messages.
    """

    load: Workload
    plan: ShardingPlan | None
    sources: str

    def of_rank(self, rank: int) -> list[LookupTables]:
        """Return the tables of each lookup of a rank.

        Raises:
            InputError: the plan has no such rank.
        """
        if self.plan is not None and rank >= self.plan.world_size:
            raise InputError(
                f"the plan is for {self.plan.world_size} ranks, and the trace has rank {rank}; "
                "give the plan that it was recorded with",
                inputs=("plan",),
            )
        groups = defaultdict[LookupGroup, list[Any]](list)
        for key, table in zip(self.load.keys, self.load.tables, strict=True):
            planned = _whole(table, rank) if self.plan is None else self.plan.tables[key]
            shards = [shard for shard in planned.shards if shard.rank == rank]
            group = group_of(table, planned, self.load.train_pipeline)
            groups[group] += [
                (*shard.size, [_ids(table, feature, shard) for feature in table.features])
                for shard in shards
            ]
        return [join_tables(tables) for tables in groups.values() if tables]


def load_tables(model: Path, plan: Path | None) -> TableSummary:
    """Read a table summary.

    Args:
        model: a model.yaml, such as `shardopt stats` writes.
        plan: of shardopt or TorchRec.

    Raises:
        InputError: a file cannot be read, or the plan does not fit the model.
    """
    from shardopt.config.model import load_model

    load = load_model(model)
    if plan is None:
        return TableSummary(load, None, f"{model} without a plan")
    fitting = check_plan(load_plan(plan), load, where=str(plan))
    return TableSummary(load, fitting, f"{model} with {plan}")


def _whole(table: Table, rank: int) -> TablePlan:
    shard = Shard(rank, (0, 0), (table.num_embeddings, table.embedding_dim))
    return TablePlan(ShardingType.TABLE_WISE, ComputeKernel.FUSED, (shard,), table.module)


def _ids(table: Table, feature: Feature, shard: Shard) -> tuple[float, IdSkew]:
    """Return the share and skew of a feature's ids on a shard."""
    bins = shard_bins(table, feature, shard)
    share = _round(feature.lookups_per_sample * bins.mass)
    if isinstance(feature.distribution, Uniform):
        return share, "uniform"
    weights = bins.probs / (bins.mass or 1.0)
    skew = {"counts": [*map(_round, bins.counts)], "weights": [*map(_round, weights)]}
    return share, {**skew, "hot_first": feature.id_order == "frequency"}


def _round(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


WEIGHTS = ("dev_weights", "uvm_weights", "host_weights")
"""Weights of a lookup, by the memory that they lie in; a cache holds copies."""


class UnmatchedError(InputError):
    """A table summary does not have the tables of a recorded lookup."""


class MatchedTables:
    """The tables of one rank's lookups, each given to the first lookup that fits it.

    Args:
        summary: of all ranks.
    """

    def __init__(self, summary: TableSummary, rank: int) -> None:
        self.rank, self.sources = rank, summary.sources
        self.groups = summary.of_rank(rank)
        self._left = list(self.groups)
        self._of: dict[Hashable, LookupTables] = {}

    def of(self, op: str, weights: Hashable, arguments: Mapping[str, Any]) -> LookupTables:
        """Return the tables of a lookup or of its backward op.

        Args:
            weights: key of the tensor of the weights, which only one lookup has.
            arguments: shapes of tensors and plain values by FBGEMM's names.

        Raises:
            UnmatchedError: no tables of the rank agree with the trace.
        """
        if weights not in self._of:
            group_tables = next((group for group in self._left if fits(group, arguments)), None)
            if group_tables is None:
                raise UnmatchedError(self._problem(op, arguments), inputs=("tables", "plan"))
            self._left.remove(group_tables)
            self._of[weights] = group_tables
        return self._of[weights]

    def _problem(self, op: str, arguments: Mapping[str, Any]) -> str:
        remaining = "; ".join(map(str, self._left)) or "no more lookups"
        return (
            f"rank {self.rank}: {op}: the trace has {_describe_recorded(arguments)}; "
            f"{self.sources} gives for lookups of this rank: {remaining}. Give the model file and "
            "the plan that the trace was recorded with, or no model file"
        )


def features_of(arguments: Mapping[str, Any]) -> int:
    """Return the number of features that a lookup reads, >= 1."""
    marks = arguments.get("D_offsets") or arguments["hash_size_cumsum"]
    return max(marks[0] - 1, 1)


def elements_of(arguments: Mapping[str, Any]) -> int:
    """Return the number of weights of a lookup; 0 where the trace does not say."""
    shapes = [shape for name in WEIGHTS for shape in _shapes(arguments.get(name))]
    return sum(map(prod, shapes or _shapes(arguments.get("weights"))[:1]))


def _shapes(value: Any) -> list[tuple[int, ...]]:
    listed = value if isinstance(value, list) else [value]
    return [shape for shape in listed if shape]


def fits(group: LookupTables, arguments: Mapping[str, Any]) -> bool:
    """Return True if these tables can be those of a lookup."""
    widths = group.widths
    total, largest = arguments.get("total_D"), arguments.get("max_D")
    return (
        len(widths) == features_of(arguments)
        and (total is None or sum(widths) == total)
        and (largest is None or max(widths) == largest)
        and elements_of(arguments) in (0, group.elements)
    )


def _describe_recorded(arguments: Mapping[str, Any]) -> str:
    total, elements = arguments.get("total_D"), elements_of(arguments)
    parts = [f"features: {features_of(arguments)}"]
    parts += [] if total is None else [f"sum of their widths: {total}"]
    parts += [f"weights: {elements:,}"] if elements else []
    return ", ".join(parts)
