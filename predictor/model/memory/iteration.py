"""Memory that one rank takes and gives back while a train pipeline iterates, block by block.

Shards, parameters, optimizer states and buckets stay over iterations and are counted elsewhere.

The order is that of TorchRec's pipelines and autograd functions (torchrec 1.8:
train_pipeline/train_pipelines.py, dist_data.py, comm_ops.py), checked block by block against the
allocations of real ranks. The ops of the dense part give its memory.

An exchange is all tables of one module and sharding type, as TorchRec groups them
(`ShardedEmbeddingBagCollection` in torchrec/distributed/embeddingbag.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from predictor.model.memory.blocks import COMPUTE, COPY, INPUT_DIST, Ledger, Peak
from predictor.model.memory.dense import (
    Held,
    MemoryEvent,
    ModuleBackward,
    ModuleLookup,
    OpMemory,
    dense_memory,
)
from predictor.model.memory.ranks import LENGTH_BYTES, OUTPUT_BYTES, WEIGHT_BYTES
from predictor.model.op_calls import DenseProgram
from predictor.model.plan import ROW_SPLITS, ShardingPlan, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import DATA_TYPE_BYTES, INDEX_BYTES, Table, Workload

POSITION_BYTES = INDEX_BYTES + WEIGHT_BYTES
SIZES = ("sent", "received", "ids", "looked_up", "output", "replica", "positions")
"""Attributes of `ExchangeMemory` that differ between ranks and plans."""


@dataclass(frozen=True)
class ExchangeMemory:
    """Memory of one module and sharding type on one rank, in bytes unless stated otherwise.

    Args:
        pooled: False for an EmbeddingCollection's, whose outputs are one row per id.
        sent: the rank's own ids on their way out, with lengths and weights.
        received: the ids of all ranks that its shards serve.
        ids: number of received ids.
        looked_up: outputs of its lookups for the samples of all ranks.
        output: outputs of all its tables for the rank's own samples.
        replica: weights of data-parallel tables.
        positions: positions and weights that a feature processor keeps from the lookup to its
            backward.
        forward_wire, backward_wire: bytes on the wire for each byte of fp32.
    """

    module: str
    sharding_type: ShardingType
    pooled: bool
    sent: float = 0.0
    received: float = 0.0
    ids: float = 0.0
    looked_up: float = 0.0
    output: float = 0.0
    replica: int = 0
    forward_wire: float = 1.0
    backward_wire: float = 1.0
    positions: float = 0.0

    @property
    def name(self) -> tuple[str, ShardingType]:
        return self.module, self.sharding_type

    @property
    def local(self) -> bool:
        """Nothing is exchanged: every rank has the tables."""
        return self.sharding_type is ShardingType.DATA_PARALLEL


def input_bytes(
    workload: Workload, module: str, ids: float, samples: float, *, split: bool = False
) -> float:
    """Return bytes of ids, of weights if the module takes any, and of lengths.

    Args:
        samples: total over all features.
        split: one of its tables is split by rows, so a feature processor's positions travel too.
    """
    weighted = module in workload.weighted
    weighted &= split or module not in workload.processed
    return ids * (INDEX_BYTES + WEIGHT_BYTES * weighted) + samples * LENGTH_BYTES


def batch_bytes(workload: Workload) -> float:
    """Return bytes of one rank's batch on the device: ids, dense features and labels."""
    total = workload.batch_size * (getattr(workload.dense, "in_features", 0) + 1) * 4.0
    for module, ids, samples in workload.batch_ids:
        total += input_bytes(workload, module, ids, samples)
    return total


def exchanges(
    workload: Workload, topology: Topology, plan: ShardingPlan
) -> list[list[ExchangeMemory]]:
    """Return each rank's exchanges, in the order of the workload's modules and tables."""
    groups: dict[tuple[str, ShardingType], list[tuple[Table, TablePlan]]] = defaultdict(list)
    for module in workload.modules:
        for key, table in zip(workload.keys, workload.tables, strict=True):
            if table.module == module:
                sharded = plan.tables[key]
                groups[module, sharded.sharding_type].append((table, sharded))
    ranks: list[list[ExchangeMemory]] = [[] for _ in range(topology.world_size)]
    split = {module for module, kind in groups if kind in ROW_SPLITS}
    for (module, kind), tables in groups.items():
        by_rank = _group(workload, topology, module, kind, tables, split=module in split)
        for rank, exchange in enumerate(by_rank):
            ranks[rank].append(exchange)
    return ranks


