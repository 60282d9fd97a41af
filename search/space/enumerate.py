"""The options of every table: TorchRec's, and a few that shardopt adds on purpose and marks.

TorchRec's rules are those of `EmbeddingEnumerator.enumerate` (planner/enumerators.py) over the
sharders of EmbeddingBagCollection and EmbeddingCollection (`BaseEmbeddingSharder` in
embedding_types.py, `EmbeddingCollectionSharder` in embedding.py); sizes and offsets are those of
`calculate_shard_sizes_and_offsets` (sharding_plan.py). Re-derived and tested against them.

What is added:

* Column widths. TorchRec tries one width a table, the smallest divisor of at least 128. Every
  divisor that is a multiple of 4 (FBGEMM's vector) and at least 32 is tried here: 32 fp32 columns
  are 128 bytes, one cache line, and narrower rows move no fewer bytes.
* TWCW at these widths and GRID where there is more than one intra group.
* Caches, and shares of dynamicemb tables on the device, of several sizes; TorchRec's default is 0.2
  of the rows.
* Row-wise on the CPU, which the runtime has but the sharder does not list, and the `dense` kernel
  beyond data-parallel where a constraint names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain

from predictor.errors import InputError
from predictor.model.memory.ranks import DEFAULT_CACHE_LOAD_FACTOR, shard_memory
from predictor.model.plan import HASHED, ComputeKernel, ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Table, Workload
from search.problem import Problem
from search.space.filters import deduplicate, drop_unsound, drop_uvm, prune, raise_nothing_left
from search.space.option import Option, PrunedOption, Size, Space


def whole_space(problem: Problem, check: Callable[[], None] = lambda: None) -> Space:
    """Every option that is legal, fits, and is computed right by TorchRec.

    Args:
        check: called before every table; raises where it takes too long.

    Raises:
        InfeasibleError: a table has no option left.
    """
    device = problem.hardware.device
    space = enumerate_space(problem.workload, problem.topology, device, check=check)
    check()
    space = drop_unsound(space, problem.workload, device)
    return prune(deduplicate(space, problem.topology), problem.topology)


def reduced_space(problem: Problem) -> Space:
    """The options worth trying: no host memory where device memory is ample."""
    return drop_uvm(whole_space(problem), problem.topology)


TORCHREC_MIN_WIDTH = 128
"""TorchRec's `MIN_CW_DIM`."""
MIN_WIDTH = 32
"""Narrowest column shard shardopt adds; see the module's text."""
LOAD_FACTORS = (0.2, 0.05, 0.5)
"""Shares of its rows that a table brings into the UVM cache of its launch."""
LANE = 4
"""FBGEMM moves four elements at once: widths are multiples of it."""

_POOLED = (
    ShardingType.DATA_PARALLEL,
    ShardingType.TABLE_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.TABLE_COLUMN_WISE,
)
_POOLED_CUDA = (
    *_POOLED,
    ShardingType.ROW_WISE,
    ShardingType.TABLE_ROW_WISE,
    ShardingType.GRID_SHARD,
)
_SEQUENCE = (
    ShardingType.DATA_PARALLEL,
    ShardingType.TABLE_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.ROW_WISE,
)
_BY_COLUMN = (
    ShardingType.COLUMN_WISE,
    ShardingType.TABLE_COLUMN_WISE,
    ShardingType.GRID_SHARD,
)


def enumerate_space(
    workload: Workload,
    topology: Topology,
    device: str = "cuda",
    *,
    extended: bool = True,
    check: Callable[[], None] = lambda: None,
) -> Space:
    """Every option of every table, before duplicates and misfits are removed.

    Args:
        device: ``cuda`` or ``cpu``.
        extended: also what shardopt adds; without it, TorchRec's options alone.
        check: called before every table; raises where it takes too long.
    """
    per_table: list[tuple[Option, ...]] = []
    pruned: list[PrunedOption] = []
    groups: dict[str, list[int]] = {}
    for index, (key, table) in enumerate(zip(workload.keys, workload.tables, strict=True)):
        check()
        _check_ranks(key, table, topology)
        _check_device(key, table, device)
        options = list(_torchrec_options(index, workload, topology, device))
        if extended:
            options += _added_options(index, workload, topology, device, options)
            made = (_at_load_factors(o, workload, topology, device) for o in options)
            options = list(chain.from_iterable(made))
        per_table.append(tuple(options))
        out = _pruned_by_constraints(key, table, device)
        pruned += out
        if not options:
            raise_nothing_left(key, out)
        if table.constraints.co_locate is not None:
            groups.setdefault(table.constraints.co_locate, []).append(index)
    together = tuple(tuple(g) for g in groups.values() if len(g) > 1)
    return Space(workload.keys, tuple(per_table), tuple(pruned), together)


