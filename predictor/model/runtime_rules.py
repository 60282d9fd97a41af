"""What TorchRec's runtime can run of the plans that shardopt can write.

The block sizes are those of TorchRec's `calculate_shard_sizes_and_offsets`; the ranks are those its
sharding classes assume (`BaseRwEmbeddingSharding._shard` and its siblings), which mostly read the
shards by position and would go wrong silently, or fail deep inside, on anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from predictor.model.plan import ComputeKernel, Shard, ShardingType, TablePlan
from predictor.model.plan_check import table_problem

UNPOOLED_TYPES = (
    ShardingType.DATA_PARALLEL,
    ShardingType.TABLE_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.ROW_WISE,
)
"""Sharding types of an EmbeddingCollection."""

FUSED_WIDTH = 4
"""FBGEMM's fused kernels take widths in multiples of this (`construct_split_state`)."""


@dataclass(frozen=True)
class RuntimeSetting:
    """What a table's shards are held against.

    Args:
        shape: rows and columns of the table in the module.
        pooling: sum, mean, or none for a table of an EmbeddingCollection.
        group: ranks among which TWRW, TWCW and GRID split a table.
        device: type of the device it will run on.
    """

    shape: tuple[int, int]
    pooling: str
    world_size: int
    group: int
    device: str

    @property
    def pooled(self) -> bool:
        """False for a table of an EmbeddingCollection."""
        return self.pooling != "none"


def row_blocks(rows: int, ranks: int) -> list[tuple[int, int]]:
    """(offset, size) of the row blocks TorchRec makes: ceil(rows / ranks) each, the last less."""
    block = -(-rows // ranks)
    starts = [min(i * block, rows) for i in range(ranks)]
    return [(start, min(block, rows - start)) for start in starts]


def in_torchrec_order(table: TablePlan) -> TablePlan:
    """The same shards, column by column from the left and each from the top, empty ones last.

    TorchRec reads the shards of row splits by their position in the list.
    """
    if table.sharding_type is ShardingType.DATA_PARALLEL:
        shards = sorted(table.shards, key=lambda s: s.rank)
    else:
        shards = sorted(table.shards, key=lambda s: (s.offset[1], s.size[0] == 0, s.offset[0]))
    return replace(table, shards=tuple(shards))


def find_runtime_problem(table: TablePlan, setting: RuntimeSetting) -> str | None:
    """Why TorchRec cannot run these shards (which are in its order), and what to do; or None."""
    kind = table.sharding_type
    if not setting.pooled and kind not in UNPOOLED_TYPES:
        return (
            f"an EmbeddingCollection cannot be sharded {kind}; "
            f"use {', '.join(UNPOOLED_TYPES[:-1])} or {UNPOOLED_TYPES[-1]}"
        )
    return (
        table_problem(table, setting.shape, setting.world_size)
        or _kernel_problem(table, setting)
        or _RULES[kind](table.shards, setting)
    )


def find_mean_problem(module: Mapping[str, tuple[ShardingType, str]]) -> str | None:
    """Why TorchRec would compute wrong means in a module, and what to do; or None.

    Row splits sum what is to be averaged and divide afterwards by the bag lengths. That divisor is
    applied to every output of the module, and only the summed tables that are row-split themselves
    are exempt (`_create_mean_pooling_divisor`; torchrec 1.7 to 1.9, seen in training).

    Args:
        module: sharding type and pooling of each table of an EmbeddingBagCollection.
    """
    split = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)
    means = [
        name for name, (kind, pooling) in module.items() if pooling == "mean" and kind in split
    ]
    others = [name for name, (kind, _) in module.items() if kind not in split]
    if not means or not others:
        return None
    mean, other = means[0], others[0]
    return (
        f"table '{mean}' has pooling mean and is {module[mean][0]}, so TorchRec would divide the "
        f"output of '{other}' ({module[other][0]}) by its bag lengths as well; use table_wise or "
        "column_wise for tables with pooling mean, row_wise or table_row_wise for all tables of "
        "the module, or a module of its own for mean"
    )


