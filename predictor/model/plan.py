"""A sharding plan: every shard of every table with its rank. More general than TorchRec's.

A row split over a subset of the ranks can be written and predicted here although TorchRec cannot
run it; the conversion to TorchRec refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias


class ShardingType(StrEnum):
    """TorchRec's sharding types, by the values of its `ShardingType` enum."""

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID_SHARD = "grid_shard"

    @property
    def short(self) -> str:
        return _SHORT[self]


_SHORT = {
    ShardingType.DATA_PARALLEL: "DP",
    ShardingType.TABLE_WISE: "TW",
    ShardingType.COLUMN_WISE: "CW",
    ShardingType.ROW_WISE: "RW",
    ShardingType.TABLE_ROW_WISE: "TWRW",
    ShardingType.TABLE_COLUMN_WISE: "TWCW",
    ShardingType.GRID_SHARD: "GRID",
}


ROW_SPLITS = frozenset(
    {ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD}
)
"""Types whose shards have part of a table's rows and give partial sums; the last ones may be empty,
as blocks are of ceil(rows / ranks)."""


SERVED = (ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE)
"""Types of TorchRec's inference sharding (`BaseQuantEmbeddingSharder` in embedding_types.py)."""


class ComputeKernel(StrEnum):
    """TorchRec's compute kernels that shardopt plans, by the values of `EmbeddingComputeKernel`.

    Those of dynamicemb, hash tables whose rows hold weights and states together, are one
    ``customized_kernel`` there (NVIDIA/recsys-examples, corelib/dynamicemb): with all values on the
    device, with all on the host behind a cache, or with a share of them on each.

    Those of key-value tables keep rows in a store of the host, on SSD or in memory, behind a cache
    on the device (``SSDTableBatchedEmbeddingBags`` of FBGEMM); a virtual table has only rows whose
    ids have occurred.
    """

    DENSE = "dense"
    FUSED = "fused"
    FUSED_UVM = "fused_uvm"
    FUSED_UVM_CACHING = "fused_uvm_caching"
    DYNAMICEMB = "dynamicemb"
    DYNAMICEMB_CACHING = "dynamicemb_caching"
    DYNAMICEMB_HYBRID = "dynamicemb_hybrid"
    KEY_VALUE = "key_value"
    SSD_VIRTUAL_TABLE = "ssd_virtual_table"
    DRAM_VIRTUAL_TABLE = "dram_virtual_table"
    DRAM_SSD_VIRTUAL_TABLE = "dram_ssd_virtual_table"

    @property
    def is_hashed(self) -> bool:
        """A kernel of dynamicemb."""
        return self in HASHED

    @property
    def is_stored(self) -> bool:
        """Rows are in a key-value store."""
        return self in STORED

    @property
    def is_cached(self) -> bool:
        """Rows are on the host, behind a cache on the device."""
        uvm, hashed = ComputeKernel.FUSED_UVM_CACHING, ComputeKernel.DYNAMICEMB_CACHING
        return self in (uvm, hashed, *STORED)

    @property
    def has_load_factor(self) -> bool:
        """A share of the rows that can be chosen is on the device."""
        hybrid = self is ComputeKernel.DYNAMICEMB_HYBRID
        return hybrid or (self.is_cached and self not in STORED[1:])


HASHED = (
    ComputeKernel.DYNAMICEMB,
    ComputeKernel.DYNAMICEMB_CACHING,
    ComputeKernel.DYNAMICEMB_HYBRID,
)
STORED = (
    ComputeKernel.KEY_VALUE,
    ComputeKernel.SSD_VIRTUAL_TABLE,
    ComputeKernel.DRAM_VIRTUAL_TABLE,
    ComputeKernel.DRAM_SSD_VIRTUAL_TABLE,
)
"""Kernels of key-value tables; all but the first are of virtual tables."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows ``offset[0]..+size[0]`` and columns ``offset[1]..+size[1]`` of a table on one rank."""

    rank: int
    offset: tuple[int, int]
    size: tuple[int, int]


PARAMETER_FIELDS = (
    "cache_params",
    "enforce_hbm",
    "stochastic_rounding",
    "bounds_check_mode",
    "output_dtype",
    "key_value_params",
)
"""Fields of TorchRec's `ParameterSharding` that a plan carries through without interpreting."""


@dataclass(frozen=True)
class TablePlan:
    sharding_type: ShardingType
    compute_kernel: ComputeKernel
    shards: tuple[Shard, ...]
    module: str = "ebc"
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Values of `PARAMETER_FIELDS` that are set."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of every shard, in shard order."""
        return tuple(s.rank for s in self.shards)

    @property
    def cache_load_factor(self) -> float | None:
        """Share of the rows that a cache, or the device, holds, when the plan says so."""
        params = self.parameters.get("cache_params") or {}
        value = params.get("load_factor")
        return None if value is None else float(value)

    @property
    def store_caches(self) -> tuple[float | None, float]:
        """Caches of a key-value table: at most so many MiB on the device, and GiB in host memory in
        front of its SSD (`KeyValueParams` of TorchRec)."""
        params = self.parameters.get("key_value_params") or {}
        most = params.get("max_l1_cache_size")
        return None if most is None else float(most), float(params.get("l2_cache_size") or 0.0)


TablePlans: TypeAlias = tuple[TablePlan, ...]
"""One plan as the predictor takes it: the sharding of every table, in the workload's order."""


@dataclass(frozen=True)
class ShardingPlan:
    """Table key -> its sharding, for ``world_size`` ranks on hosts of ``local_world_size``."""

    tables: Mapping[str, TablePlan]
    world_size: int
    local_world_size: int
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the plan file: model, hardware, batch size, predicted time, versions."""
