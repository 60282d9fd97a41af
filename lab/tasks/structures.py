"""Plans that need no search: one structure each, and the shards that they are made of."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from predictor.hardware.schema import HardwareProfile
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.plan_check import row_blocks
from predictor.model.topology import Topology
from predictor.model.workload import Table, Workload
from predictor.predict import Prediction, predict

SMALL_BYTES = 2 * 2**20
"""Tables up to it are replicated by the plans that replicate small ones."""

Candidate = tuple[TablePlan, ...]
"""A sharding of every table, in the workload's order."""


def plan_of(workload: Workload, topology: Topology, candidate: Candidate) -> ShardingPlan:
    """The shardings of all tables as a plan."""
    tables = dict(zip(workload.keys, candidate, strict=True))
    return ShardingPlan(tables, topology.world_size, topology.local_world_size)


def structures(workload: Workload, topology: Topology, rng: random.Random) -> dict[str, Candidate]:
    """Name -> plan that needs no search; all of the same workload, some may be equal."""
    tables, world = workload.tables, topology.world_size
    lookups = [t.lookups_per_sample * t.embedding_dim for t in tables]
    by_lookups = greedy(lookups, world)
    plans = {
        "table_wise_by_lookups": _table_wise(tables, by_lookups),
        "table_wise_by_bytes": _table_wise(tables, greedy([t.weight_bytes for t in tables], world)),
        "table_wise_round_robin": _table_wise(tables, [i % world for i in range(len(tables))]),
        "table_wise_random": _table_wise(tables, [rng.randrange(world) for _ in tables]),
        "column_wise": tuple(column_wise(t, world) for t in tables),
        "row_wise": tuple(row_wise(t, world) for t in tables),
    }
    local = topology.local_world_size
    if local > 1:
        hosts = greedy(lookups, topology.hosts)
        # an EmbeddingCollection has no such type, but the same shards
        kinds = {True: ShardingType.TABLE_COLUMN_WISE, False: ShardingType.COLUMN_WISE}
        plans["table_column_wise"] = tuple(
            column_wise(t, local, kinds[t.is_pooled], hosts[i] * local)
            for i, t in enumerate(tables)
        )
    return plans | _mixes(tables, lookups, world)


