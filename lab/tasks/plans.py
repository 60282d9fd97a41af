"""Plans without prediction: simple ones of every structure, and random variants of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from lab.tasks.models import pick, whole
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.plan_check import (
    RuntimeSetting,
    find_runtime_problem,
    in_torchrec_order,
    row_blocks,
)
from predictor.model.topology import Topology
from predictor.model.workload import Table, Workload
from search.space.enumerate import enumerate_space
from search.space.option import Option

SMALL_BYTES = 2 * 2**20
"""Size up to which tables are replicated in plans that replicate small ones."""

Candidate = tuple[TablePlan, ...]
"""Sharding of every table, in the workload's order."""


def plan_of(workload: Workload, topology: Topology, candidate: Candidate) -> ShardingPlan:
    """Return the shardings of all tables as a plan."""
    tables = dict(zip(workload.keys, candidate, strict=True))
    return ShardingPlan(tables, topology.world_size, topology.local_world_size)


def structures(workload: Workload, topology: Topology, rng: random.Random) -> dict[str, Candidate]:
    """Return name -> simple plan of the workload; some may be equal."""
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
        # an EmbeddingCollection lacks this type, but column_wise gives the same shards
        kinds = {True: ShardingType.TABLE_COLUMN_WISE, False: ShardingType.COLUMN_WISE}
        plans["table_column_wise"] = tuple(
            column_wise(t, local, kinds[t.is_pooled], hosts[i] * local)
            for i, t in enumerate(tables)
        )
    return plans | _mixes(tables, lookups, world)


def _mixes(tables: Sequence[Table], lookups: Sequence[float], world: int) -> dict[str, Candidate]:
    """Return plans of several sharding types; whole tables are placed by lookups."""
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
    """Split some tables by rows, some by columns, and place the others whole by lookups."""
    split = rows | columns
    ranks = greedy([0.0 if i in split else w for i, w in enumerate(lookups)], world)
    plans = []
    for i, table in enumerate(tables):
        if i in rows:
            plans.append(row_wise(table, world))
        elif i in columns:
            plans.append(column_wise(table, world))
        else:
            plans.append(table_wise(table, ranks[i]))
    return tuple(plans)


def table_wise(table: Table, rank: int) -> TablePlan:
    """Return the plan of a whole table on one rank."""
    shard = Shard(rank, (0, 0), (table.num_embeddings, table.embedding_dim))
    return TablePlan(ShardingType.TABLE_WISE, ComputeKernel.FUSED, (shard,))


def column_wise(
    table: Table,
    ranks: int,
    kind: ShardingType = ShardingType.COLUMN_WISE,
    first: int = 0,
) -> TablePlan:
    """Return equal column blocks on up to `ranks` ranks from `first`, as FBGEMM allows."""
    count = next(n for n in range(ranks, 0, -1) if table.embedding_dim % (4 * n) == 0)
    rows, width = table.num_embeddings, table.embedding_dim // count
    shards = tuple(Shard(first + i, (0, i * width), (rows, width)) for i in range(count))
    return TablePlan(kind, ComputeKernel.FUSED, shards)


def row_wise(table: Table, ranks: int) -> TablePlan:
    """Return TorchRec's row blocks, one for each rank."""
    blocks = enumerate(row_blocks(table.num_embeddings, ranks))
    dim = table.embedding_dim
    shards = tuple(Shard(rank, (start, 0), (size, dim)) for rank, (start, size) in blocks)
    return TablePlan(ShardingType.ROW_WISE, ComputeKernel.FUSED, shards)


def data_parallel(table: Table, ranks: int) -> TablePlan:
    """Return a copy on every rank."""
    size = (table.num_embeddings, table.embedding_dim)
    shards = tuple(Shard(rank, (0, 0), size) for rank in range(ranks))
    return TablePlan(ShardingType.DATA_PARALLEL, ComputeKernel.DENSE, shards)


def _table_wise(tables: Sequence[Table], ranks: Sequence[int]) -> Candidate:
    return tuple(table_wise(t, rank) for t, rank in zip(tables, ranks, strict=True))


def greedy(weights: Sequence[float], ranks: int) -> list[int]:
    """Assign items to ranks: the heaviest first, each to the least loaded rank."""
    loads = [0.0] * ranks
    rank_of = [0] * len(weights)
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        rank_of[i] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[rank_of[i]] += weights[i]
    return rank_of


