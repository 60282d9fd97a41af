"""Options of every table: TorchRec's, and a few that shardopt adds on purpose and marks.

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
from functools import cached_property, lru_cache

from predictor.errors import InputError
from predictor.model.memory.caches import INDEX_BYTES, SLOT_BYTES
from predictor.model.memory.ranks import shard_memory
from predictor.model.plan import HASHED, SERVED, STORED, ComputeKernel, ShardingType
from predictor.model.plan_check import row_blocks
from predictor.model.topology import Topology
from predictor.model.workload import Table, Workload
from search.problem import Problem
from search.space.filters import deduplicate, drop_unsound, drop_uvm, prune, raise_nothing_left
from search.space.option import Option, Size, Space


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
    space = prune(deduplicate(space, problem.topology), problem.topology)
    return drop_unsound(space, problem.workload, device)


def reduced_space(problem: Problem) -> Space:
    """The options worth trying: no host memory where device memory is ample."""
    return drop_uvm(whole_space(problem), problem.topology)


TORCHREC_MIN_WIDTH = 128
"""TorchRec's `MIN_CW_DIM`."""
MIN_WIDTH = 32
"""Narrowest column shard shardopt adds; see the module's text."""
LOAD_FACTORS = (0.2, 0.05, 0.5)
"""Shares of its rows that a table brings into the UVM cache of its launch."""
FILLED = 0.9
"""Share of the memory left over that a cache of a table too large for any device takes."""
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
    groups: dict[str, list[int]] = {}
    for index, (key, table) in enumerate(zip(workload.keys, workload.tables, strict=True)):
        check()
        _check_ranks(key, table, topology)
        _check_device(key, table, device)
        options = tuple(_TableOptions(index, workload, topology, device).every(extended))
        if not options:
            raise_nothing_left(key, _excluded(table, device, training=workload.training))
        per_table.append(options)
        if table.constraints.co_locate is not None:
            groups.setdefault(table.constraints.co_locate, []).append(index)
    together = tuple(tuple(g) for g in groups.values() if len(g) > 1)
    return Space(workload.keys, tuple(per_table), together)


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


