"""Bytes that one exchange moves through a rank: ids out and in, outputs of its lookups and back.

An exchange is all tables of one module and sharding type, as TorchRec groups them
(`ShardedEmbeddingBagCollection` in torchrec/distributed/embeddingbag.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from predictor.model.memory.shards import LENGTH_BYTES, OUTPUT_BYTES, WEIGHT_BYTES
from predictor.model.plan import ShardingPlan, ShardingType, TablePlan
from predictor.model.reservation import INDEX_BYTES
from predictor.model.topology import Topology
from predictor.model.workload import Table, Workload

ROW_SPLITS = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)
"""A shard has part of a table's rows, and gives a partial sum for every sample."""
POSITION_BYTES = INDEX_BYTES + WEIGHT_BYTES
WIRE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Exchange:
    """What one module and sharding type have in memory on one rank, in bytes unless said otherwise.

    Args:
        pooled: False for an EmbeddingCollection's, whose outputs are one row per id.
        sent: the rank's own ids on their way out, with lengths and weights.
        received: the ids of all ranks that its shards serve.
        ids: number of these.
        looked_up: outputs of its lookups for the samples of all ranks.
        output: of all its tables for the rank's own samples.
        replica: weights of data-parallel tables.
        positions: what a feature processor keeps of its ids from the lookup to its backward: the
            positions that its gathers saved, and the weights.
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
        """Of all exchanges one is so named."""
        return self.module, self.sharding_type

    @property
    def local(self) -> bool:
        """Nothing is exchanged: every rank has the tables."""
        return self.sharding_type is ShardingType.DATA_PARALLEL


def input_bytes(
    workload: Workload, module: str, ids: float, samples: float, *, split: bool = False
) -> float:
    """Ids with weights, if the module takes any, and lengths.

    Args:
        samples: of all features together.
        split: rows of one of its tables are split, so that a feature processor's positions travel.
    """
    weighted = any(t.weighted for t in workload.tables if t.module == module)
    weighted &= split or module not in workload.processed
    return ids * (INDEX_BYTES + WEIGHT_BYTES * weighted) + samples * LENGTH_BYTES


def batch_bytes(workload: Workload) -> float:
    """One rank's batch as it is copied to the device: ids, dense features and labels."""
    total = workload.batch_size * (getattr(workload.dense, "in_features", 0) + 1) * 4.0
    for module in workload.modules:
        features = {
            f.name: f for t in workload.tables if t.module == module for f in t.features
        }.values()
        ids = sum(f.lookups_per_sample for f in features) * workload.batch_size
        samples = sum(f.num_poolings for f in features) * workload.batch_size
        total += input_bytes(workload, module, ids, samples)
    return total


def exchanges(workload: Workload, topology: Topology, plan: ShardingPlan) -> list[list[Exchange]]:
    """Per rank, the exchanges in the order of the workload's modules and tables."""
    groups: dict[tuple[str, ShardingType], list[tuple[Table, TablePlan]]] = defaultdict(list)
    for module in workload.modules:
        for key, table in zip(workload.keys, workload.tables, strict=True):
            if table.module == module:
                sharded = plan.tables[key]
                groups[module, sharded.sharding_type].append((table, sharded))
    ranks: list[list[Exchange]] = [[] for _ in range(topology.world_size)]
    split = {module for module, kind in groups if kind in ROW_SPLITS}
    for (module, kind), tables in groups.items():
        of = _group(workload, topology, module, kind, tables, split=module in split)
        for rank, exchange in enumerate(of):
            ranks[rank].append(exchange)
    return ranks


def _group(
    workload: Workload,
    topology: Topology,
    module: str,
    kind: ShardingType,
    tables: list[tuple[Table, TablePlan]],
    *,
    split: bool,
) -> list[Exchange]:
    world, batch = topology.world_size, workload.batch_size
    sent = output = 0.0
    replica = 0
    totals: list[Mapping[str, float]] = [
        defaultdict(float, ids=0.0, samples=0.0, looked_up=0.0) for _ in range(world)
    ]
    for table, sharded in tables:
        ids = table.lookups_per_sample * batch
        samples = sum(f.num_poolings for f in table.features) * batch
        rows = samples if table.is_pooled else ids
        output += rows * table.embedding_dim * OUTPUT_BYTES
        if kind is ShardingType.DATA_PARALLEL:
            replica += table.weight_bytes
            for total in totals:
                _add(total, ids, samples, rows * table.embedding_dim)
            continue
        # the ids go to every column of shards
        columns = len({shard.offset[1] for shard in sharded.shards})
        sent += columns * input_bytes(workload, module, ids, samples, split=split)
        parts = len(sharded.shards) / columns if kind in ROW_SPLITS else 1.0
        for shard in sharded.shards:
            arriving = ids * world / parts
            found = samples * world if table.is_pooled else arriving
            width = shard.size[1] if shard.size[0] else 0
            _add(totals[shard.rank], arriving, samples * world, found * width)
    pooled = tables[0][0].is_pooled
    wires = [WIRE_BYTES[w] / 4 for w in (workload.qcomm.forward, workload.qcomm.backward)]
    return [
        Exchange(
            module,
            kind,
            pooled,
            sent,
            input_bytes(workload, module, total["ids"], total["samples"], split=split),
            total["ids"],
            total["looked_up"] * OUTPUT_BYTES,
            output,
            replica,
            forward_wire=wires[0],
            backward_wire=wires[1],
            positions=POSITION_BYTES * total["ids"] * (module in workload.processed),
        )
        for total in totals
    ]


def _add(total: Mapping[str, float], ids: float, samples: float, elements: float) -> None:
    assert isinstance(total, dict)
    total["ids"] += ids
    total["samples"] += samples
    total["looked_up"] += elements


def unplaced(workload: Workload) -> list[Exchange]:
    """What every plan's exchanges have of the rank's own samples: one a module, without shards."""
    found = []
    for module in workload.modules:
        tables = [t for t in workload.tables if t.module == module]
        ids = sum(t.lookups_per_sample for t in tables) * workload.batch_size
        samples = sum(f.num_poolings for t in tables for f in t.features) * workload.batch_size
        output = sum(t.outputs_per_sample * t.embedding_dim for t in tables) * workload.batch_size
        sent = input_bytes(workload, module, ids, samples)
        found.append(
            Exchange(
                module,
                ShardingType.TABLE_WISE,
                tables[0].is_pooled,
                sent,
                output=output * OUTPUT_BYTES,
            )
        )
    return found
