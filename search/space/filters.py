"""Filters of a space. They drop repeated options, options that fit nowhere, options that TorchRec
computes wrong, and host memory if device memory is ample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

from predictor.errors import InfeasibleError
from predictor.model.memory.ranks import UVM_KERNELS, is_averaged
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from predictor.units import format_bytes
from search.space.option import AllowedPlacements, Option, Space

AMPLE = 0.7
"""Share of all device memory below which everything fits without host memory
(docs/decisions/0025-space.md)."""


def deduplicate(space: Space, topology: Topology) -> Space:
    """Drop options that put the same bytes on the same ranks as a simpler one of the space.

    An option goes only if the one it repeats stays, so that a constraint's only type is kept.
    Column-wise with one shard stays where other tables of the module can be split by columns: it
    joins their exchange, where table-wise would add another exchange.
    """
    column = ShardingType.COLUMN_WISE
    columns = [o for o in space.every_option if o.sharding_type is column]
    splitting = {(o.module, o.table) for o in columns if o.num_shards > 1}

    def stays(option: Option, there: set[tuple[ShardingType, ComputeKernel, int]]) -> bool:
        if option.sharding_type is column and option.num_shards == 1:
            splitting_beside = (m == option.module and t != option.table for m, t in splitting)
            if any(splitting_beside):
                return True
        twin = _twin(option, topology)
        return twin is None or (twin[0], option.compute_kernel, twin[1]) not in there

    distinct = []
    for table in space.options:
        there = {(o.sharding_type, o.compute_kernel, o.column_width) for o in table}
        distinct.append(tuple(o for o in table if stays(o, there)))
    return replace(space, options=tuple(distinct))


def _twin(option: Option, topology: Topology) -> tuple[ShardingType, int] | None:
    """Return type and column width of the simpler option that this one repeats; None if none."""
    dim = option.offsets[-1][1] + option.sizes[-1][1]  # the last shard has the last columns
    kind, width, groups = option.sharding_type, option.column_width, topology.groups
    if topology.world_size == 1 and kind is ShardingType.ROW_WISE:
        return ShardingType.TABLE_WISE, dim
    if kind in (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE) and width == dim:
        return ShardingType.TABLE_WISE, dim
    if kind is ShardingType.TABLE_COLUMN_WISE and groups == 1:
        return ShardingType.COLUMN_WISE, width
    # in one intra group all columns of a row lie on one rank
    if kind in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD) and groups == 1:
        return ShardingType.ROW_WISE, dim
    if kind is ShardingType.GRID_SHARD and width == dim:
        return ShardingType.TABLE_ROW_WISE, dim
    return None


def find_simplest(space: Space, option: Option, topology: Topology) -> Option | None:
    """Return the option of the space for another one: itself, or a simpler one that puts the same
    bytes on the same ranks. Its shards lie where the first ones of the other lie.
    """
    options, twin = space.options[option.table], _twin(option, topology)
    if option in options or twin is None:
        return option if option in options else None
    kind, width = twin
    kernel, host = option.compute_kernel, option.way[4:]
    alike = (o for o in options if (o.sharding_type, o.column_width) == (kind, width))
    return next((o for o in alike if o.compute_kernel is kernel and o.way[4:] == host), None)


def prune(space: Space, topology: Topology) -> Space:
    """Drop options that cannot be placed even alone: no rank is allowed, or none is large enough.

    Raises `InfeasibleError` when a table is left without an option.
    """
    options: list[tuple[Option, ...]] = []
    for key, table in zip(space.keys, space.options, strict=True):
        reasons = [_misfit(option, topology) for option in table]
        remaining = tuple(o for o, reason in zip(table, reasons, strict=True) if not reason)
        if not remaining:
            raise_nothing_left(key, list(zip((o.label for o in table), reasons, strict=True)))
        options.append(remaining)
    return replace(space, options=tuple(options))


def fits_alone(option: Option, topology: Topology) -> bool:
    """Return True if an option can be placed on an empty cluster."""
    return not _misfit(option, topology)


def _misfit(option: Option, topology: Topology) -> str:
    """Return why the option cannot be placed on an empty cluster, or an empty string."""
    if topology.job is not None and not is_averaged(option.sharding_type, option.compute_kernel):
        return f"replica groups do not average tables with the kernel {option.compute_kernel}"
    legal = option.legal_ranks(topology)
    ranks = range(topology.world_size) if option.ranks is None else sorted({*option.ranks})
    if legal.is_empty:
        everywhere = option.sharding_type in (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL)
        needed = "all ranks" if everywhere else "a whole intra group"
        allowed = ", ".join(map(str, ranks))
        return f"constraints.ranks allows only {allowed}; {option.partition} needs {needed}"
    caps = topology.hbm_cap_bytes, topology.ddr_cap_bytes
    needs = option.bytes_of
    # the usual case, and quick to see: the largest shard fits the smallest rank
    alone = all(max(need) <= min(cap) for need, cap in zip(needs, caps, strict=True))
    if alone and option.num_shards <= len(ranks):
        return ""
    first = None if alone else next(_short_alone(option, legal, topology), None)
    if first is not None:
        shard, short = first
        rows, columns = option.sizes[shard]
        hbm, ddr = (format_bytes(need[shard]) for need in needs)
        return (
            f"a shard of {rows} x {columns} needs {hbm} HBM and {ddr} DDR, "
            f"{format_bytes(short, round_up=True)} more than any rank it may lie on has"
        )
    # without this a table of very many shards, each of which fits some rank, costs minutes
    total = [sum(need) for need in needs]
    short = max(t - sum(cap[r] for r in ranks) for t, cap in zip(total, caps, strict=True))
    if short <= 0:
        return ""
    return (
        f"all {option.num_shards} shards need {format_bytes(total[0])} HBM and "
        f"{format_bytes(total[1])} DDR, {format_bytes(short, round_up=True)} more than the ranks "
        "they may lie on have together"
    )


def _short_alone(
    option: Option, legal: AllowedPlacements, topology: Topology
) -> Iterator[tuple[int, int]]:
    """Yield the largest shard of each run that fits on none of its ranks alone, and the missing
    bytes."""
    hbm, ddr = option.bytes_of
    caps = list(zip(topology.hbm_cap_bytes, topology.ddr_cap_bytes, strict=True))
    start = 0
    for alternatives in legal.units:
        shards = range(start, start + len(alternatives[0]))
        start = shards.stop
        # of ranks alike one is looked at
        different = {tuple(map(caps.__getitem__, ranks)) for ranks in alternatives}
        short = min(
            max(
                max(hbm[s] - room[0], ddr[s] - room[1])
                for s, room in zip(shards, rooms, strict=True)
            )
            for rooms in different
        )
        if short > 0:
            yield max(shards, key=hbm.__getitem__), short


def raise_nothing_left(key: str, out: Sequence[tuple[str, str]]) -> NoReturn:
    """Raise the error for a table without any option.

    Args:
        out: excluded choices, each with the reason.
    """
    lines = "".join(f"\n  {choice}: {reason}" for choice, reason in out)
    advice = "widen its constraints: sharding_types, compute_kernels or ranks"
    inputs: tuple[str, ...] = ()
    if any(" more than " in reason for _, reason in out):
        advice = (
            "allow row_wise or fused_uvm_caching for it, add GPUs, more HBM on each, a smaller "
            "reserve or a smaller batch"
        )
        inputs = ("gpus", "hbm_gib", "reserve", "batch_size")
    text = f"table '{key}': no sharding option is left{lines}\nTo try: {advice}"
    raise InfeasibleError(text, inputs)


def drop_unsound(space: Space, workload: Workload, device: str) -> Space:
    """Drop options that miscompute; a table with nothing else keeps them.

    Row splits sum first and divide afterwards. TorchRec (1.7 to 1.9) applies the divisor to every
    output of the module unless all its tables are row-split, and not at all under GRID
    (`_create_mean_pooling_divisor` in embeddingbag.py; docs/decisions/0025-space.md). So of the
    plans that split the rows of a mean, the space has those that split all rows of its module.
    """
    options = [
        tuple(o for o in table if not miscomputes(o, workload, device)) or table
        for table in space.options
    ]
    groups = []
    for module in workload.modules:
        tables = tuple(i for i, table in enumerate(workload.tables) if table.module == module)
        means = tuple(i for i in tables if workload.tables[i].pooling == "mean")
        by_row = {i: tuple(o for o in options[i] if o.by_row) for i in tables}
        forced = any(by_row[i] == options[i] for i in means)
        if len(tables) == 1 or not means or (forced and not all(by_row.values())):
            continue
        groups.append((means, tables))
        if forced:
            for i in tables:
                options[i] = by_row[i]
        elif not all(by_row.values()):
            for i in means:
                options[i] = tuple(o for o in options[i] if not o.by_row)
    return replace(space, options=tuple(options), means=tuple(groups))


def miscomputes(option: Option, workload: Workload, device: str) -> bool:
    """Return True if TorchRec computes wrong results with an option in any plan.

    It does for means under GRID, and for sequences of dense tables on the CPU: FBGEMM's kernel
    pools them, an EmbeddingCollection does not.
    """
    table = workload.tables[option.table]
    if option.compute_kernel is ComputeKernel.DENSE and not table.is_pooled and device == "cpu":
        return True
    return table.pooling == "mean" and option.sharding_type is ShardingType.GRID_SHARD


def drop_uvm(space: Space, topology: Topology, share: float = AMPLE) -> Space:
    """Drop UVM kernels if the tables need no more than a share of device memory without them.

    UVM kernels cost time and save only memory. Tables with nothing else keep them.

    Args:
        share: in (0, 1]; the default is where device memory is ample.
    """
    remaining = tuple(map(_on_device, space.options))
    need = sum(min(sum(o.bytes_of[0]) for o in options) for options in remaining)
    return (
        space if need > share * sum(topology.hbm_cap_bytes) else replace(space, options=remaining)
    )


def drop_uncached(space: Space) -> Space:
    """Drop uncached UVM options of tables that have another kernel.

    Without a cache, every lookup reads host memory.
    """
    uncached = ComputeKernel.FUSED_UVM
    remaining = tuple(
        tuple(o for o in options if o.compute_kernel is not uncached) or options
        for options in space.options
    )
    return replace(space, options=remaining)


def _on_device(options: tuple[Option, ...]) -> tuple[Option, ...]:
    return tuple(o for o in options if o.compute_kernel not in UVM_KERNELS) or options