def _check_ranks(key: str, table: Table, topology: Topology) -> None:
    ranks = table.constraints.ranks
    if ranks is None:
        return
    bad = sorted({r for r in ranks if not 0 <= r < topology.world_size})
    if bad or not ranks:
        raise InputError(
            f"table '{key}': constraints.ranks is {list(ranks)}; "
            f"allowed are ranks 0 to {topology.world_size - 1}, at least one"
        )


def _check_device(key: str, table: Table, device: str) -> None:
    """TorchRec's enumerator leaves out tables of another device group, and nobody else plans them;
    a plan here has every table."""
    if table.storage == "dynamicemb" and device != "cuda":
        raise InputError(
            f"table '{key}': storage is dynamicemb, which runs on GPUs, but the ranks are "
            f"{device}; leave storage out, or plan for GPUs",
            inputs=("hardware",),
        )
    group = table.constraints.device_group
    if group not in (None, device):
        raise InputError(
            f"table '{key}': constraints.device_group is {group}, but the ranks are {device}; one "
            f"plan is for one device: give the {group} tables a model of their own"
            + (" and plan it for the hardware cpu-gloo" if group == "cpu" else ""),
            inputs=("hardware",) if group == "cpu" else (),
        )


def listed_types(table: Table, device: str) -> tuple[ShardingType, ...]:
    """Sharding types the table's sharder lists, in its order."""
    if table.constraints.offered is not None:
        return tuple(dict.fromkeys(kind for kind, _ in table.constraints.offered))
    if table.storage == "dynamicemb":
        return (ShardingType.ROW_WISE,)
    if not table.is_pooled:
        return _SEQUENCE
    return _POOLED_CUDA if device == "cuda" else _POOLED


def listed_kernels(
    table: Table, sharding_type: ShardingType, device: str
) -> tuple[ComputeKernel, ...]:
    """Kernels the table's sharder lists for a type (`BaseEmbeddingSharder.compute_kernels`).

    The key-value and virtual-table kernels, which TorchRec offers on demand, are not planned here.
    """
    if table.constraints.offered is not None:
        return tuple(kernel for kind, kernel in table.constraints.offered if kind is sharding_type)
    if table.storage == "dynamicemb":
        return HASHED
    if sharding_type is ShardingType.DATA_PARALLEL:
        return (ComputeKernel.DENSE,)
    if device != "cuda":
        return (ComputeKernel.FUSED,)
    return (ComputeKernel.FUSED, ComputeKernel.FUSED_UVM, ComputeKernel.FUSED_UVM_CACHING)


def _types(table: Table, device: str) -> list[ShardingType]:
    """`EmbeddingEnumerator._filter_sharding_types`: GRID only where a constraint names it."""
    listed = listed_types(table, device)
    named = table.constraints.sharding_types
    if not named and table.constraints.offered is None:
        return [t for t in listed if t is not ShardingType.GRID_SHARD]
    if not named:
        return list(listed)
    return [t for t in listed if t in named]


def _kernels(table: Table, sharding_type: ShardingType, device: str) -> list[ComputeKernel]:
    """`EmbeddingEnumerator._filter_compute_kernels`.

    Its rule that `dense` goes where `fused` is there never fires: no sharder lists both.
    """
    named = table.constraints.compute_kernels
    return [k for k in listed_kernels(table, sharding_type, device) if not named or k in named]


def _torchrec_options(
    index: int, workload: Workload, topology: Topology, device: str
) -> Iterator[Option]:
    table = workload.tables[index]
    width = column_width(table.embedding_dim, table.constraints.min_partition)
    for sharding_type in _types(table, device):
        for kernel in _kernels(table, sharding_type, device):
            yield _option(index, workload, topology, device, sharding_type, kernel, width)


