"""Small workloads, topologies and random plans that tests of several packages share."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.distribution import Uniform, Zipf
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import DenseArch, Feature, Table, Workload
from predictor.units import GIB
from search.space.enumerate import enumerate_space
from search.space.option import Option, Space, place

DENSE = DenseArch(13, (64, 32), (64, 1), "concat")
Candidate = tuple[TablePlan, ...]


@cache
def hardware(name: str = "h100-sxm") -> HardwareProfile:
    """A shipped profile."""
    return load_hardware(name)


@cache
def device_bound(name: str = "h100-sxm") -> HardwareProfile:
    """A shipped profile with a host so fast that kernels and links set the time."""
    found = load_hardware(name)
    quick = {
        name: 1e-3 * cost
        for name, cost in found.overheads
        if name.endswith("_us") and isinstance(cost, float)
    }
    return found.model_copy(update={"overheads": found.overheads.model_copy(update=quick)})


def a_topology(world: int = 2, local: int | None = None, domain: int = 0) -> Topology:
    """Ranks with more memory than any test needs."""
    return Topology.uniform(
        world, local, hbm_bytes=1000 * GIB, ddr_bytes=1000 * GIB, nvlink_domain=domain
    )


def a_table(name: str = "t", rows: int = 100_000, dim: int = 64, **more: object) -> Table:
    """A table with one uniform feature of two ids unless told otherwise."""
    features = more.pop("features", (Feature(f"{name}_f", 2.0),))
    return Table(name, rows, dim, features, **more)  # type: ignore[arg-type]


def a_workload(*tables: Table, batch_size: int = 1024, **more: object) -> Workload:
    """A small DLRM over the tables."""
    dense = more.pop("dense", DENSE)
    return Workload("w", batch_size, tables or (a_table(),), dense, **more)  # type: ignore


def table_wise(table: Table, rank: int = 0) -> TablePlan:
    """The whole table on one rank."""
    return cut(table, ShardingType.TABLE_WISE, [rank])


def in_turns(
    workload: Workload, topology: Topology, kernel: ComputeKernel = ComputeKernel.FUSED
) -> ShardingPlan:
    """Every table whole, each on the rank behind that of the one before."""
    whole = [table_wise(t, i % topology.world_size) for i, t in enumerate(workload.tables)]
    return plan_of(workload, topology, [replace(one, compute_kernel=kernel) for one in whole])


def data_parallel(table: Table, world: int) -> TablePlan:
    """A copy on every rank."""
    shards = tuple(
        Shard(rank, (0, 0), (table.num_embeddings, table.embedding_dim)) for rank in range(world)
    )
    return TablePlan(ShardingType.DATA_PARALLEL, ComputeKernel.DENSE, shards, table.module)


def cut(table: Table, kind: ShardingType, ranks: Sequence[int], columns: int = 1) -> TablePlan:
    """The table in as many blocks of columns, and each of these in blocks of rows: one a rank."""
    rows, width = table.num_embeddings, table.embedding_dim // columns
    blocks = len(ranks) // columns
    most = -(-rows // blocks)
    shards = []
    for block, rank in enumerate(ranks):
        column, row = divmod(block, blocks)
        first = min(row * most, rows)
        shards.append(Shard(rank, (first, column * width), (min(most, rows - first), width)))
    return TablePlan(kind, ComputeKernel.FUSED, tuple(shards), table.module)


def column_wise(table: Table, *widths: int, first: int = 0) -> TablePlan:
    """Blocks of columns of these widths, on two ranks in turns from the first."""
    starts = [sum(widths[:i]) for i in range(len(widths))]
    shards = tuple(
        Shard((first + i) % 2, (0, start), (table.num_embeddings, width))
        for i, (start, width) in enumerate(zip(starts, widths, strict=True))
    )
    return TablePlan(ShardingType.COLUMN_WISE, ComputeKernel.FUSED, shards, table.module)


def sharded(
    workload: Workload,
    topology: Topology,
    sharding_type: ShardingType,
    kernel: ComputeKernel = ComputeKernel.FUSED,
) -> Candidate:
    """Every table with the first option of a type; its parts go round the legal ranks."""
    space = enumerate_space(workload, topology)
    chosen = []
    for options in space.options:
        fits = (
            o for o in options if (o.sharding_type, o.compute_kernel) == (sharding_type, kernel)
        )
        option = next(fits)
        units = option.legal_ranks(topology).units
        chosen.append(
            place(option, [r for i, unit in enumerate(units) for r in unit[i % len(unit)]])
        )
    return tuple(chosen)


def plan_of(workload: Workload, topology: Topology, candidate: Sequence[TablePlan]) -> ShardingPlan:
    """The shardings of all tables, in the workload's order, as a plan."""
    tables = dict(zip(workload.keys, candidate, strict=True))
    return ShardingPlan(tables, topology.world_size, topology.local_world_size)


def neighbours_ms(
    batch: PlanScorer, base: Sequence[TablePlan], changes: Sequence[Mapping[int, TablePlan]]
) -> np.ndarray:
    """Iteration times of a plan with each of the changes, ``[changes]``."""
    numbers = np.array([batch.number(i, plan) for i, plan in enumerate(base)])
    return batch.score_changed(
        numbers, [{i: batch.number(i, plan) for i, plan in c.items()} for c in changes]
    )


def random_workload(seed: int, train_pipeline: str = "base") -> Workload:
    """Pooled, weighted and sequence modules; several data types and optimizers."""
    pick = random.Random(seed)
    tables = []
    for i in range(pick.randint(2, 6)):
        module = pick.choice(["ebc", "ebc", "weighted", "ec"])
        distribution = pick.choice([Uniform(), Zipf(0.8), Zipf(1.2, 3.0)])
        order = pick.choice(["random", "frequency"])
        features = tuple(
            Feature(f"f{i}_{j}", pick.choice([1.0, 2.5, 20.0]), 1.0, distribution, order)
            for j in range(pick.randint(1, 2))
        )
        tables.append(
            a_table(
                f"t{i}",
                pick.choice([3, 50, 10_000, 2_000_000]),
                pick.choice([16, 64, 256]),
                features=features,
                module=module,
                pooling="none" if module == "ec" else pick.choice(["sum", "mean"]),
                weighted=module == "weighted",
                data_type=pick.choice(["fp32", "fp16"]),
                optimizer=pick.choice(["exact_row_wise_adagrad", "adam", "sgd"]),
            )
        )
    batch_size = pick.choice([64, 2048])
    return a_workload(*tables, batch_size=batch_size, train_pipeline=train_pipeline)


def random_candidate(space: Space, topology: Topology, pick: random.Random) -> Candidate:
    """A random option and random legal ranks for every table."""
    return tuple(random_plan(pick.choice(options), topology, pick) for options in space.options)


def random_plan(option: Option, topology: Topology, pick: random.Random) -> TablePlan:
    """An option on random legal ranks."""
    legal = option.legal_ranks(topology)
    group = pick.randrange(topology.groups)
    ranks: list[int] = []
    for unit in legal.units:
        near = [a for a in unit if topology.group_of(a[0]) == group]
        ranks += pick.choice(near if legal.same_group else list(unit))
    return place(option, ranks)