def _mixes(tables: Sequence[Table], lookups: Sequence[float], world: int) -> dict[str, Candidate]:
    """Plans of several sharding types; whole tables are placed by lookups."""
    by_size = sorted(range(len(tables)), key=lambda i: (tables[i].weight_bytes, i))
    small = {i for i in by_size if tables[i].weight_bytes <= SMALL_BYTES} or {by_size[0]}
    large = set(by_size[-(len(tables) // 3) :])
    rest = sorted(set(by_size) - large, key=lambda i: (-tables[i].embedding_dim, i))
    wide = set(rest[: len(rest) // 2])

    def mix(
        rows: AbstractSet[int] = frozenset(), columns: AbstractSet[int] = frozenset()
    ) -> Candidate:
        return _mix(tables, lookups, world, rows, columns)

    def with_copies(plan: Candidate) -> Candidate:
        copies = (data_parallel(t, world) if i in small else plan[i] for i, t in enumerate(tables))
        return tuple(copies)

    return {
        "small_data_parallel": with_copies(mix()),
        "mix_table_row_column": mix(rows=large, columns=wide),
        "mix_data_table_row": with_copies(mix(rows=large)),
    }


def _mix(
    tables: Sequence[Table],
    lookups: Sequence[float],
    world: int,
    rows: AbstractSet[int],
    columns: AbstractSet[int],
) -> Candidate:
    """Some tables split by rows, some by columns; the others whole, placed by lookups."""
    split = rows | columns
    ranks = greedy([0.0 if i in split else w for i, w in enumerate(lookups)], world)
    found = []
    for i, table in enumerate(tables):
        if i in rows:
            found.append(row_wise(table, world))
        elif i in columns:
            found.append(column_wise(table, world))
        else:
            found.append(table_wise(table, ranks[i]))
    return tuple(found)


def table_wise(table: Table, rank: int) -> TablePlan:
    """The whole table on one rank."""
    shard = Shard(rank, (0, 0), (table.num_embeddings, table.embedding_dim))
    return TablePlan(ShardingType.TABLE_WISE, ComputeKernel.FUSED, (shard,))


def column_wise(
    table: Table,
    ranks: int,
    kind: ShardingType = ShardingType.COLUMN_WISE,
    first: int = 0,
) -> TablePlan:
    """Equal column blocks, one on each of `ranks` ranks from `first`; as many as FBGEMM takes."""
    count = next(n for n in range(ranks, 0, -1) if table.embedding_dim % (4 * n) == 0)
    rows, width = table.num_embeddings, table.embedding_dim // count
    shards = tuple(Shard(first + i, (0, i * width), (rows, width)) for i in range(count))
    return TablePlan(kind, ComputeKernel.FUSED, shards)


def row_wise(table: Table, ranks: int) -> TablePlan:
    """TorchRec's row blocks, one a rank."""
    blocks = enumerate(row_blocks(table.num_embeddings, ranks))
    dim = table.embedding_dim
    shards = tuple(Shard(rank, (start, 0), (size, dim)) for rank, (start, size) in blocks)
    return TablePlan(ShardingType.ROW_WISE, ComputeKernel.FUSED, shards)


def data_parallel(table: Table, ranks: int) -> TablePlan:
    """A copy on every rank."""
    size = (table.num_embeddings, table.embedding_dim)
    shards = tuple(Shard(rank, (0, 0), size) for rank in range(ranks))
    return TablePlan(ShardingType.DATA_PARALLEL, ComputeKernel.DENSE, shards)


def _table_wise(tables: Sequence[Table], ranks: Sequence[int]) -> Candidate:
    return tuple(table_wise(t, rank) for t, rank in zip(tables, ranks, strict=True))


def greedy(weights: Sequence[float], ranks: int) -> list[int]:
    """Rank of each item: the heaviest first, each to the least loaded rank."""
    loads = [0.0] * ranks
    found = [0] * len(weights)
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        found[i] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[found[i]] += weights[i]
    return found


def table_wise_by_skew(
    workload: Workload, topology: Topology, hardware: HardwareProfile
) -> Candidate:
    """Many lookups of few rows on the first ranks, fewer lookups of many rows on the others.

    A lookup costs by ids and, most of all backward, by distinct rows. Of all cuts of the tables in
    the order of distinct rows for each id, this is the one where one half of the ranks is slowest
    forward and the other backward, each by as much as can be.
    """
    tables = workload.tables
    samples = workload.batch_size * topology.world_size
    order = sorted(range(len(tables)), key=lambda i: (distinct_share(tables[i], samples), i))
    plans = [halves(tables, order[:cut], topology.world_size) for cut in range(1, len(order))]
    return max(
        plans,
        key=lambda plan: _crossing_bytes(
            predict(workload, topology, hardware, plan_of(workload, topology, plan))
        ),
    )


def halves(tables: Sequence[Table], first: Collection[int], world: int) -> Candidate:
    """Some tables on the first half of the ranks, the others on the second; by lookups in each."""
    half = max(1, world // 2)
    ranks = [0] * len(tables)
    rest = [i for i in range(len(tables)) if i not in first]
    for part, start, count in ((sorted(first), 0, half), (rest, half, world - half)):
        weights = [tables[i].lookups_per_sample * tables[i].embedding_dim for i in part]
        for i, rank in zip(part, greedy(weights, max(1, count)), strict=True):
            ranks[i] = (start + rank) % world
    return _table_wise(tables, ranks)


def _crossing_bytes(predicted: Prediction) -> float:
    """How much slower the first half of the ranks is forward and the second backward, at least."""
    half = len(predicted.per_rank) // 2
    busy = {
        phase: [max(load.busy_ms.get(phase, 0.0), 1e-9) for load in predicted.per_rank]
        for phase in ("embedding_forward", "embedding_backward")
    }
    forward, backward = busy["embedding_forward"], busy["embedding_backward"]
    if not half:
        return 1.0
    return min(
        max(forward[:half]) / max(forward[half:]), max(backward[half:]) / max(backward[:half])
    )


def distinct_share(table: Table, samples: float) -> float:
    """Distinct rows for each id that a batch of so many samples draws, in (0, 1]."""
    bins = [f.distribution.bins(table.num_embeddings) for f in table.features]
    draws = [samples * f.lookups_per_sample for f in table.features]
    return sum(b.unique(n) for b, n in zip(bins, draws, strict=True)) / sum(draws)