def listed_types(table: Table, device: str, *, training: bool = True) -> tuple[ShardingType, ...]:
    """Sharding types the table's sharder lists, in its order."""
    if not training:
        return SERVED
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

    Those of key-value tables are offered where constraints name them (`GUARDED_COMPUTE_KERNELS` in
    planner/enumerators.py); virtual tables are not cut by columns.
    """
    if table.constraints.offered is not None:
        return tuple(kernel for kind, kernel in table.constraints.offered if kind is sharding_type)
    if table.storage == "dynamicemb":
        return HASHED
    if sharding_type is ShardingType.DATA_PARALLEL:
        return (ComputeKernel.DENSE,)
    if device != "cuda":
        return (ComputeKernel.FUSED,)
    named, by_column = table.constraints.compute_kernels or (), sharding_type in _BY_COLUMN
    stored = tuple(k for k in STORED[: 1 if by_column else None] if k in named)
    return (ComputeKernel.FUSED, ComputeKernel.FUSED_UVM, ComputeKernel.FUSED_UVM_CACHING, *stored)


class _TableOptions:
    """Options of one table."""

    def __init__(self, index: int, workload: Workload, topology: Topology, device: str) -> None:
        self.index, self.workload, self.topology, self.device = index, workload, topology, device
        self.table = workload.tables[index]
        self.wants = self.table.constraints
        self.width = column_width(self.table.embedding_dim, self.wants.min_partition)

    def every(self, extended: bool) -> Iterator[Option]:
        """Yield TorchRec's options, and those that shardopt adds if ``extended``."""
        usual = [(kind, self.width, kernel) for kind in self.types for kernel in self.kernels(kind)]
        if not extended:
            for way in usual:
                yield self.option(*way)
            return
        for way in usual:
            # TorchRec gives a launch the mean of the factors that its tables name (`group_tables`
            # in embedding_sharding.py), not of those they leave open, so the default is named, too
            for factor in self.load_factors(*way):
                yield self.option(*way, factor, added=factor not in (None, LOAD_FACTORS[0]))
        added = [(kind, width, k) for kind, width in self.splits() for k in self.kernels(kind)]
        for way in [*added, *self.named_dense()]:
            yield self.option(*way, self.load_factors(*way)[0], added=True)

    def option(
        self,
        kind: ShardingType,
        width: int,
        kernel: ComputeKernel,
        load_factor: float | None = None,
        *,
        added: bool = False,
    ) -> Option:
        """One option.

        Args:
            width: columns of a column block.
            added: TorchRec's enumerator does not offer it.
        """
        wants, load_factor = self.wants, load_factor or self.wants.cache_load_factor
        sizes, offsets = shard_sizes_and_offsets(self.table, self.topology, kind, width)
        memory = shard_memory(
            self.table,
            self.workload,
            self.topology,
            kind,
            kernel,
            sizes,
            load_factor,
            device=self.device,
            enforce_hbm=bool(wants.enforce_hbm),
            most_cache_mib=wants.max_l1_cache_size,
        )
        return Option(
            self.index,
            kind,
            kernel,
            sizes,
            offsets,
            module=self.table.module,
            cache_load_factor=load_factor,
            enforce_hbm=wants.enforce_hbm,
            key_value_params=wants.key_value_params,
            ranks=wants.ranks,
            memory=tuple(memory),
            added_by_shardopt=added,
        )

    @property
    def types(self) -> list[ShardingType]:
        """`EmbeddingEnumerator._filter_sharding_types`: GRID only where a constraint names it."""
        listed = listed_types(self.table, self.device, training=self.workload.training)
        named = self.wants.sharding_types
        if not named and self.wants.offered is None:
            return [t for t in listed if t is not ShardingType.GRID_SHARD]
        return [t for t in listed if not named or t in named]

    def kernels(self, kind: ShardingType) -> list[ComputeKernel]:
        """`EmbeddingEnumerator._filter_compute_kernels`.

        Its rule that `dense` goes where `fused` is there never fires: no sharder lists both.
        """
        named = self.wants.compute_kernels
        return [k for k in listed_kernels(self.table, kind, self.device) if not named or k in named]

    def load_factors(
        self, kind: ShardingType, width: int, kernel: ComputeKernel
    ) -> tuple[float | None, ...]:
        """Return the cache load factors to try; None alone if a constraint sets one."""
        if not kernel.has_load_factor or self.wants.cache_load_factor is not None:
            return (None,)
        if kernel is not ComputeKernel.FUSED_UVM_CACHING:
            return LOAD_FACTORS
        factor = self.left_over(kind, width)
        return LOAD_FACTORS if factor is None else (*LOAD_FACTORS, factor)

    @cached_property
    def room(self) -> int:
        """Device memory of the rank that has least, of those that the table may lie on."""
        caps, ranks = self.topology.hbm_cap_bytes, self.wants.ranks
        return min(caps if ranks is None else [caps[rank] for rank in ranks])

    def left_over(self, kind: ShardingType, width: int) -> float | None:
        """Return the load factor of a cache that fills the remaining memory.

        It is None unless the table has a shard too large for every device.

        Smaller tables have their bytes on the mean rank, and those too large share the rest by
        their bytes. Of two digits, rounded down, so that caches are told apart that differ.
        """
        table, topology = self.table, self.topology
        sizes, _ = shard_sizes_and_offsets(table, topology, kind, width)
        rows, columns = max(sizes)
        row_bytes, room = table.row_bytes(columns), self.room
        if rows * row_bytes <= room:
            return None
        world, all_tables = topology.world_size, self.workload.tables
        small = sum(t.weight_bytes for t in all_tables if t.weight_bytes <= room)
        large = sum(t.weight_bytes for t in all_tables if t.weight_bytes > room)
        (empty,) = shard_memory(
            table, self.workload, topology, kind, ComputeKernel.FUSED_UVM, [max(sizes)]
        )
        fixed_bytes = empty.hbm_bytes + empty.flight_bytes
        free_bytes = FILLED * room - small / world - rows * INDEX_BYTES - fixed_bytes
        share = table.weight_bytes / large * free_bytes / (rows * (row_bytes + SLOT_BYTES))
        if share <= 0:
            return None
        digits = 1 - math.floor(math.log10(share))
        rounded = math.floor(share * 10**digits) / 10**digits
        return rounded if rounded not in LOAD_FACTORS else None

    def splits(self) -> Iterator[tuple[ShardingType, int]]:
        """Yield sharding type and column width of every added split."""
        named, dim = self.wants.sharding_types, self.table.embedding_dim
        fixed = self.wants.offered is not None or not self.workload.training
        pooled, topology, types = self.table.is_pooled, self.topology, self.types
        grid_named = ShardingType.GRID_SHARD in types
        limits = {
            ShardingType.COLUMN_WISE: topology.world_size,
            ShardingType.TABLE_COLUMN_WISE: topology.intra_group_size * (topology.groups > 1),
        }
        for width in _widths(self.wants.min_partition or MIN_WIDTH, dim):
            for kind, most in limits.items():
                if width != self.width and dim // width <= most and kind in types:
                    yield kind, width
            # TorchRec tries GRID only where it is named, and then at one width
            grid = (grid_named and width != self.width) or not (grid_named or named or fixed)
            if grid and pooled and self.device == "cuda" and dim // width <= topology.groups:
                yield ShardingType.GRID_SHARD, width
        by_row = ShardingType.ROW_WISE
        # TorchRec's sharder lists row_wise for cuda only; the runtime has it
        if self.device == "cpu" and pooled and not fixed and (not named or by_row in named):
            yield by_row, dim

    def named_dense(self) -> Iterator[tuple[ShardingType, int, ComputeKernel]]:
        """Yield the dense kernel beyond data-parallel if a constraint names both."""
        wants = self.wants
        dense = ComputeKernel.DENSE in (wants.compute_kernels or ())
        if dense and wants.offered is None and wants.sharding_types:
            for kind in self.types:
                if not self.kernels(kind):
                    yield kind, self.width, ComputeKernel.DENSE


