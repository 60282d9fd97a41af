"""Which embedding tables each rank's fused lookups read, out of a table summary and a plan.

TorchRec runs the tables of a module and a sharding type that agree in data type, pooling and
optimizer as one lookup (`predictor.cost.loads.group_of`), in the order of the module's tables.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from predictor.cost.loads import LookupGroup, group_of, shard_bins
from predictor.errors import InputError
from predictor.model.distribution import Bins, Uniform
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.plan_json import check_plan, load_plan
from predictor.model.workload import Feature, Table, Workload

Law = str | dict[str, Any]
DIGITS = 6
"""Significant, of what describes how ids are drawn."""


@dataclass(frozen=True)
class FeatureIds:
    """What a feature asks of a shard.

    Args:
        share: mean ids of a sample that fall on the shard's rows, >= 0.
        law: how they are drawn: ``uniform``, or rows by popularity as ``counts`` of rows with
            ``weights`` each, the hottest first; ``hot_first`` where low ids are the hot ones.
    """

    share: float
    law: Law


@dataclass(frozen=True)
class LookupTable:
    """A table, or the shard of one, as a lookup reads it."""

    rows: int
    width: int
    features: tuple[FeatureIds, ...]


@dataclass(frozen=True)
class LookupTables:
    """The tables of one lookup in order, and what its arguments say of them.

    Numbers are by feature, as FBGEMM's are: features of one table have its place in the weights.
    """

    tables: tuple[LookupTable, ...]

    @property
    def elements(self) -> int:
        """Of all weights."""
        return sum(table.rows * table.width for table in self.tables)

    @property
    def total_rows(self) -> int:
        """Of all tables."""
        return sum(table.rows for table in self.tables)

    @property
    def rows(self) -> list[int]:
        """Of each feature's table."""
        return self._by_feature([table.rows for table in self.tables])

    @property
    def widths(self) -> list[int]:
        """Of each feature's table."""
        return self._by_feature([table.width for table in self.tables])

    @property
    def first_rows(self) -> list[int]:
        """Rows of the tables before each feature's."""
        return self._by_feature(_before([table.rows for table in self.tables]))

    @property
    def first_elements(self) -> list[int]:
        """Weights of the tables before each feature's."""
        return self._by_feature(_before([table.rows * table.width for table in self.tables]))

    @property
    def shares(self) -> list[float]:
        """Of ids, by feature."""
        return [feature.share for table in self.tables for feature in table.features]

    @property
    def laws(self) -> list[Law]:
        """Of each feature's ids."""
        return [feature.law for table in self.tables for feature in table.features]

    def __str__(self) -> str:
        return (
            f"features: {len(self.rows)}, sum of their widths: {sum(self.widths)}, weights: "
            f"{self.elements:,}"
        )

    def _by_feature(self, values: list[int]) -> list[int]:
        pairs = zip(values, self.tables, strict=True)
        return [value for value, table in pairs for _ in table.features]


@dataclass(frozen=True)
class TableSummary:
    """A model file, and the plan that its tables were trained under.

    Args:
        plan: of `load`; None: each rank has all tables whole.
        sources: what was given, for messages.
    """

    load: Workload
    plan: ShardingPlan | None
    sources: str

    def of_rank(self, rank: int) -> list[LookupTables]:
        """Of each lookup of a rank.

        Raises:
            InputError: the plan has no such rank.
        """
        if self.plan is not None and rank >= self.plan.world_size:
            raise InputError(
                f"--plan is for {self.plan.world_size} ranks, and the trace has rank {rank}; give "
                "the plan that it was recorded with"
            )
        groups: dict[LookupGroup, list[LookupTable]] = defaultdict(list)
        for key, table in zip(self.load.keys, self.load.tables, strict=True):
            planned = _whole(table, rank) if self.plan is None else self.plan.tables[key]
            shards = [shard for shard in planned.shards if shard.rank == rank]
            group = group_of(table, planned, self.load.train_pipeline)
            groups[group] += [_table(table, shard) for shard in shards]
        return [LookupTables(tuple(tables)) for tables in groups.values() if tables]


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
        return TableSummary(load, None, f"{model} without --plan")
    fitting = check_plan(load_plan(plan), load, where=str(plan))
    return TableSummary(load, fitting, f"{model} with {plan}")


def _whole(table: Table, rank: int) -> TablePlan:
    shard = Shard(rank, (0, 0), (table.num_embeddings, table.embedding_dim))
    return TablePlan(ShardingType.TABLE_WISE, ComputeKernel.FUSED, (shard,), table.module)


def _table(table: Table, shard: Shard) -> LookupTable:
    features = tuple(_ids(table, feature, shard) for feature in table.features)
    return LookupTable(*shard.size, features)


def _ids(table: Table, feature: Feature, shard: Shard) -> FeatureIds:
    bins = shard_bins(table, feature, shard)
    share = float(f"{feature.lookups_per_sample * bins.mass:.{DIGITS}g}")
    if isinstance(feature.distribution, Uniform):
        return FeatureIds(share, "uniform")
    return FeatureIds(share, _law(bins) | {"hot_first": feature.id_order == "frequency"})


def _law(bins: Bins) -> dict[str, Any]:
    weights = bins.probs / (bins.mass or 1.0)
    return {
        name: [float(f"{value:.{DIGITS}g}") for value in values]
        for name, values in (("counts", bins.counts), ("weights", weights))
    }


def _before(sizes: list[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]
