"""The graph of an iteration: order of issue, streams and dependencies of the train pipelines."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from predictor.cost.dense import Bucket
from predictor.iteration.graph import Graph
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.plan import ComputeKernel, ShardingType, TablePlan
from predictor.model.workload import DcnV2, DenseArch, Workload
from tests.builders import (
    Candidate,
    a_table,
    a_topology,
    a_workload,
    data_parallel,
    device_bound,
    sharded,
    table_wise,
)

T, K = ShardingType, ComputeKernel
TOPOLOGY = a_topology(2)
TABLES = (a_table("a"), a_table("b"), a_table("c", module="other"), a_table("d"))


def mixed(workload: Workload) -> Candidate:
    """Table-wise, row-wise, a second module, data-parallel."""
    tw, rw = sharded(workload, TOPOLOGY, T.TABLE_WISE), sharded(workload, TOPOLOGY, T.ROW_WISE)
    dp = sharded(workload, TOPOLOGY, T.DATA_PARALLEL, K.DENSE)
    return tw[0], rw[1], tw[2], dp[3]


def graph(pipeline: str, world: int = 2, profile: str = "h100-sxm") -> Graph:
    """Build the graph on a host that parts no segment."""
    workload = a_workload(*TABLES, train_pipeline=pipeline)
    topology = a_topology(world)
    batch = PlanScorer(workload, topology, device_bound(profile))
    candidate = mixed(workload) if world == 2 else sharded(workload, topology, T.TABLE_WISE)
    for index, plan in enumerate(candidate):
        batch.number(index, plan)
    return batch.graph(batch.totals(candidate)[None])


def plain(name: str) -> str:
    """Without the op that takes most of a segment."""
    return re.sub(r" \(.*\)", "", name)


def names(iteration: Graph) -> list[str]:
    return [plain(op.name) for op in iteration.ops]


def index(iteration: Graph, name: str) -> int:
    return names(iteration).index(name)


def deps(iteration: Graph, name: str) -> set[tuple[str, int]]:
    return {
        (plain(iteration.ops[d.op].name), d.lag) for d in iteration.ops[index(iteration, name)].deps
    }


def in_order(iteration: Graph, *ops: str) -> bool:
    where = [index(iteration, name) for name in ops]
    return where == sorted(where)


def test_base_exchanges_ids_module_by_module() -> None:
    iteration = graph("base")
    assert in_order(
        iteration,
        "dense 1",
        "ebc.TW permute ids",
        "ebc.TW splits all-to-all",
        "ebc.RW permute ids",
        "ebc.RW splits all-to-all",
        "ebc.TW read splits",
        "ebc.TW ids all-to-all",
        "ebc.RW read splits",
        "ebc.RW ids all-to-all",
        "ebc.TW permute received ids",
        "ebc.RW permute received ids",
        "ebc.TW lookup",
        "ebc.TW.all_to_all",
        "ebc.RW lookup",
        "ebc.RW.reduce",
        "ebc.DP lookup",
        "other.TW permute ids",
        "other.TW lookup",
        "unpack embeddings",
        "dense 2",
        "dense 3 backward",
    )
    assert deps(iteration, "ebc.RW ids all-to-all") == {("ebc.RW read splits", 0)}
    assert deps(iteration, "ebc.RW read splits") == {("ebc.RW splits all-to-all", 0)}
    assert deps(iteration, "ebc.RW lookup") == {("ebc.RW permute received ids", 0)}
    assert deps(iteration, "ebc.RW.reduce") == {("ebc.RW lookup", 0)}
    assert deps(iteration, "unpack embeddings") == {
        ("ebc.TW.all_to_all", 0),
        ("ebc.RW.reduce", 0),
        ("ebc.DP lookup", 0),
        ("other.TW.all_to_all", 0),
    }


def test_base_copies_the_next_batch_after_the_backward() -> None:
    iteration = graph("base")
    assert in_order(iteration, "dense 5 backward", "input copy", "optimizer step")
    assert deps(iteration, "dense 1") == {("input copy", 1)}


def test_sparse_dist_sends_the_next_ids_around_the_forward() -> None:
    iteration = graph("sparse_dist")
    assert in_order(
        iteration,
        "input copy",
        "ebc.TW permute ids",
        "other.TW permute ids",
        "fused splits all-to-all",
        "dense 1",
        "dense 2",
        "fused read splits",
        "ebc.TW ids all-to-all",
        "other.TW ids all-to-all",
        "dense 3 backward",
    )
    assert names(iteration).count("fused splits all-to-all") == 1
    assert deps(iteration, "dense 1") == {("input copy", 2)}
    assert deps(iteration, "ebc.TW permute ids") == {("input copy", 1)}
    assert deps(iteration, "fused read splits") == {("fused splits all-to-all", 0)}
    assert deps(iteration, "ebc.TW permute received ids") == {("ebc.TW ids all-to-all", 1)}
    assert iteration.ops[index(iteration, "ebc.TW permute received ids")].stream == "data_dist"


def test_prefetch_runs_one_batch_ahead_of_its_lookup() -> None:
    workload = a_workload(*TABLES, train_pipeline="prefetch_sparse_dist")
    cached = sharded(workload, TOPOLOGY, T.TABLE_WISE, K.FUSED_UVM_CACHING)
    candidate = (cached[0], *mixed(workload)[1:])
    batch = PlanScorer(workload, TOPOLOGY, device_bound())
    iteration = (
        batch.graph(batch.totals(candidate)[None]) if batch.score([candidate]).all() else None
    )
    assert iteration is not None
    assert in_order(
        iteration,
        "fused read splits",
        "ebc.TW ids all-to-all",
        "ebc.TW lookup",
        "dense 2",
        "ebc.TW permute received ids",
        "ebc.TW prefetch",
        "dense 3 backward",
        "optimizer step",
        "fused splits all-to-all",
    )
    assert deps(iteration, "fused read splits") == {("fused splits all-to-all", 1)}
    assert deps(iteration, "ebc.TW permute received ids") == {("ebc.TW ids all-to-all", 0)}
    assert ("ebc.TW permute received ids", 0) in deps(iteration, "ebc.TW prefetch")
    assert {("ebc.TW prefetch", 1), ("other.TW permute received ids", 1)} <= deps(
        iteration, "dense 1"
    )
    assert names(iteration).count("ebc.TW prefetch") == 1
    assert "ebc.RW prefetch" not in names(iteration)


def test_the_backward_mirrors_the_forward_and_gradients_leave_as_they_come() -> None:
    iteration = graph("base")
    assert in_order(
        iteration,
        "dense 3 backward",
        "pack gradients",
        "other.TW.all_to_all backward",
        "dense 4 backward",
        "ebc.RW.gather backward",
        "ebc.TW.all_to_all backward",
        "other.TW lookup backward",
        "ebc.DP lookup backward",
        "all-reduce ebc.DP gradients",
        "ebc.RW lookup backward",
        "ebc.TW lookup backward",
        "dense 5 backward",
        "all-reduce dense gradients",
        "optimizer step",
    )
    assert deps(iteration, "ebc.RW lookup backward") == {("ebc.RW.gather backward", 0)}
    assert deps(iteration, "all-reduce ebc.DP gradients") == {("ebc.DP lookup backward", 0)}
    assert deps(iteration, "optimizer step") == {
        ("all-reduce ebc.DP gradients", 0),
        ("all-reduce dense gradients", 0),
    }


def test_dense_gradients_leave_in_buckets() -> None:
    """25 MiB each, the first too, whole parameters, in the order of the backward."""
    dense = DenseArch(64, (1024, 1024), (4096, 2048, 1024, 1), DcnV2(2, 512))
    workload = a_workload(a_table(dim=1024), dense=dense)
    batch = PlanScorer(workload, TOPOLOGY, device_bound())
    candidate = sharded(workload, TOPOLOGY, T.TABLE_WISE)
    iteration = batch.graph(batch.totals(candidate)[None])
    sent = [i for i, n in enumerate(names(iteration)) if n == "all-reduce dense gradients"]
    before = [plain(iteration.ops[i - 1].name) for i in sent]
    # the last two layers (2 M parameters) do not fill a bucket, the one before (8 M) does; the
    # first of the top MLP does, too; crosses and bottom MLP fill none
    assert before == ["dense 3 backward", "dense 4 backward", "dense 6 backward"]
    buckets = [step.bytes for step in batch.costs.dense.backward if isinstance(step, Bucket)]
    assert buckets[0] == 4 * (2048 * 4096 + 2048 + 2048 * 1024 + 1024 + 1024 + 1)
    assert sum(buckets) == 4 * (
        2 * (2 * 2048 * 512 + 2048)
        + (64 * 1024 + 1024)
        + (1024 * 1024 + 1024)
        + (2048 * 4096 + 4096 + 4096 * 2048 + 2048 + 2048 * 1024 + 1024 + 1024 + 1)
    )


def test_a_rank_alone_sends_nothing() -> None:
    for pipeline in ("base", "sparse_dist", "prefetch_sparse_dist"):
        iteration = graph(pipeline, world=1)
        # the host reads the lengths of a batch
        assert {op.stream for op in iteration.ops} <= {"compute", "copy", "host"}
        assert all(op.scope is None for op in iteration.ops)


def test_the_dense_optimizer_steps_a_dense_shard_on_the_rank_that_has_it() -> None:
    """`BatchedDenseEmbeddingBag` has no optimizer of its own: its gradient is dense, as a
    replica's."""
    workload = a_workload(a_table("t", 1_000_000))
    hardware = device_bound("h100-sxm")

    def step_ms(plan: TablePlan) -> list[float]:
        batch = PlanScorer(workload, TOPOLOGY, hardware)
        iteration = batch.graph(batch.totals([plan])[None])
        cost_ms = iteration.ops[index(iteration, "optimizer step")].cost_ms
        return [float(ms) for ms in np.broadcast_to(cost_ms, (1, 2))[0]]

    shard = replace(table_wise(workload.tables[0], 1), compute_kernel=K.DENSE)
    alone, own = step_ms(shard)
    copies = step_ms(data_parallel(workload.tables[0], 2))
    assert copies == [own, own]
    # of its bytes the L2 may still hold a part
    assert own - alone > 0.95 * 3 * 4 * 64_000_000 / hardware.streaming
    fused, _ = step_ms(table_wise(workload.tables[0], 1))
    assert fused == alone
