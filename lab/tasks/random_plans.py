"""Plans drawn at random: how well prediction and clock agree where nobody has chosen.

A search returns the plan that is predicted fastest, and so those whose time is predicted too short.
Of plans drawn without a prediction the error is free of that.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from lab.tasks.models.chance import pick, whole
from lab.tasks.plans import signature
from lab.tasks.structures import SMALL_BYTES, Candidate, plan_of, structures
from predictor.model.plan import Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.plan_check import RuntimeSetting, find_runtime_problem, in_torchrec_order
from predictor.model.topology import Topology
from predictor.model.workload import Table, Workload
from search.space.enumerate import enumerate_space
from search.space.option import Option

PREFIX = "random_"
"""Of the names of random plans; a number from 1 follows."""
DRAWS = 20
"""Of every plan asked for; where so many give none that is new, there are fewer plans."""


def random_plans(
    seed: int,
    workload: Workload,
    topology: Topology,
    count: int,
    without: Sequence[ShardingPlan] = (),
) -> dict[str, ShardingPlan]:
    """``random_1`` ... and their plans: the same for a seed on any machine, under any profile.

    Each is one of the `structures`, in which a random share of the tables is sharded anew: by an
    option that TorchRec's planner has for it on CPUs, on ranks drawn at random. Tables larger than
    `SMALL_BYTES` are not replicated, as their gradients would be all that an iteration takes.

    Args:
        count: how many; those of a larger count begin with those of a smaller one.
        without: plans that none may equal up to a renaming of ranks.
    """
    rng = random.Random(f"shardopt random plans {seed}")
    bases = list(structures(workload, topology, random.Random(f"shardopt plans {seed}")).values())
    offers = _offers(workload, topology)
    seen = {signature([plan.tables[key] for key in workload.keys]) for plan in without}
    found: dict[str, ShardingPlan] = {}
    for _ in range(DRAWS * count):
        if len(found) == count:
            break
        plan = _draw(rng, pick(rng, bases), offers, topology)
        if signature(plan) not in seen:
            seen.add(signature(plan))
            found[f"{PREFIX}{len(found) + 1}"] = plan_of(workload, topology, plan)
    return found


def _draw(
    rng: random.Random,
    base: Candidate,
    offers: Sequence[Sequence[Option]],
    topology: Topology,
) -> Candidate:
    share = rng.random()
    return tuple(
        _place(rng, pick(rng, options), topology) if rng.random() < share else had
        for had, options in zip(base, offers, strict=True)
    )


def _offers(workload: Workload, topology: Topology) -> list[list[Option]]:
    """What TorchRec's planner has for every table, less copies of large tables."""
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
    """The shards of an option on consecutive ranks; those of TWCW stay on the first one's host."""
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
