"""The sparse part of an iteration: input distribution, fused lookups, output distribution.

One `Exchange` is what TorchRec builds per module and sharding type: one input distribution, one or
more fused lookups, one output distribution (`ShardedEmbeddingBagCollection`, embeddingbag.py).
Everything is computed from summed loads ``[plans, groups, ranks, columns]``, see
`predictor.cost.loads`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from predictor import units
from predictor.cost.elementwise import memory_ms
from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.loads import (
    COMMON,
    KERNELS,
    VARIANCES,
    Load,
    fused_backward_ms,
    fused_forward_ms,
)
from predictor.cost.lookup.embedding import lookup_model
from predictor.cost.ops import position_weights
from predictor.cost.stragglers import expected_excess
from predictor.hardware.loader import load_runtime
from predictor.iteration.graph import Mask
from predictor.model.lookup_group import LookupGroup
from predictor.model.plan import ROW_SPLITS, ShardingType
from predictor.model.workload import DATA_TYPE_BYTES, INDEX_BYTES

Array = NDArray[np.float64]
CostModel = Callable[[Array], Array]
"""Bytes -> ms, in the same shape; never falling."""
Size = Callable[[Array], Array]
"""Loads ``[plans, ranks, columns]`` -> bytes ``[plans, ranks or 1]``."""
Collective = Callable[..., Array]

LENGTH_BYTES = 4
OUTPUT_BYTES = 4
COPY_PASSES = 2
"""A copy reads and writes."""
UNIQUE_PASSES = 8
"""Reads and writes of an id beside its sort: numbering 2, flags of distinct ids 2, distinct ids 2,
inverse 2 (UniqueCub.cu)."""
SPLITS = 3
"""Numbers sent to each peer to announce a transfer: of lengths, ids and samples."""

LOOKUP_KERNELS: int = load_runtime("torchrec")["lookup_kernels"]
"""Small kernels that TorchRec runs around a fused lookup."""

TYPE_ORDER = (
    ShardingType.TABLE_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.TABLE_COLUMN_WISE,
    ShardingType.ROW_WISE,
    ShardingType.TABLE_ROW_WISE,
    ShardingType.GRID_SHARD,
    ShardingType.DATA_PARALLEL,
)
"""Order of the exchanges within a module. TorchRec's own is that of the first table of each type;
one fixed order lets plans of different mix share one graph."""

COLUMN_SPLIT = {ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID_SHARD}
HIERARCHICAL = {ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD}


@dataclass(frozen=True)
class Transfer:
    """Collective: name, scope and cost ``[plans, 1]`` in ms."""

    name: str
    scope: str
    cost_ms: Array


class Exchange:
    """Costs of one (module, sharding type) under many plans.

    Args:
        groups: all lookup groups, in the order of the loads' second axis.
        members: indices of the groups of this exchange.
        loads: ``[plans, groups, ranks, columns]``.
        part: name of the part of several exchanges that it stands for; "" for one exchange.
    """

    def __init__(
        self,
        costs: FixedCosts,
        groups: Sequence[LookupGroup],
        members: Sequence[int],
        loads: Array,
        part: str = "",
    ) -> None:
        self.workload = costs.workload
        self.topology = costs.topology
        self.hardware = costs.hardware
        self.lookups = lookup_model(costs.hardware)
        self.collectives = costs.collectives
        self.all_ranks = costs.all_ranks
        self.sharding_type = groups[members[0]].sharding_type
        self.module = groups[members[0]].module
        names = (f"{groups[m].module}.{groups[m].sharding_type.short}" for m in members)
        self.name = " ".join(dict.fromkeys((*names, part) if part else names))
        self.groups = groups
        self.members = tuple(members)
        self.weighted = any(groups[m].weighted for m in members)
        self.processed = self.module in costs.workload.processed
        self.pooled = all(groups[m].pooling != "none" for m in members)
        self.prefetched = frozenset(m for m in members if groups[m].cached_dim)
        self.loads = loads
        self._waiting: dict[tuple[int, Load], Array] = {}
        self.total: Array = sum((loads[:, m] for m in members[1:]), loads[:, members[0]])

    @cached_property
    def active(self) -> Mask:
        """Plans ``[plans]`` in which any table uses this exchange."""
        return np.asarray(self.total[..., Load.SHARDS].sum(axis=-1) > 0)

    def group_active(self, group: int) -> Mask:
        return np.asarray(self.loads[:, group, :, Load.SHARDS].sum(axis=-1) > 0)

    @property
    def is_replicated(self) -> bool:
        """Data-parallel tables: whole on every rank, with a dense gradient."""
        return self.sharding_type is ShardingType.DATA_PARALLEL

    @property
    def is_dense(self) -> bool:
        """Some tables have dense gradients, which the dense optimizer steps."""
        return not all(self.groups[m].fused for m in self.members)

    @property
    def is_local(self) -> bool:
        """No forward exchange: tables are replicated, or there is one rank."""
        return self.is_replicated or self.topology.world_size == 1

    def cost(self, model: CostModel, size: Size) -> Array:
        """Return the time of work whose size in bytes is linear in the loads.

        Args:
            model: time by bytes; lower bounds replace it by a linear one.
            size: linear but for a maximum over ranks.
        """
        return np.asarray(model(size(self.total)))

    def permute_ms(self) -> Array:
        """Price reordering the local ids before the exchange; row splits also bucketize them."""
        model = self._bucketize_ms if self.sharding_type in ROW_SPLITS else self._reorder_ms
        ids_ms = self.cost(model, _mean_id_bytes) + self._unique_ms()
        if self.sharding_type in ROW_SPLITS:
            ids_ms = ids_ms + self.lookups.bucketize_ms(self._longest_bag)
        if self.processed:
            each = position_weights.PREPARE_BYTES / INDEX_BYTES / self.hardware.streaming
            ids_ms = ids_ms + self.prepared * self.cost(lambda size: each * size, _mean_id_bytes)
        return ids_ms

    @property
    def _longest_bag(self) -> float:
        """Largest mean ids per sample of any feature of the module."""
        tables = (t for t in self.workload.tables if t.module == self.module)
        return max(f.pooling_factor for table in tables for f in table.features)

    @cached_property
    def prepared(self) -> Array:
        """1 in plans ``[plans, 1]`` in which positions travel with the ids: those that split rows
        of a table of the module, else 0 (`modify_input_for_feature_processor`, utils.py)."""
        split = [
            i
            for i, g in enumerate(self.groups)
            if g.module == self.module and g.sharding_type in ROW_SPLITS
        ]
        shards = self.loads[:, split][..., Load.SHARDS].sum(axis=(1, 2))
        return np.asarray(shards > 0, dtype=np.float64)[:, None]

    def _unique_ms(self) -> Array:
        """Price the search for the distinct ids of the local batch, ``[plans, 1]``.

        `jagged_unique_indices` of FBGEMM numbers the ids over all tables, sorts them with their
        places by all 64 bits (`at::_unique`, UniqueCub.cu) and writes distinct and inverse ids.
        """
        expanded = self.total[..., Load.EXPANDED].mean(axis=-1, keepdims=True)
        dims = [t.embedding_dim for t in self.workload.tables if t.module == self.module]
        each = UNIQUE_PASSES * INDEX_BYTES / self.hardware.streaming
        pass_ms = self.lookups.sort_pass_ms(weighted=False, pooled=True)
        each += float(self.lookups.sort_passes(2.0**63)) * pass_ms
        return np.asarray(each * expanded / max(dims))

    def _reorder_ms(self, size: Array) -> Array:
        return memory_ms(self.hardware, 2 * size)

    def _bucketize_ms(self, size: Array) -> Array:
        """Price putting ids into the buckets of their row blocks, then in the order of ranks."""
        each = units.us(1e-3 * self.hardware.elementwise.bucketize_ns_per_id)
        return np.asarray(memory_ms(self.hardware, 4 * size) + each * size / INDEX_BYTES)

    def splits_ms(self, exchanges: ArrayLike = 1.0) -> Array:
        """Price the small all-to-all that announces to every rank how much it will receive.

        Args:
            exchanges: number of exchanges it serves, ``[plans, 1]``; pipelines fuse all of them.
        """
        split_bytes = SPLITS * INDEX_BYTES * self.topology.world_size
        size = np.atleast_2d(split_bytes * np.asarray(exchanges, dtype=np.float64))
        return np.asarray(self.collectives.all_to_all(size, scope="world"))

    def ids_ms(self) -> Array:
        """Price sending lengths, ids and any weights: one all-to-all each."""
        sent = {Load.BAGS: LENGTH_BYTES, Load.IDS: INDEX_BYTES, Load.WEIGHTED_IDS: OUTPUT_BYTES}
        model = partial(self.collectives.all_to_all, scope="world")
        time = np.zeros(1)
        for column, width in sent.items():
            if column is not Load.WEIGHTED_IDS:
                time = time + self.cost(model, busiest(column, width))
            elif self.weighted:
                travel = self.prepared if self.processed else 1.0
                time = time + travel * self.cost(model, busiest(column, width))
        return time

    @property
    def tensors_sent(self) -> int:
        """Number of collectives of its ids: lengths, ids, weights that travel in every plan."""
        return 2 + (self.weighted and (not self.processed or self.sharding_type in ROW_SPLITS))

    def recat_ms(self) -> Array:
        """Price reordering received or local ids by feature, ``[plans, ranks]``."""
        moving = self.cost(
            partial(memory_ms, self.hardware),
            lambda load: (
                2 * INDEX_BYTES * load[..., Load.IDS] + 2 * LENGTH_BYTES * load[..., Load.BAGS]
            ),
        )
        bag_ms = units.us(1e-3 * self.hardware.elementwise.permute_ns)
        return moving + self.cost(lambda bags: bag_ms * bags, lambda load: load[..., Load.BAGS])

    def forward_ms(self, group: int) -> Array:
        """Price the fused lookup, ``[plans, ranks]``; ranks without a shard launch none."""
        floor_ms = self.lookups.forward_floor_ms()
        if not self.hardware.inline:
            floor_ms += LOOKUP_KERNELS * units.us(self.hardware.elementwise.floor_us)
        if self.groups[group].hashed:
            floor_ms += self.lookups.hash_floor_ms()
        return self._lookup(group, Load.FORWARD_MS, floor_ms)

    def backward_ms(self, group: int) -> Array:
        """Price the backward of the fused lookup with its optimizer, ``[plans, ranks]``."""
        return self._lookup(group, Load.BACKWARD_MS, self.lookups.backward_floor_ms())

    def prefetch_ms(self, group: int) -> Array:
        """Time filling the UVM cache ahead of the lookup, ``[plans, ranks]``."""
        return self._lookup(group, Load.PREFETCH_MS, self.lookups.prefetch_floor_ms())

    def load_of(self, group: int) -> Array:
        return self.loads[:, group]

    def _lookup(self, group: int, column: Load, floor_ms: float) -> Array:
        load = self.load_of(group)
        if column is Load.FORWARD_MS:
            time = fused_forward_ms(load)
        elif column is Load.BACKWARD_MS:
            time = fused_backward_ms(load, self.groups[group], self.hardware)
        else:
            time = load[..., column]
        if column is not Load.PREFETCH_MS:
            time = time + self.waiting_ms(group, column)
        return np.where(load[..., Load.SHARDS] > 0, floor_ms + time, 0.0)

    def waiting_ms(self, group: int, column: Load) -> Array:
        """Return the wait of a lookup for the rank with the most ids, ``[plans, 1]``.

        Args:
            column: forward or backward.
        """
        if (group, column) not in self._waiting:
            self._waiting[group, column] = straggling_ms(self.load_of(group), column)
        return self._waiting[group, column]

    def outputs(self, *, backward: bool) -> list[Transfer]:
        """Return the output distribution, or its backward, as collectives in the order they run.

        TW, CW, TWCW: one all-to-all. RW: reduce-scatter, all-gather backward. TWRW, GRID:
        reduce-scatter within the intra group, then all-to-all across groups; mirrored backward.
        Rows that are not pooled cannot be reduced: they take an all-to-all for every type.
        """
        qcomm = self.workload.qcomm.backward if backward else self.workload.qcomm.forward
        width = DATA_TYPE_BYTES[qcomm]
        comms, kind = self.collectives, self.sharding_type
        reduce = comms.all_gather if backward else comms.reduce_scatter
        name = "gather" if backward else "reduce"
        if self.is_local:
            return []
        if kind is ShardingType.ROW_WISE and self.pooled:
            return [self._transfer(name, "world", reduce, width)]
        if kind not in HIERARCHICAL:
            return [self._transfer("all_to_all", "world", comms.all_to_all, width)]
        transfers = []
        if self.topology.intra_group_size > 1:  # TorchRec skips collectives of one rank
            transfers.append(self._transfer(name, "intra", reduce, width))
        if self.topology.groups > 1:
            # the reduction within the group leaves one part of a row block
            across = width / self.topology.intra_group_size
            transfers.append(self._transfer("all_to_all", "cross", comms.all_to_all, across))
        return transfers[::-1] if backward else transfers

    def _transfer(self, name: str, scope: str, collective: Collective, width: float) -> Transfer:
        cost = self.cost(partial(collective, scope=scope), busiest(Load.OUTPUTS, width))
        return Transfer(f"{self.name}.{name}", scope, cost)

    def pack_ms(self, group: int, *, backward: bool) -> Array:
        """Price the copies of a fused lookup for the output distribution, ``[plans, ranks]``.

        Outputs are copied into the send buffer of an all-to-all; gradients are divided by the
        number of ranks in place (`All2All_Pooled_Req`, `ReduceScatterBase_Req` in comm_ops.py).
        """
        if self.is_local or not (backward or self._all_to_all):
            return np.zeros(1)
        outputs = self.loads[:, group, :, Load.OUTPUTS]
        if self.sharding_type in HIERARCHICAL and not backward:
            outputs = outputs / self.topology.intra_group_size  # reduced within the group by then
        return np.asarray(COPY_PASSES * OUTPUT_BYTES * outputs / self.hardware.streaming)

    def unpack_ms(self, shared: Mask, *, backward: bool) -> Array:
        """Price a rank's copies of the outputs it received, or of their gradient, ``[plans, 1]``.

        An all-to-all's outputs are concatenated by rank; their gradients are made contiguous and
        concatenated (`All2All_Pooled_Wait`). Columns of a table are put together
        (`permute_pooled_embs`). Outputs that share a KeyedTensor with those of other exchanges are
        concatenated once more, and their gradients made contiguous. Where distinct ids were looked
        up, repeated ones get copies of their rows (`construct_jagged_tensors`). Ids that stay on
        the rank are brought into the order of the module's exchanges, where it has several
        (`_has_features_permute` of embeddingbag.py).

        Args:
            shared: plans ``[plans]`` in which other exchanges of the module are used.
        """
        kind = self.sharding_type
        # outputs that are not pooled come as a JaggedTensor a feature
        passes = COPY_PASSES * np.asarray(shared & self.pooled, dtype=np.float64)
        if self._all_to_all and not self.is_local:
            passes = passes + COPY_PASSES * (2 if backward else 1)
        if kind in COLUMN_SPLIT:
            passes = passes + COPY_PASSES
        if self.is_replicated:
            received = self.total[..., Load.OUTPUTS].max(axis=-1)
        else:
            reduced = kind is ShardingType.ROW_WISE and self.pooled
            among = self.topology.world_size if reduced else 1
            among = self.topology.intra_group_size if kind in HIERARCHICAL else among
            received = self.total[..., Load.OUTPUTS].mean(axis=-1) / among
        expanded = self.total[..., Load.EXPANDED].mean(axis=-1)
        repeats = COPY_PASSES + backward  # gradients of repeated ids are added up
        moved = OUTPUT_BYTES * (passes * received + repeats * expanded)
        bandwidth = self.hardware.streaming * self.hardware.elementwise.columns
        time = moved / bandwidth
        if self.is_local and not backward and self.hardware.elementwise.permute_ns:
            bags = self.total[..., Load.BAGS].mean(axis=-1)
            ids = self.total[..., Load.IDS].mean(axis=-1)
            permuted = COPY_PASSES * (INDEX_BYTES * ids + LENGTH_BYTES * bags)
            bag_ms = units.us(1e-3 * self.hardware.elementwise.permute_ns)
            time = time + shared * (permuted / self.hardware.streaming + bag_ms * bags)
        return np.asarray(time)[..., None]

    @property
    def _all_to_all(self) -> bool:
        """True if an all-to-all delivers the outputs, at least as the last step."""
        if self.sharding_type in HIERARCHICAL:
            return self.topology.groups > 1
        return not self.pooled or self.sharding_type is not ShardingType.ROW_WISE

    def gradient_sync_ms(self) -> Array:
        """Price the all-reduce of data-parallel tables' dense gradients, ``[plans, 1]``.

        A fused lookup holds its tables in one parameter (FBGEMM's dense TBE), and DDP never
        splits a parameter over buckets: all of it leaves at once.
        """
        model = partial(self.all_ranks.all_reduce, scope="world")
        return self.cost(model, busiest(Load.GRADIENTS, OUTPUT_BYTES))

    def optimizer_ms(self, model: CostModel) -> Array:
        """Price the dense optimizer on tables with dense gradients, ``[plans, ranks]``.

        Args:
            model: takes elements, not bytes.
        """
        return self.cost(model, lambda load: load[..., Load.GRADIENTS])


def straggling_ms(load: Array, column: Load) -> Array:
    """Return the expected excess of the slowest rank's lookups over the largest mean.

    All ranks wait for the slowest one at the next collective.

    Args:
        load: of one fused lookup, ``[plans, ranks, columns]``.
        column: its forward or backward.

    Returns:
        Times ``[plans, 1]`` in ms; ``[1]`` zero where no time varies.
    """
    way = KERNELS.index(column)
    variance = load[..., VARIANCES[way]] + load[..., COMMON[way]] ** 2
    if not variance.any():
        return np.zeros(1)
    # subtracting a base plan's rows may leave a rounding error below zero
    return expected_excess(load[..., column], np.sqrt(np.maximum(variance, 0.0)))


def _mean_id_bytes(load: Array) -> Array:
    return np.asarray(INDEX_BYTES * load[..., Load.IDS].mean(axis=-1, keepdims=True))


def busiest(column: Load, width: float) -> Size:
    """Return the size in bytes on the busiest rank, ``[plans, 1]``.

    Every rank sends an equal share of each rank's ids, so the all-to-all waits for the busiest
    receiver.
    """
    return lambda load: width * load[..., column].max(axis=-1, keepdims=True)


def exchanges(
    costs: FixedCosts, groups: Sequence[LookupGroup], loads: Array, make: type[Exchange] = Exchange
) -> list[Exchange]:
    """Return the exchanges of all modules in the order in which TorchRec runs them."""
    keys = [(m, t) for m in costs.workload.modules for t in TYPE_ORDER]
    built = []
    for key in keys:
        members = [i for i, g in enumerate(groups) if (g.module, g.sharding_type) == key]
        if members:
            built.append(make(costs, groups, members, loads))
    return built