def largest(of_ranks: Sequence[Sequence[ExchangeMemory]]) -> list[ExchangeMemory]:
    """Return exchanges that are as large as those of any of several ranks, or up to 3 % larger, so
    that plans which hardly differ have the same."""
    return [
        replace(same[0], **{name: _round_up(max(getattr(e, name) for e in same)) for name in SIZES})
        for same in zip(*of_ranks, strict=True)
    ]


def _round_up(size: float) -> float:
    """Round up to the next of 32 steps between powers of two."""
    fraction, exponent = math.frexp(size)
    return math.ldexp(math.ceil(64 * fraction) / 64, exponent)


def _group(
    workload: Workload,
    topology: Topology,
    module: str,
    kind: ShardingType,
    tables: list[tuple[Table, TablePlan]],
    *,
    split: bool,
) -> Iterator[ExchangeMemory]:
    """Yield one exchange, rank by rank."""
    world, batch = topology.world_size, workload.batch_size
    sent = output = 0.0
    replica = 0
    ranks: list[int] = []
    looked_up: list[float] = []  # elements
    received: list[tuple[float, float, int]] = []  # ids and samples of a shard, shards
    arrived = np.zeros((world, 3))  # ids, samples, and elements that are looked up
    for table, sharded in tables:
        ids = table.lookups_per_sample * batch
        samples = sum(f.num_poolings for f in table.features) * batch
        rows = samples if table.is_pooled else ids
        output += rows * table.embedding_dim * OUTPUT_BYTES
        if kind is ShardingType.DATA_PARALLEL:
            replica += table.weight_bytes
            arrived += ids, samples, rows * table.embedding_dim
            continue
        # the ids go to every column of shards
        columns = len({shard.offset[1] for shard in sharded.shards})
        sent += columns * input_bytes(workload, module, ids, samples, split=split)
        parts = len(sharded.shards) / columns if kind in ROW_SPLITS else 1.0
        arriving = ids * world / parts
        rows = samples * world if table.is_pooled else arriving
        ranks += [shard.rank for shard in sharded.shards]
        looked_up += [rows * (s.size[1] if s.size[0] else 0) for s in sharded.shards]
        received.append((arriving, samples * world, len(sharded.shards)))
    if ranks:
        each, counts = np.array([row[:2] for row in received]), [row[2] for row in received]
        rows_of_shards = np.column_stack((np.repeat(each, counts, axis=0), looked_up))
        for column in range(arrived.shape[1]):
            arrived[:, column] = np.bincount(ranks, rows_of_shards[:, column], world)
    for ids, samples, elements in arrived.tolist():
        yield ExchangeMemory(
            module,
            kind,
            tables[0][0].is_pooled,
            sent,
            input_bytes(workload, module, ids, samples, split=split),
            ids,
            elements * OUTPUT_BYTES,
            output,
            replica,
            forward_wire=DATA_TYPE_BYTES[workload.qcomm.forward] / 4,
            backward_wire=DATA_TYPE_BYTES[workload.qcomm.backward] / 4,
            positions=POSITION_BYTES * ids * (module in workload.processed),
        )


def unplaced(workload: Workload) -> list[ExchangeMemory]:
    """Return the least exchanges of any plan: one per module, own samples only, no shards."""
    result = []
    for module in workload.modules:
        tables = [t for t in workload.tables if t.module == module]
        ids = sum(t.lookups_per_sample for t in tables) * workload.batch_size
        samples = sum(f.num_poolings for t in tables for f in t.features) * workload.batch_size
        output = sum(t.outputs_per_sample * t.embedding_dim for t in tables) * workload.batch_size
        sent, pooled = input_bytes(workload, module, ids, samples), tables[0].is_pooled
        kind = ShardingType.TABLE_WISE
        result.append(ExchangeMemory(module, kind, pooled, sent, output=output * OUTPUT_BYTES))
    return result


