"""The model that the distributed tests train, its reference, and the plans they train it under."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

from predictor.model.distribution import Zipf
from predictor.model.plan import ComputeKernel, ShardingPlan, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import Constraints, DcnV2, DenseArch, Feature, Table, Workload
from predictor.units import GIB
from shardopt.torchrec.convert import to_torchrec
from shardopt.training.batch import Batch, synthetic_batch
from shardopt.training.loop import apply_sparse_optimizers, dense_optimizer, table_weight
from shardopt.training.model import build_model
from tests.builders import cut, data_parallel

T = ShardingType
STEPS = 4
LEARNING_RATE = 0.1
EPS = 1e-8
EFFORT = 0.05
CPU = torch.device("cpu")
SHARDERS: Any = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]

MIXED = (T.ROW_WISE, T.TABLE_WISE, T.COLUMN_WISE, T.ROW_WISE, T.DATA_PARALLEL)
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
    return Workload("small", 32, tables, dense)


def initial_weights() -> dict[str, torch.Tensor]:
    """The unsharded model's state; large enough embeddings that every update shows."""
    torch.manual_seed(1)
    model = build_model(workload(), "cpu")
    for table in workload().tables:
        torch.nn.init.normal_(table_weight(model, table), std=0.3)
    return model.state_dict()


def sharded_model(load: Workload, plan: ShardingPlan) -> DistributedModelParallel:
    """The model under a plan, with the same weights on every call."""
    torch.manual_seed(1)
    model = build_model(load, "meta")
    unfused = [k for k, t in plan.tables.items() if t.compute_kernel is ComputeKernel.DENSE]
    apply_sparse_optimizers(model, load, learning_rate=LEARNING_RATE, unfused=unfused, eps=EPS)
    of_torchrec = to_torchrec(plan, model, device="cpu")
    return DistributedModelParallel(model, device=CPU, plan=of_torchrec, sharders=SHARDERS)


def train(model: DistributedModelParallel, load: Workload, batches: list[Batch]) -> list[float]:
    """The losses of a rank over its batches."""
    optimizer = dense_optimizer(model, load, learning_rate=LEARNING_RATE)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def own_batches(load: Workload, count: int, first: int = 0) -> list[Batch]:
    """Return the batches of this rank, starting with number ``first``."""
    rank = dist.get_rank()
    return [synthetic_batch(load, rank=rank, index=first + i) for i in range(count)]


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
def plan_under_test(name: str) -> ShardingPlan:
    """One of `PLAN_NAMES`, for two ranks: a plan per sharding type, a mixed one, and those that a
    search finds, freely and where each table may be sharded in one way only."""
    if name.startswith("searched "):
        return searched_plan(SEARCHED[name.removeprefix("searched ")])
    return make_plan(MIXED) if name == "mixed" else uniform_plan(T(name))


def searched_plan(kinds: tuple[tuple[ShardingType, ...], ...]) -> ShardingPlan:
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
    topology = Topology.uniform(2, hbm_bytes=GIB, ddr_bytes=GIB)
    problem = Problem(replace(load, tables=tuple(tables)), topology, load_hardware("h100-sxm"))
    return solve(problem, Stop(effort=EFFORT), seed=0, top_k=1).best.plan


def uniform_plan(kind: ShardingType, world_size: int = 2, local: int = 2) -> ShardingPlan:
    """Every table sharded one way, as far as TorchRec can (`predictor.model.plan_check`)."""
    return make_plan(uniform_kinds(kind), world_size, local)


def uniform_kinds(kind: ShardingType) -> tuple[ShardingType, ...]:
    """`kind` for every table, or the nearest that TorchRec can run."""
    unpooled = {
        T.DATA_PARALLEL: T.TABLE_WISE,  # not on CPU
        T.TABLE_ROW_WISE: T.ROW_WISE,
        T.TABLE_COLUMN_WISE: T.COLUMN_WISE,
        T.GRID_SHARD: T.TABLE_WISE,
    }
    instead = {"none": unpooled, "mean": {T.GRID_SHARD: T.COLUMN_WISE}, "sum": {}}
    return tuple(instead[table.pooling].get(kind, kind) for table in workload().tables)


def make_plan(kinds: tuple[ShardingType, ...], world_size: int = 2, local: int = 2) -> ShardingPlan:
    """The i-th table sharded as the i-th kind says, starting on rank or host i (wrapped)."""
    load = workload()
    tables = {
        key: table_plan(table, kind, i, world_size, local)
        for i, (key, table, kind) in enumerate(zip(load.keys, load.tables, kinds, strict=True))
    }
    return ShardingPlan(tables, world_size, local)


def table_plan(
    table: Table, kind: ShardingType, start: int = 0, world: int = 2, local: int = 2
) -> TablePlan:
    """A table sharded one way from a rank or host on."""
    if kind is T.DATA_PARALLEL:
        return data_parallel(table, world)
    host = start * local % world
    ranks, columns = {
        T.TABLE_WISE: ([start % world], 1),
        T.COLUMN_WISE: ([start % world, (start + 1) % world], 2),
        T.TABLE_COLUMN_WISE: ([host, host + 1], 2),
        T.ROW_WISE: (range(world), 1),
        T.TABLE_ROW_WISE: (range(host, host + local), 1),
        T.GRID_SHARD: (range(world), world // local),
    }[kind]
    return cut(table, kind, ranks, columns)


def only(kinds: tuple[ShardingType, ...]) -> tuple[tuple[ShardingType, ...], ...]:
    """One sharding type allowed for each table."""
    return tuple((kind,) for kind in kinds)


def anything() -> tuple[tuple[ShardingType, ...], ...]:
    """All that TorchRec can run on CPUs."""
    unpooled = (T.TABLE_WISE, T.COLUMN_WISE, T.ROW_WISE)
    return tuple(unpooled if table.pooling == "none" else tuple(T) for table in workload().tables)


SEARCHED = {
    "free": anything(),
    **{
        str(kind): only(uniform_kinds(kind))
        for kind in (T.TABLE_WISE, T.COLUMN_WISE, T.ROW_WISE, T.DATA_PARALLEL)
    },
    "mixed": only(MIXED),
}
"""Name of a search -> the sharding types that it may give each table."""

PLAN_NAMES = (*map(str, ShardingType), "mixed", *(f"searched {name}" for name in SEARCHED))
"""Names of everything that is trained."""