def _option(
    index: int,
    workload: Workload,
    topology: Topology,
    device: str,
    sharding_type: ShardingType,
    kernel: ComputeKernel,
    width: int,
    reason: str = "",
    load_factor: float | None = None,
) -> Option:
    table = workload.tables[index]
    wants = table.constraints
    load_factor = load_factor or wants.cache_load_factor
    sizes, offsets = shard_sizes_and_offsets(table, topology, sharding_type, width)
    memory = shard_memory(
        table,
        workload,
        topology,
        sharding_type,
        kernel,
        sizes,
        load_factor,
        device=device,
        enforce_hbm=bool(wants.enforce_hbm),
    )
    return Option(
        index,
        sharding_type,
        kernel,
        sizes,
        offsets,
        module=table.module,
        cache_load_factor=load_factor,
        enforce_hbm=wants.enforce_hbm,
        ranks=wants.ranks,
        memory=tuple(memory),
        added_by_shardopt=bool(reason),
        reason=reason,
    )


def _at_load_factors(
    option: Option, workload: Workload, topology: Topology, device: str
) -> Iterator[Option]:
    """A cached table at several sizes of its cache, if no constraint sets one.

    TorchRec gives a launch the mean of the factors that its tables name (`group_tables` in
    embedding_sharding.py), not of those they leave open, so the default is named, too.
    """
    cached = option.compute_kernel.has_load_factor
    if not cached or workload.tables[option.table].constraints.cache_load_factor is not None:
        yield option
        return
    # of the splits that shardopt adds the usual one will do
    for factor in LOAD_FACTORS[:1] if option.added_by_shardopt else LOAD_FACTORS:
        usual = factor == DEFAULT_CACHE_LOAD_FACTOR
        yield _option(
            option.table,
            workload,
            topology,
            device,
            option.sharding_type,
            option.compute_kernel,
            option.column_width,
            option.reason if usual else f"TorchRec tries {DEFAULT_CACHE_LOAD_FACTOR} alone",
            factor,
        )


def column_width(dim: int, min_partition: int | None = None) -> int:
    """TorchRec's one width: the smallest divisor that is a multiple of 4 and at least the minimum.

    `_get_block_size_for_cw_shard` and `_find_base_dim` in sharding_plan.py; the whole dim where
    there is none.
    """
    return next(iter(_widths(min_partition or TORCHREC_MIN_WIDTH, dim)), dim)