ITERATIONS = 3
"""Iterations until the pipeline is full and every size has been requested."""
BATCHES_AHEAD = {"base": 1, "sparse_dist": 2, "prefetch_sparse_dist": 2, "semi_sync": 3}
"""Batches that are copied to the device while one trains."""
SORT_BYTES = 52
"""Per id of a lookup's backward on a device: linear indices and their sorted copy (8 each), infos
and theirs (4 each), runs (8), their lengths and sums (4 each), the sort's own scratch (12);
`transpose_embedding_input` in fbgemm_gpu's split_embeddings_utils.cu."""
PREFETCH_BYTES = 56
"""Per id of a cached table's prefetch at its peak: linear cache indices, the unique ones, their
lookups and positions; seven copies of the ids in `calculate_pipeline_io_cost` of TorchRec's
planner/shard_estimators.py."""


class Iteration:
    """One rank's memory, iteration by iteration.

    Args:
        program: its dense part.
        exchanges: its embedding modules, in order.
        device: ``cpu`` for ranks where gloo copies what it reduces and gathers, and batches lie in
            host memory anyway.
        cached: modules with a cached table.
        stashed: bytes of weights that are on the host from the last lookup to the backward, and of
            optimizer states that are there from the step to the backward.
    """

    def __init__(
        self,
        workload: Workload,
        program: DenseProgram,
        exchanges: Sequence[ExchangeMemory],
        device: str,
        cached: frozenset[str] = frozenset(),
        stashed: tuple[int, int] = (0, 0),
    ) -> None:
        self.dense = dense_memory(program, trains=workload.training)
        self.exchanges = exchanges
        self.distributed = [e for e in exchanges if not e.local]
        self.pipeline = workload.train_pipeline
        self.prefetches = self.pipeline == "prefetch_sparse_dist"
        self.looks_ahead = self.pipeline == "semi_sync"
        self.on_device = device != "cpu"
        self.batch_bytes = batch_bytes(workload) if self.on_device else 0.0
        self.trains = workload.training
        self.cached = cached
        self.stashed = stashed
        self.ledger = Ledger(simulate=self.on_device)
        self.fresh: list[Hashable] = []
        self.waiting: list[str] = []
        self.ahead: list[str] = []
        self.unreturned: list[ExchangeMemory] = []
        self.leaving: list[Hashable] = []
        lookups = [e for e in self.dense.forward if isinstance(e, ModuleLookup)]
        self.last_lookup = lookups[-1] if lookups else None

    def run(self) -> Peak:
        for ahead in range(BATCHES_AHEAD[self.pipeline]):
            self.ledger.take(("batch", ahead), self.batch_bytes, COPY, lent=True)
        self._restore()
        if self.pipeline != "base":
            self._take("sent", 0)
            self._take("received", 0)
        if self.looks_ahead:
            self._look_ahead(0)
            self._take("sent", 1)
            self._take("received", 1)
        if self.prefetches:
            self._prefetch(0)
            self._take("sent", 1)
        for i in range(ITERATIONS):
            self._step(i)
        return self.ledger.peak()

    def _step(self, i: int) -> None:
        ledger, ahead = self.ledger, BATCHES_AHEAD[self.pipeline]
        ledger.settle()
        if self.pipeline == "sparse_dist":
            self._take("sent", i + 1)
        if self.looks_ahead:
            self._take("sent", i + 2)
            self.waiting = self.ahead
        ledger.take(("batch", i + ahead), self.batch_bytes, COPY, lent=True)
        if self.prefetches:
            self._take("received", i + 1)
        self._part(self.dense.forward, i)
        for module in [*self.waiting]:
            self._await(module)
        if self.pipeline == "sparse_dist":
            self._take("received", i + 1)
        if self.prefetches:
            self._prefetch(i + 1)
        if self.looks_ahead:
            self._look_ahead(i + 1)
            self._take("received", i + 2)
        if self.trains:
            self._restore()
            self._part(self.dense.backward, i)
            self._return(i)
            self._part(self.dense.optimizer, i)
            ledger.give("stashed states")
        if self.prefetches:
            self._take("sent", i + 2)
        self._free(self.dense.ending)
        ledger.give(("batch", i))

    def _look_ahead(self, i: int) -> None:
        """Look up the batch whose forward comes next."""
        for module in self.dense.modules:
            self._look_up(module, i)
        self.ahead, self.waiting = self.waiting, []

    def _restore(self) -> None:
        """Bring stashed weights and states back to the device."""
        for name, size in zip(("weights", "states"), self.stashed, strict=True):
            if f"stashed {name}" not in self.ledger:
                self.ledger.take(f"stashed {name}", size, lent=True)

    # --- ids -------------------------------------------------------------------------------------

    def _take(self, side: str, i: int) -> None:
        """Take the ids of a batch in its input dist, ``sent`` or ``received``."""
        for e in self.distributed:
            self.ledger.take((side, e.name, i), getattr(e, side), INPUT_DIST)

    def _prefetch(self, i: int) -> None:
        """Reorder the next batch's ids, and take the scratch that fills caches with their rows."""
        for e in self.distributed:
            self._reorder(e, i)
            if e.module in self.cached:
                self.ledger.take(("prefetch", e.name), PREFETCH_BYTES * e.ids, INPUT_DIST)
                self.ledger.give(("prefetch", e.name))
            self._dismiss(e, i)

    def _dismiss(self, e: ExchangeMemory, i: int) -> None:
        self.ledger.give(("sent", e.name, i))
        self.ledger.give(("received", e.name, i))

    def _reorder(self, e: ExchangeMemory, i: int) -> None:
        """Take the ids in order, on the input dist's stream if a pipeline sends them ahead."""
        if ("ids", e.name, i) not in self.ledger:
            ahead = self.pipeline != "base"
            stream = INPUT_DIST if ahead else COMPUTE
            self.ledger.take(("ids", e.name, i), e.received, stream, lent=ahead)

    # --- the dense part --------------------------------------------------------------------------

    def _part(self, events: Sequence[MemoryEvent], i: int) -> None:
        for event in events:
            if isinstance(event, OpMemory):
                if self.unreturned and event.moves:
                    self._return(i)
                self._call(event)
            elif isinstance(event, ModuleBackward):
                self._gather_gradients(event)
            elif isinstance(event, ModuleLookup):
                if not self.looks_ahead:
                    self._look_up(event.name, i)
                if event is self.last_lookup and self.trains:
                    self.ledger.give("stashed weights")
            else:  # DDP copies a parameter's gradient into its bucket, which is always there
                self._free(self.fresh)
                self.fresh = []

    def _call(self, call: OpMemory) -> None:
        for module in [*self.waiting]:
            if not call.reads.isdisjoint(self.dense.modules[module].storages):
                self._await(module)
        self._hold(call.holds)
        self._free(call.frees)

    def _free(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            self.ledger.give(key)

    def _hold(self, blocks: Iterable[Held]) -> None:
        for block in blocks:
            if block.key not in self.ledger:
                self.ledger.take(block.key, block.size)
                if block.own_gradient:
                    self.fresh.append(block.key)

    # --- lookups ---------------------------------------------------------------------------------

    def _look_up(self, module: str, i: int) -> None:
        """Reorder the batch's ids, look them up, and send the outputs to their samples' ranks."""
        ledger = self.ledger
        exchanges = [e for e in self.exchanges if e.module == module]
        if self.pipeline == "base":
            for e in exchanges:
                if not e.local:
                    ledger.take(("sent", e.name, i), e.sent)
                    ledger.take(("received", e.name, i), e.received)
        for e in exchanges:
            self._reorder(e, i)
            if self.pipeline == "base":
                self._dismiss(e, i)
        for e in exchanges:
            ledger.give(("ids", e.name, i - 1 - self.looks_ahead))
            ledger.take(("positions", e.name, i), e.positions * self.trains)
            ledger.take(("looked up", e.name), e.looked_up)
            if e.local:
                continue
            self._send_outputs(e)
            ledger.give(("looked up", e.name))
        for e in exchanges:
            self._dismiss(e, i)
        self.waiting.append(module)

    def _send_outputs(self, e: ExchangeMemory) -> None:
        ledger, wire = self.ledger, e.forward_wire
        if e.pooled and e.sharding_type in ROW_SPLITS:
            ledger.take(("arrived", e.name), wire * e.output)
            if wire < 1 or not self.on_device:
                ledger.take(("copied", e.name), wire * e.looked_up)
            return
        if wire < 1:
            ledger.take(("encoded", e.name), wire * e.looked_up)
        ledger.take(("arrived", e.name), wire * e.output)
        ledger.take(("copied", e.name), wire * e.looked_up)
        ledger.give(("encoded", e.name))

    def _await(self, module: str) -> None:
        """Place the outputs that have arrived side by side, as the module returns them."""
        ledger = self.ledger
        self.waiting.remove(module)
        exchanges = [e for e in self.exchanges if e.module == module]
        several = len(exchanges) > 1
        for e in exchanges:
            ledger.give(("copied", e.name))
            reduced = e.pooled and e.sharding_type in ROW_SPLITS
            if several and not e.local and not reduced:
                ledger.take(("in order", e.name), e.output)
                ledger.give(("arrived", e.name))
        self._hold(self.dense.modules[module].holds)
        for e in exchanges:
            for block in ("arrived", "in order", "looked up"):
                ledger.give((block, e.name))

    # --- their backward --------------------------------------------------------------------------

    def _gather_gradients(self, event: ModuleBackward) -> None:
        """Send the gradients of a module's outputs to the ranks that hold its shards."""
        exchanges = [e for e in self.exchanges if e.module == event.name]
        whole = len(exchanges) == 1 and event.whole
        for e in reversed(exchanges):
            if not e.local:
                self._send_gradients(e, whole=whole)
        self.unreturned += exchanges
        if any(not e.pooled or e.sharding_type in ROW_SPLITS for e in exchanges):
            self.leaving += event.done
        else:
            self._free(event.done)

    def _send_gradients(self, e: ExchangeMemory, *, whole: bool) -> None:
        ledger, wire = self.ledger, e.backward_wire
        if not e.pooled:
            ledger.take(("gradient", e.name), wire * e.looked_up)
            return
        if not whole:
            ledger.take(("contiguous", e.name), e.output)
        if e.sharding_type in ROW_SPLITS:
            ledger.take(("gradient", e.name), wire * e.looked_up)
            if not self.on_device:
                ledger.take(("copied", e.name), wire * e.looked_up)
            return
        ledger.take(("slices", e.name), e.output)
        ledger.take(("leaving", e.name), e.output)
        ledger.give(("slices", e.name))
        ledger.give(("contiguous", e.name))
        if wire < 1:
            ledger.take(("encoded", e.name), wire * e.output)
            ledger.give(("leaving", e.name))
        ledger.take(("gradient", e.name), wire * e.looked_up)

    def _return(self, i: int) -> None:
        """Run the lookups' backward with the fused optimizer on arrived gradients, last first."""
        ledger = self.ledger
        self._free(self.leaving)
        self.leaving = []
        for e in reversed(self.unreturned):
            for block in ("copied", "leaving", "contiguous", "encoded"):
                ledger.give((block, e.name))
            if not e.pooled or e.backward_wire < 1:
                ledger.take(("decoded", e.name), e.looked_up)
                ledger.give(("gradient", e.name))
            scratch = e.replica + SORT_BYTES * e.ids * self.on_device
            ledger.take(("backward", e.name), scratch)
            ledger.give(("backward", e.name))
            ledger.give(("positions", e.name, i))
            for block in ("decoded", "gradient"):
                ledger.give((block, e.name))
        self.unreturned = []
