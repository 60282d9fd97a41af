"""The model that the distributed tests train, its reference, and the plans they train it under."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch

from predictor.model.distribution import Zipf
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import Constraints, DcnV2, DenseArch, Feature, Table, Workload
from predictor.units import GIB
from shardopt.training.batch import synthetic_batch
from shardopt.training.loop import dense_optimizer, table_weight
from shardopt.training.model import build_model

STEPS = 4
LEARNING_RATE = 0.1
EPS = 1e-8
BATCH = 32
EFFORT = 0.05

MIXED = (
    ShardingType.ROW_WISE,
    ShardingType.TABLE_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.ROW_WISE,
    ShardingType.DATA_PARALLEL,
)
"""A sharding type for each table of the workload."""


def workload() -> Workload:
    """Four tables in three modules: sum, mean and no pooling, a shared feature, uneven rows."""
    skewed = Zipf(1.05)
    tables = (
        Table("t0", 101, 16, (Feature("f0", 3.0, distribution=skewed), Feature("f1", 1.0))),
        Table("t1", 57, 16, (Feature("f2", 2.5),), pooling="mean", optimizer="exact_sgd"),
        Table("t2", 40, 32, (Feature("f3", 1.5, distribution=skewed),)),
        Table("t3", 23, 8, (Feature("f4", 2.0),), module="sequences", pooling="none"),
        Table("t0", 33, 16, (Feature("f0", 2.0),), module="other", optimizer="exact_adagrad"),
    )
    dense = DenseArch(13, (32, 16), (32, 1), DcnV2(2, 8))
    return Workload("small", BATCH, tables, dense)


def initial_weights() -> dict[str, torch.Tensor]:
    """The unsharded model's state; large enough embeddings that every update shows."""
    torch.manual_seed(1)
    model = build_model(workload(), "cpu")
    for table in workload().tables:
        torch.nn.init.normal_(table_weight(model, table), std=0.3)
    return model.state_dict()


