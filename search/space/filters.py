"""What is left out of a space, with the reason: repeats, what fits nowhere, what TorchRec would
compute wrong, and host memory where device memory is ample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from predictor.errors import InfeasibleError
from predictor.model.memory.ranks import UVM_KERNELS, is_averaged
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from predictor.units import format_bytes
from search.space.option import Option, PrunedOption, Space

AMPLE = 0.7
"""Share of all device memory below which everything fits without host memory
(docs/decisions/0025-space.md)."""
ROW_SPLIT = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)


def deduplicate(space: Space, topology: Topology) -> Space:
    """Without options that put the same bytes on the same ranks as a simpler one of the space.

    An option goes only if the one it repeats stays, so that a constraint's only type is kept.
    Column-wise with one shard stays where other tables of the module can be split by columns: it
    joins their exchange, where table-wise would add another exchange.
    """
    splitting = {(o.module, o.table) for table in space.options for o in table if _splits(o)}
    options: list[tuple[Option, ...]] = []
    pruned = list(space.pruned)
    for key, table in zip(space.keys, space.options, strict=True):
        there = {(o.sharding_type, o.compute_kernel, o.column_width) for o in table}
        kept: list[Option] = []
        for option in table:
            twin = _twin(option, topology)
            reason = ""
            if _is_whole_column(option) and any(
                module == option.module and other != option.table for module, other in splitting
            ):
                twin = None
            if twin and (twin[0], option.compute_kernel, twin[1]) in there:
                reason = twin[2]
            if reason:
                pruned.append(PrunedOption(key, option.label, reason))
            else:
                kept.append(option)
        options.append(tuple(kept))
    return replace(space, options=tuple(options), pruned=tuple(pruned))


def _splits(option: Option) -> bool:
    return option.sharding_type is ShardingType.COLUMN_WISE and option.num_shards > 1


def _is_whole_column(option: Option) -> bool:
    return option.sharding_type is ShardingType.COLUMN_WISE and option.num_shards == 1


def _dim(option: Option) -> int:
    return option.offsets[-1][1] + option.sizes[-1][1]  # the last shard has the last columns


def _twin(option: Option, topology: Topology) -> tuple[ShardingType, int, str] | None:
    """Type and column width of the simpler option it repeats, and why it does."""
    dim, width = _dim(option), option.column_width
    kind, groups = option.sharding_type, topology.groups
    whole = width == dim
    if topology.world_size == 1 and kind is ShardingType.ROW_WISE:
        return ShardingType.TABLE_WISE, dim, "one rank: the same as table_wise"
    if kind in (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE) and whole:
        return ShardingType.TABLE_WISE, dim, "one column shard: the same as table_wise"
    if kind is ShardingType.TABLE_COLUMN_WISE and groups == 1:
        return ShardingType.COLUMN_WISE, width, "one intra group: the same as column_wise"
    if kind is ShardingType.TABLE_ROW_WISE and groups == 1:
        return ShardingType.ROW_WISE, dim, "one intra group: the same as row_wise"
    if kind is ShardingType.GRID_SHARD and groups == 1:
        return ShardingType.ROW_WISE, dim, "one intra group: all columns of a row on one rank"
    if kind is ShardingType.GRID_SHARD and whole:
        return ShardingType.TABLE_ROW_WISE, dim, "one column block: the same as table_row_wise"
    return None


def prune(space: Space, topology: Topology) -> Space:
    """Without options that cannot be placed even alone: no rank allowed, or none large enough.

    Raises `InfeasibleError` when a table is left without an option.
    """
    options: list[tuple[Option, ...]] = []
    pruned = list(space.pruned)
    for key, table in zip(space.keys, space.options, strict=True):
        kept: list[Option] = []
        out: list[PrunedOption] = []
        for option in table:
            reason = _misfit(option, topology)
            if reason:
                out.append(PrunedOption(key, option.label, reason))
            else:
                kept.append(option)
        if not kept:
            raise_nothing_left(key, out)
        pruned += out
        options.append(tuple(kept))
    return replace(space, options=tuple(options), pruned=tuple(pruned))


def _misfit(option: Option, topology: Topology) -> str:
    """Why the option cannot be placed on an empty cluster, or an empty string."""
    if topology.job is not None and not is_averaged(option.sharding_type, option.compute_kernel):
        return f"replica groups do not average tables with the kernel {option.compute_kernel}"
    legal = option.legal_ranks(topology)
    if legal.is_empty:
        ranks = ", ".join(map(str, option.ranks or ()))
        return f"constraints.ranks allows only {ranks}; {option.partition} needs {_needs(option)}"
    if _fits_anywhere(option, topology):
        return _short_together(option, topology)
    start = 0
    caps = list(zip(topology.hbm_cap_bytes, topology.ddr_cap_bytes, strict=True))
    for alternatives in legal.units:
        length = len(alternatives[0])
        shards = range(start, start + length)
        # of ranks alike one is looked at
        different = {tuple(map(caps.__getitem__, ranks)) for ranks in alternatives}
        short = min(_short(option, shards, rooms) for rooms in different)
        if short > 0:
            shard = max(shards, key=lambda i: option.memory[i].hbm_bytes)
            need = option.memory[shard]
            return (
                f"a shard of {option.sizes[shard][0]} x {option.sizes[shard][1]} needs "
                f"{format_bytes(need.hbm_bytes)} HBM and {format_bytes(need.ddr_bytes)} DDR, "
                f"{short} bytes more than any rank it may lie on has"
            )
        start += length
    return _short_together(option, topology)


def _short_together(option: Option, topology: Topology) -> str:
    """Why all shards exceed all ranks that they may lie on, or an empty string. Without this a
    table of very many shards, each of which fits some rank, costs minutes until it is refused."""
    ranks = range(topology.world_size) if option.ranks is None else sorted({*option.ranks})
    if option.num_shards <= len(ranks) and _fits_anywhere(option, topology):
        return ""
    hbm = sum(m.hbm_bytes for m in option.memory)
    ddr = sum(m.ddr_bytes for m in option.memory)
    short = max(
        hbm - sum(topology.hbm_cap_bytes[r] for r in ranks),
        ddr - sum(topology.ddr_cap_bytes[r] for r in ranks),
    )
    if short <= 0:
        return ""
    return (
        f"all {option.num_shards} shards need {format_bytes(hbm)} HBM and {format_bytes(ddr)} DDR, "
        f"{short} bytes more than the ranks they may lie on have together"
    )


def _fits_anywhere(option: Option, topology: Topology) -> bool:
    """The largest shard fits the smallest rank: the usual case, and quick to see."""
    # like shards share theirs: of a thousand, a few are looked at
    needs = dict(zip(map(id, option.memory), option.memory, strict=True)).values()
    hbm, ddr = max(m.hbm_bytes for m in needs), max(m.ddr_bytes for m in needs)
    return hbm <= min(topology.hbm_cap_bytes) and ddr <= min(topology.ddr_cap_bytes)


def _needs(option: Option) -> str:
    if option.sharding_type in (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL):
        return "all ranks"
    return "a whole intra group"


def _short(option: Option, shards: Sequence[int], rooms: Sequence[tuple[int, int]]) -> int:
    """Bytes missing on ranks with that much HBM and host memory, each taken alone with its shard;
    <= 0 when they fit."""
    return max(
        max(option.memory[shard].hbm_bytes - hbm, option.memory[shard].ddr_bytes - ddr)
        for shard, (hbm, ddr) in zip(shards, rooms, strict=True)
    )


def raise_nothing_left(key: str, out: Sequence[PrunedOption]) -> NoReturn:
    """The error for a table that no option remains for."""
    lines = "".join(f"\n  {p.what}: {p.reason}" for p in out)
    memory = any("bytes more" in p.reason for p in out)
    advice = "widen its constraints: sharding_types, compute_kernels or ranks"
    inputs: tuple[str, ...] = ()
    if memory:
        advice = (
            "allow row_wise or fused_uvm_caching for it, add GPUs, more HBM on each, a smaller "
            "reserve or a smaller batch"
        )
        inputs = ("gpus", "hbm_gib", "reserve", "batch_size")
    text = f"table '{key}': no sharding option is left{lines}\nTo try: {advice}"
    raise InfeasibleError(text, inputs)


def drop_unsound(space: Space, workload: Workload, device: str) -> Space:
    """Without what miscomputes: means under row splits, sequences of dense tables on the CPU.

    Row splits sum first and divide afterwards. TorchRec (1.7 to 1.9) applies the divisor to every
    output of the module unless all its tables are row-split, and not at all under GRID
    (`_create_mean_pooling_divisor` in embeddingbag.py; docs/decisions/0025-space.md).
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
            pruned += [PrunedOption(key, o.label, r) for o in options if (r := reasons[id(o)])]
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


def drop_uvm(space: Space, topology: Topology, share: float = AMPLE) -> Space:
    """Without UVM kernels if the tables need no more than a share of device memory without them:
    they cost time and save only memory.

    Tables for which nothing else is left keep them.

    Args:
        share: in (0, 1]; the default is where device memory is ample.
    """
    need = sum(min(_hbm(o) for o in options) for options in map(_on_device, space.options))
    if need > share * sum(topology.hbm_cap_bytes):
        return space
    ample = need <= AMPLE * sum(topology.hbm_cap_bytes)
    enough = "is ample" if ample else "is enough"
    pruned = list(space.pruned)
    kept = []
    for key, options in zip(space.keys, space.options, strict=True):
        stay = _on_device(options)
        kept.append(stay)
        reason = f"device memory {enough}: the tables take {need} bytes of HBM without it"
        pruned += [PrunedOption(key, o.label, reason) for o in options if o not in stay]
    return replace(space, options=tuple(kept), pruned=tuple(pruned))


def _on_device(options: tuple[Option, ...]) -> tuple[Option, ...]:
    return tuple(o for o in options if o.compute_kernel not in UVM_KERNELS) or options


def _hbm(option: Option) -> int:
    return sum(m.hbm_bytes for m in option.memory)