def column_width(dim: int, min_partition: int | None = None) -> int:
    """Return TorchRec's width: the smallest divisor that is a multiple of 4 and >= the minimum.

    `_get_block_size_for_cw_shard` and `_find_base_dim` in sharding_plan.py; the whole dim where
    there is none.
    """
    return next(iter(_widths(min_partition or TORCHREC_MIN_WIDTH, dim)), dim)


@lru_cache(maxsize=256)
def _widths(minimum: int, dim: int) -> tuple[int, ...]:
    """Return the divisors of ``dim`` in [minimum, dim) that are multiples of 4, ascending."""
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
    blocks = row_blocks(rows, parts)
    starts = range(0, dim, columns)
    size_of = {count: (count, columns) for _, count in blocks}  # a thousand shards share few
    sizes = tuple(size_of[count] for _ in starts for _, count in blocks)
    offsets = tuple((first, start) for start in starts for first, _ in blocks)
    return sizes, offsets


def _excluded(table: Table, device: str, *, training: bool) -> list[tuple[str, str]]:
    """Return the options excluded by constraints on types and kernels, with the reasons."""
    wants, listed = table.constraints, listed_types(table, device, training=training)
    out: list[tuple[str, str]] = []
    if wants.sharding_types:
        allowed = ", ".join(wants.sharding_types)
        subject = "a pooled table" if table.is_pooled else "a table with pooling: none"
        subject = subject if training else "inference"
        out += [
            (t.value, f"constraints.sharding_types allows only {allowed}")
            for t in listed
            if t not in wants.sharding_types
        ]
        out += [
            (str(t), f"TorchRec does not offer it for {subject} on {device}")
            for t in wants.sharding_types
            if t not in listed
        ]
    if wants.compute_kernels:
        allowed = ", ".join(wants.compute_kernels)
        kernels = dict.fromkeys(k for t in listed for k in listed_kernels(table, t, device))
        out += [
            (k.value, f"constraints.compute_kernels allows only {allowed}")
            for k in kernels
            if k not in wants.compute_kernels
        ]
    return out