def reference(plan: ShardingPlan) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the unsharded model, trained on all ranks' batches as one.

    TorchRec averages both the dense gradients (DDP) and the sparse ones (it divides by the world
    size), so the mean loss over the concatenated batch has the same gradients. The optimizers of
    tables are written out here: row-wise Adagrad keeps one state per row *and column shard*, so
    column-wise sharding changes what it computes; those of the dense kernel follow the
    dense optimizer.
    """
    load = workload()
    model = build_model(load, "cpu")
    model.load_state_dict(initial_weights())
    weights = {
        key: table_weight(model, table) for key, table in zip(load.keys, load.tables, strict=True)
    }
    states = {key: torch.zeros_like(weight) for key, weight in weights.items()}
    optimizer = dense_optimizer(model, load, learning_rate=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        ranks = [synthetic_batch(load, rank=r, index=step) for r in range(plan.world_size)]
        before = {key: weight.detach().clone() for key, weight in weights.items()}
        # one batch after the other, each with its share of the mean: nothing to concatenate
        loss = sum(model(batch)[0] for batch in ranks) / plan.world_size
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for key, table in zip(load.keys, load.tables, strict=True):
            if plan.tables[key].compute_kernel is not ComputeKernel.DENSE:
                with torch.no_grad():
                    weights[key].copy_(before[key])
                    _step(table.optimizer, weights[key], states[key], plan.tables[key])
    return losses, model.state_dict()


def _step(optimizer: str, weight: torch.nn.Parameter, state: torch.Tensor, plan: TablePlan) -> None:
    gradient = weight.grad
    if optimizer == "exact_sgd":
        weight -= LEARNING_RATE * gradient
        return
    if optimizer == "exact_adagrad":
        state += gradient**2
    else:
        for begin, width in {(s.offset[1], s.size[1]) for s in plan.shards}:
            columns = slice(begin, begin + width)
            state[:, columns] += (gradient[:, columns] ** 2).mean(dim=1, keepdim=True)
    weight -= LEARNING_RATE * gradient / (state.sqrt() + EPS)


@cache
def plan_under_test(name: str, world_size: int, local_world_size: int) -> ShardingPlan:
    """One of `PLAN_NAMES`: a plan per sharding type, a mixed one, and those that a search finds,
    freely and where each table may be sharded in one way only."""
    if name == "mixed":
        return make_plan(MIXED, world_size, local_world_size)
    if name.startswith("searched "):
        kinds = SEARCHED[name.removeprefix("searched ")]
        return searched_plan(kinds, world_size, local_world_size)
    return uniform_plan(ShardingType(name), world_size, local_world_size)


def searched_plan(
    kinds: tuple[tuple[ShardingType, ...], ...], world_size: int, local_world_size: int
) -> ShardingPlan:
    """The best plan that a short search finds for this workload.

    For GPUs, although it is trained on CPUs, where TorchRec's planner offers no row split of a
    pooled table: what is under test is whether it runs the plan.

    Args:
        kinds: the sharding types allowed for each table.
    """
    from predictor.hardware.loader import load_hardware
    from search.problem import Problem
    from search.solve import solve
    from search.stop import Stop

    load = workload()
    # with TorchRec's default minimum partition tables as narrow as these have one column shard
    tables = (
        replace(table, constraints=Constraints(sharding_types=allowed, min_partition=4))
        for table, allowed in zip(load.tables, kinds, strict=True)
    )
    topology = Topology.uniform(world_size, local_world_size, hbm_bytes=GIB, ddr_bytes=GIB)
    problem = Problem(replace(load, tables=tuple(tables)), topology, load_hardware("h100-sxm"))
    return solve(problem, Stop(effort=EFFORT), seed=0, top_k=1).best.plan


def uniform_plan(kind: ShardingType, world_size: int, local_world_size: int) -> ShardingPlan:
    """Every table sharded one way, as far as TorchRec can (`predictor.model.plan_check`)."""
    return make_plan(uniform_kinds(kind), world_size, local_world_size)


def uniform_kinds(kind: ShardingType) -> tuple[ShardingType, ...]:
    """`kind` for every table, or the nearest that TorchRec can run."""
    unpooled = {
        ShardingType.DATA_PARALLEL: ShardingType.TABLE_WISE,  # not on CPU
        ShardingType.TABLE_ROW_WISE: ShardingType.ROW_WISE,
        ShardingType.TABLE_COLUMN_WISE: ShardingType.COLUMN_WISE,
        ShardingType.GRID_SHARD: ShardingType.TABLE_WISE,
    }
    mean = {ShardingType.GRID_SHARD: ShardingType.COLUMN_WISE}
    instead = {"none": unpooled, "mean": mean, "sum": {}}
    return tuple(instead[table.pooling].get(kind, kind) for table in workload().tables)


def make_plan(kinds: tuple[ShardingType, ...], world_size: int, local: int) -> ShardingPlan:
    """The i-th table sharded as the i-th kind says, starting on rank or host i (wrapped)."""
    load = workload()
    tables = {
        key: TablePlan(
            kind,
            ComputeKernel.DENSE if kind is ShardingType.DATA_PARALLEL else ComputeKernel.FUSED,
            tuple(_shards(kind, table, i, world_size, local)),
            table.module,
        )
        for i, (key, table, kind) in enumerate(zip(load.keys, load.tables, kinds, strict=True))
    }
    return ShardingPlan(tables, world_size, local)


def _shards(
    kind: ShardingType, table: Table, start: int, world_size: int, local: int
) -> Iterator[Shard]:
    rows, columns = table.num_embeddings, table.embedding_dim
    host = start % (world_size // local)
    if kind is ShardingType.DATA_PARALLEL:
        yield from (Shard(rank, (0, 0), (rows, columns)) for rank in range(world_size))
    elif kind is ShardingType.TABLE_WISE:
        yield Shard(start % world_size, (0, 0), (rows, columns))
    elif kind in (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE):
        half = columns // 2
        for i in range(2):
            wide = kind is ShardingType.COLUMN_WISE
            rank = (start + i) % world_size if wide else host * local + i % local
            yield Shard(rank, (0, i * half), (rows, half))
    elif kind is ShardingType.GRID_SHARD:
        hosts = world_size // local
        width = columns // hosts
        for h in range(hosts):
            for first, size, i in _blocks(rows, local):
                yield Shard(h * local + i, (first, h * width), (size, width))
    else:
        ranks = world_size if kind is ShardingType.ROW_WISE else local
        offset = 0 if kind is ShardingType.ROW_WISE else host * local
        for first, size, i in _blocks(rows, ranks):
            yield Shard(offset + i, (first, 0), (size, columns))


def _blocks(rows: int, ranks: int) -> Iterator[tuple[int, int, int]]:
    """Offset, size and index of row blocks of ceil(rows / ranks)."""
    block = -(-rows // ranks)
    for i in range(ranks):
        first = min(i * block, rows)
        yield first, min(block, rows - first), i


def only(kinds: tuple[ShardingType, ...]) -> tuple[tuple[ShardingType, ...], ...]:
    """One sharding type allowed for each table."""
    return tuple((kind,) for kind in kinds)


def anything() -> tuple[tuple[ShardingType, ...], ...]:
    """All that TorchRec can run on CPUs."""
    unpooled = (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.ROW_WISE)
    return tuple(
        tuple(ShardingType) if table.pooling != "none" else unpooled for table in workload().tables
    )


SEARCHED = {
    "free": anything(),
    "table_wise": only(uniform_kinds(ShardingType.TABLE_WISE)),
    "column_wise": only(uniform_kinds(ShardingType.COLUMN_WISE)),
    "row_wise": only(uniform_kinds(ShardingType.ROW_WISE)),
    "data_parallel": only(uniform_kinds(ShardingType.DATA_PARALLEL)),
    "mixed": only(MIXED),
}
"""Name of a search -> the sharding types that it may give each table."""

PLAN_NAMES = (*(kind.value for kind in ShardingType), "mixed", *(f"searched {n}" for n in SEARCHED))
"""Names of everything that is trained."""
