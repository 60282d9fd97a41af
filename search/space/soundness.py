"""Options that TorchRec would run with wrong results, taken out with their reason."""

from __future__ import annotations

from dataclasses import replace

from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.workload import Workload
from search.space.enumerate import Option, Pruned, Space

ROW_SPLIT = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)


def drop_unsound(space: Space, workload: Workload, device: str) -> Space:
    """Without what miscomputes: means under row splits, sequences of dense tables on the CPU.

    Row splits sum first and divide afterwards. TorchRec (1.7 to 1.9) applies the divisor to every
    output of the module unless all its tables are row-split, and not at all under GRID
    (`_create_mean_pooling_divisor` in embeddingbag.py).
    FBGEMM's dense CPU kernel pools what an EmbeddingCollection keeps apart.
    """
    pruned = list(space.pruned)
    kept = []
    for index, options in enumerate(space.options):
        reasons = {id(o): _unsound(o, index, workload, device) for o in options}
        stay = tuple(o for o in options if not reasons[id(o)])
        kept.append(stay or options)
        if stay:
            key = space.keys[index]
            pruned += [Pruned(key, o.label, r) for o in options if (r := reasons[id(o)])]
    return replace(space, options=tuple(kept), pruned=tuple(pruned))


def _unsound(option: Option, index: int, workload: Workload, device: str) -> str:
    table = workload.tables[index]
    dense = option.compute_kernel is ComputeKernel.DENSE
    if dense and not table.is_pooled and device == "cpu":
        return "FBGEMM's dense CPU kernel pools what an EmbeddingCollection keeps apart"
    if table.pooling != "mean":
        return ""
    if option.sharding_type is ShardingType.GRID_SHARD:
        return "TorchRec adds up means of row blocks under grid_shard"
    shared = sum(t.module == table.module for t in workload.tables) > 1
    if option.sharding_type in ROW_SPLIT and shared:
        return "TorchRec would divide other tables of the module by this table's bag lengths"
    return ""


def is_sound(option: Option, workload: Workload, device: str) -> bool:
    """TorchRec computes it right, or the table has nothing better."""
    table = workload.tables[option.table]
    return bool(table.constraints.sharding_types) or not _unsound(
        option, option.table, workload, device
    )