def _kernel_problem(table: TablePlan, setting: RuntimeSetting) -> str | None:
    kernel, kind = table.compute_kernel, table.sharding_type
    if kind is ShardingType.DATA_PARALLEL and kernel is not ComputeKernel.DENSE:
        return f"data_parallel runs with compute_kernel dense only, not {kernel}; set dense"
    if kernel is ComputeKernel.DENSE:
        # FBGEMM's dense CPU kernel ignores PoolingMode.NONE and pools: a wrong shape, far from here
        if not setting.pooled and setting.device == "cpu":
            return (
                "the dense kernel cannot look up an EmbeddingCollection on CPU (FBGEMM pools what "
                "should stay apart); use table_wise or row_wise with the fused kernel, or "
                "device='cuda'"
            )
        return None
    for i, shard in enumerate(table.shards):
        if shard.size[1] % FUSED_WIDTH:
            return (
                f"shards[{i}] is {shard.size[1]} columns wide; the {kernel} kernel takes multiples "
                f"of {FUSED_WIDTH}: split the columns elsewhere, or use the dense kernel"
            )
    return None


def _anything(shards: Sequence[Shard], setting: RuntimeSetting) -> str | None:
    return None


def _column_wise(shards: Sequence[Shard], setting: RuntimeSetting) -> str | None:
    widths = {shard.size[1] for shard in shards}
    if not setting.pooled and len(widths) > 1:
        return (
            f"column_wise shards of {sorted(widths)} columns; an EmbeddingCollection needs one "
            "width for all shards: split the columns evenly"
        )
    return None


def _row_wise(shards: Sequence[Shard], setting: RuntimeSetting) -> str | None:
    return _block_problem(shards, 0, setting.world_size, setting, "row_wise")


def _table_row_wise(shards: Sequence[Shard], setting: RuntimeSetting) -> str | None:
    first = shards[0].rank // setting.group * setting.group
    return _block_problem(shards, first, setting.group, setting, "table_row_wise")


def _table_column_wise(shards: Sequence[Shard], setting: RuntimeSetting) -> str | None:
    groups = {shard.rank // setting.group for shard in shards}
    if len(groups) > 1:
        return (
            f"table_column_wise shards lie on hosts {sorted(groups)} ({setting.group} ranks each); "
            "it splits columns within one host: move them to one, or use column_wise"
        )
    return None


def _grid_shard(shards: Sequence[Shard], setting: RuntimeSetting) -> str | None:
    if setting.pooling == "mean":
        # ShardedEmbeddingBagCollection divides by the lengths for row_wise and table_row_wise only
        return (
            "TorchRec adds up the means of the row blocks under grid_shard, which is wrong for "
            "pooling mean; use table_row_wise or column_wise"
        )
    for column in sorted({shard.offset[1] for shard in shards}):
        block = [shard for shard in shards if shard.offset[1] == column]
        host = block[0].rank // setting.group
        what = f"grid_shard (columns from {column})"
        problem = _block_problem(block, host * setting.group, setting.group, setting, what)
        if problem:
            return problem
    return None


def _block_problem(
    shards: Sequence[Shard], first: int, ranks: int, setting: RuntimeSetting, what: str
) -> str | None:
    wanted = list(range(first, first + ranks))
    given = [shard.rank for shard in shards]
    if given != wanted:
        return (
            f"{what} shards are on ranks {given} from top to bottom; TorchRec runs them on "
            f"{wanted} in that order only (a row split over other ranks can be predicted, not run)"
        )
    blocks = row_blocks(setting.shape[0], ranks)
    # where an empty shard starts means nothing
    found = [(s.offset[0], s.size[0]) if s.size[0] else (setting.shape[0], 0) for s in shards]
    for i, (have, want) in enumerate(zip(found, blocks, strict=True)):
        if have != want:
            return (
                f"the {what} shard on rank {wanted[i]} has {have[1]} rows from row {have[0]}; "
                f"TorchRec splits {setting.shape[0]} rows over {ranks} ranks in blocks of "
                f"{blocks[0][1]}, here {want[1]} rows from row {want[0]}: use that split"
            )
    return None


_RULES: dict[ShardingType, Callable[[Sequence[Shard], RuntimeSetting], str | None]] = {
    ShardingType.DATA_PARALLEL: _anything,
    ShardingType.TABLE_WISE: _anything,
    ShardingType.COLUMN_WISE: _column_wise,
    ShardingType.ROW_WISE: _row_wise,
    ShardingType.TABLE_ROW_WISE: _table_row_wise,
    ShardingType.TABLE_COLUMN_WISE: _table_column_wise,
    ShardingType.GRID_SHARD: _grid_shard,
}