@lru_cache(maxsize=256)
def _widths(minimum: int, dim: int) -> tuple[int, ...]:
    """Divisors of ``dim`` from ``minimum``, below ``dim``, that are multiples of 4; rising."""
    small = [d for d in range(1, math.isqrt(dim) + 1) if dim % d == 0]
    divisors = {*small, *(dim // d for d in small)}
    return tuple(sorted(w for w in divisors if minimum <= w < dim and w % LANE == 0))


def shard_sizes_and_offsets(
    table: Table, topology: Topology, sharding_type: ShardingType, width: int
) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
    """Sizes and offsets of every shard; ``width`` is the columns of a column block."""
    rows, dim = table.num_embeddings, table.embedding_dim
    if sharding_type is ShardingType.DATA_PARALLEL:
        count = topology.world_size
        return ((rows, dim),) * count, ((0, 0),) * count
    parts = 1
    if sharding_type is ShardingType.ROW_WISE:
        parts = topology.world_size
    elif sharding_type in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD):
        parts = topology.intra_group_size
    return _cut(rows, dim, parts, width if sharding_type in _BY_COLUMN else dim)


@lru_cache(maxsize=64)
def _cut(
    rows: int, dim: int, parts: int, columns: int
) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
    """Sizes and offsets of blocks; the kernels of a table share them, of many ranks large ones."""
    blocks = _row_blocks(rows, parts)
    starts = range(0, dim, columns)
    sizes = tuple((count, columns) for _ in starts for _, count in blocks)
    offsets = tuple((first, start) for start in starts for first, _ in blocks)
    return sizes, offsets


def _row_blocks(rows: int, parts: int) -> list[tuple[int, int]]:
    """First row and rows of ``parts`` blocks: ceil blocks, then a short tail, then empty ones.

    `_calculate_rw_shard_sizes_and_offsets`: 10 rows over 4 ranks are 3, 3, 3, 1, because the
    runtime finds the shard of an id by a division by the block size.
    """
    block = -(-rows // parts)
    firsts = [min(rows, i * block) for i in range(parts)]
    return [(first, min(block, rows - first)) for first in firsts]


def _added_options(
    index: int, workload: Workload, topology: Topology, device: str, have: list[Option]
) -> Iterator[Option]:
    """What TorchRec's enumerator does not offer; see the module's text."""
    table = workload.tables[index]
    for sharding_type, width, reason in _added_splits(table, topology, device):
        for kernel in _kernels(table, sharding_type, device):
            yield _option(index, workload, topology, device, sharding_type, kernel, width, reason)
    named = table.constraints
    dense_named = ComputeKernel.DENSE in (named.compute_kernels or ())
    if named.offered is not None or not dense_named or not named.sharding_types:
        return
    width = column_width(table.embedding_dim, named.min_partition)
    taken = {option.sharding_type for option in have}
    for sharding_type in _types(table, device):
        if sharding_type not in taken:
            reason = "a constraint names the dense kernel beyond data_parallel"
            kernel = ComputeKernel.DENSE
            yield _option(index, workload, topology, device, sharding_type, kernel, width, reason)


def _added_splits(
    table: Table, topology: Topology, device: str
) -> Iterator[tuple[ShardingType, int, str]]:
    """Sharding type, column width and reason of every added split."""
    named, dim = table.constraints.sharding_types, table.embedding_dim
    known = table.constraints.offered is not None
    pooled_cuda = table.is_pooled and device == "cuda"
    usual = column_width(dim, table.constraints.min_partition)
    several = topology.groups > 1
    widths = added_widths(table)
    for width in widths:
        blocks = dim // width
        for sharding_type, limit in (
            (ShardingType.COLUMN_WISE, topology.world_size),
            (ShardingType.TABLE_COLUMN_WISE, topology.intra_group_size if several else 0),
        ):
            if width != usual and blocks <= limit and sharding_type in _types(table, device):
                yield sharding_type, width, f"columns of {width}; TorchRec tries {usual} alone"
        grid_named = ShardingType.GRID_SHARD in _types(table, device)
        if pooled_cuda and blocks <= topology.groups:
            if grid_named and width != usual:
                yield ShardingType.GRID_SHARD, width, f"columns of {width}"
            elif not named and not known:
                yield ShardingType.GRID_SHARD, width, "TorchRec tries GRID only where it is named"
    by_row = ShardingType.ROW_WISE
    if device == "cpu" and table.is_pooled and not known and (not named or by_row in named):
        yield by_row, dim, "TorchRec's sharder lists row_wise for cuda only; the runtime has it"


def added_widths(table: Table) -> tuple[int, ...]:
    """Every width of column shards: divisors of the dim from the minimum, multiples of 4."""
    return _widths(table.constraints.min_partition or MIN_WIDTH, table.embedding_dim)


def _pruned_by_constraints(key: str, table: Table, device: str) -> list[PrunedOption]:
    """What the constraints on types and kernels leave out, an entry a type or kernel."""
    wants = table.constraints
    out: list[PrunedOption] = []
    if wants.sharding_types:
        allowed = ", ".join(wants.sharding_types)
        out += [
            PrunedOption(key, t.value, f"constraints.sharding_types allows only {allowed}")
            for t in listed_types(table, device)
            if t not in wants.sharding_types
        ]
        out += [
            PrunedOption(key, str(t), _not_listed(table, device))
            for t in wants.sharding_types
            if t not in listed_types(table, device)
        ]
    if wants.compute_kernels:
        allowed = ", ".join(wants.compute_kernels)
        known = dict.fromkeys(
            k for t in listed_types(table, device) for k in listed_kernels(table, t, device)
        )
        out += [
            PrunedOption(key, k.value, f"constraints.compute_kernels allows only {allowed}")
            for k in known
            if k not in wants.compute_kernels
        ]
    return out


def _not_listed(table: Table, device: str) -> str:
    what = "a pooled table" if table.is_pooled else "a table with pooling: none"
    return f"TorchRec does not offer it for {what} on {device}"