def signature(plan: ShardingPlan, workload: Workload) -> object:
    """Return a value equal for plans that differ only by renaming ranks or equal shards."""
    return _signature([plan.tables[key] for key in workload.keys])


def _signature(plan: Sequence[TablePlan]) -> object:
    ranks: dict[int, list[object]] = {}
    for index, table in enumerate(plan):
        for shard in table.shards:
            ranks.setdefault(shard.rank, []).append((index, table.sharding_type.value, shard.size))
    return tuple(sorted(tuple(sorted(shards, key=repr)) for shards in ranks.values()))


PREFIX = "random_"
"""Prefix of the names of random plans, before their number from 1."""
DRAWS = 20
"""Draws for every requested plan; if too few are new, fewer plans are returned."""


def random_plans(
    seed: int,
    workload: Workload,
    topology: Topology,
    count: int,
    without: Sequence[ShardingPlan] = (),
) -> dict[str, ShardingPlan]:
    """Draw plans ``random_1`` ..., the same for a seed on any machine, under any profile.

    Each is one of the `structures` with a random share of the tables sharded anew, by an option of
    TorchRec's planner on CPUs, on random ranks. Tables larger than `SMALL_BYTES` are not
    replicated, as their gradients would dominate the iteration.

    Args:
        count: number of plans; a larger count begins with the plans of a smaller one.
        without: plans to exclude, up to a renaming of ranks.
    """
    rng = random.Random(f"shardopt random plans {seed}")
    bases = list(structures(workload, topology, random.Random(f"shardopt plans {seed}")).values())
    offers = _offers(workload, topology)
    signatures = {signature(plan, workload) for plan in without}
    drawn: dict[str, ShardingPlan] = {}
    for _ in range(DRAWS * count):
        if len(drawn) == count:
            break
        plan = _draw(rng, pick(rng, bases), offers, topology)
        if (key := _signature(plan)) not in signatures:
            signatures.add(key)
            drawn[f"{PREFIX}{len(drawn) + 1}"] = plan_of(workload, topology, plan)
    return drawn


def _draw(
    rng: random.Random,
    base: Candidate,
    offers: Sequence[Sequence[Option]],
    topology: Topology,
) -> Candidate:
    share = rng.random()
    return tuple(
        _place(rng, pick(rng, options), topology) if rng.random() < share else current
        for current, options in zip(base, offers, strict=True)
    )


def _offers(workload: Workload, topology: Topology) -> list[list[Option]]:
    """Return TorchRec's options of every table, without copies of large tables."""
    space = enumerate_space(workload, topology, "cpu", extended=False)
    return [
        list(_offered(table, options, topology))
        for table, options in zip(workload.tables, space.options, strict=True)
    ]


def _offered(table: Table, options: Sequence[Option], topology: Topology) -> Iterator[Option]:
    setting = RuntimeSetting(
        (table.num_embeddings, table.embedding_dim),
        table.pooling,
        topology.world_size,
        topology.intra_group_size,
        "cpu",
    )
    for option in options:
        kind = option.sharding_type
        if kind is ShardingType.DATA_PARALLEL and table.weight_bytes > SMALL_BYTES:
            continue
        # one block of columns is the whole table, and an EmbeddingCollection takes it for another
        # width than that of its other tables
        if kind is not ShardingType.TABLE_WISE and option.num_shards == 1:
            continue
        placed = in_torchrec_order(_placed(option, 0, topology))
        if find_runtime_problem(placed, setting) is None:
            yield option


def _place(rng: random.Random, option: Option, topology: Topology) -> TablePlan:
    return _placed(option, whole(rng, 0, topology.world_size - 1), topology)


def _placed(option: Option, first: int, topology: Topology) -> TablePlan:
    """Place the shards of an option on consecutive ranks; those of TWCW stay on one host."""
    world, local = topology.world_size, topology.local_world_size
    split_by_rank = option.sharding_type in (ShardingType.DATA_PARALLEL, ShardingType.ROW_WISE)
    host = first // local * local

    def rank(index: int) -> int:
        if split_by_rank:
            return index
        if option.sharding_type is ShardingType.TABLE_COLUMN_WISE:
            return host + (first - host + index) % local
        return (first + index) % world

    shards = tuple(
        Shard(rank(i), offset, size)
        for i, (offset, size) in enumerate(zip(option.offsets, option.sizes, strict=True))
    )
    return TablePlan(option.sharding_type, option.compute_kernel, shards)
