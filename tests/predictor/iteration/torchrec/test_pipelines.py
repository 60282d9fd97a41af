"""Semi-synchronous training and stashing: what runs beside what, what waits, and what is freed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.hardware.loader import load_hardware
from predictor.model.plan import ComputeKernel
from predictor.model.topology import Topology
from predictor.model.workload import Constraints, DenseArch, Workload
from predictor.predict import Prediction, predict
from predictor.units import GIB
from search.problem import Problem
from search.solve import solve
from search.stop import Stop
from tests.builders import in_turns
from tests.search.problems import a_table, a_workload

H100 = load_hardware("h100-sxm")
WORLD = 8
MODEL = a_workload(
    *(a_table(f"t{i}", 2_000_000, 128, 20.0) for i in range(WORLD)), batch_size=65536
)
RANKS = Topology.uniform(WORLD, WORLD, hbm_bytes=80 * GIB, ddr_bytes=100 * GIB)


def predicted(workload: Workload, kernel: str = "fused") -> Prediction:
    return predict(workload, RANKS, H100, in_turns(workload, RANKS, ComputeKernel(kernel)))


def under(pipeline: str) -> Workload:
    return replace(MODEL, train_pipeline=pipeline)


def test_semi_sync_looks_up_ahead_and_returns_gradients_last() -> None:
    names = [op.name for op in predicted(under("semi_sync")).graph.ops]
    lookup = next(i for i, name in enumerate(names) if name.endswith("lookup"))
    update = next(i for i, name in enumerate(names) if name.endswith("lookup backward"))
    dense = [i for i, name in enumerate(names) if name.startswith("dense ")]
    backward = [i for i in dense if names[i].endswith("backward")]
    assert max(set(dense) - set(backward)) < lookup < min(backward) <= max(backward) < update


def test_semi_sync_hides_the_outputs_and_holds_one_more_batch() -> None:
    sparse, semi = predicted(under("sparse_dist")), predicted(under("semi_sync"))
    assert semi.iteration_ms < 0.95 * sparse.iteration_ms
    assert "output_dist_forward" not in semi.breakdown
    outputs = 4 * MODEL.batch_size * sum(table.embedding_dim for table in MODEL.tables)
    for before, after in zip(sparse.memory, semi.memory, strict=True):
        assert before.peak is not None
        assert after.peak is not None
        assert after.peak.allocated_bytes > before.peak.allocated_bytes + outputs


def test_a_bound_of_semi_sync_is_below_its_plans() -> None:
    problem = Problem(under("semi_sync"), RANKS, H100)
    result = solve(problem, Stop(effort=0.01), 0)
    best = result.best.iteration_ms
    assert 0 < result.lower_bound_ms <= best
    assert best <= predicted(problem.workload).iteration_ms * (1 + 1e-9)


@pytest.mark.slow
def test_a_bound_holds_where_only_some_plans_have_the_launches_ahead() -> None:
    """A restore waits for no operation that another plan lacks."""
    stored = Constraints(compute_kernels=("key_value",), l2_cache_size=1)
    tables = (
        a_table("a", 1_000_000, 64, 20.0),
        a_table("b", 1_000_000, 64, 20.0, stash_weights=True),
        a_table("c", 1_000_000, 64, 20.0, constraints=stored),
    )
    dense = DenseArch(13, (64,), (64, 1), "concat", optimizer="adam")
    model = Workload("w", 8192, tables, dense, train_pipeline="semi_sync")
    result = solve(Problem(model, RANKS, H100), Stop(effort=0.05), 0)
    assert 0 < result.lower_bound_ms <= result.best.iteration_ms


def stashing(workload: Workload) -> Workload:
    tables = tuple(replace(table, stash_weights=True) for table in workload.tables)
    return replace(workload, tables=tables)


def test_stashed_weights_cross_the_link_twice() -> None:
    resident, stashed = predicted(MODEL), predicted(stashing(MODEL))
    one_way_ms = 2_000_000 * 128 * 4 / H100.memory.host_link
    assert stashed.iteration_ms > 2 * one_way_ms > resident.iteration_ms
    assert stashed.breakdown["stash"] == pytest.approx(2 * one_way_ms, rel=0.05)
    for before, after in zip(resident.memory, stashed.memory, strict=True):
        assert after.ddr_bytes - before.ddr_bytes == 2_000_000 * 128 * 4, "pinned on the host"


def test_the_lookups_backward_waits_for_its_weights() -> None:
    ops = predicted(stashing(MODEL)).graph.ops
    by_name = {op.name: i for i, op in enumerate(ops)}
    restore = next(i for name, i in by_name.items() if name.startswith("restore"))
    update = next(op for op in ops if op.name.endswith("lookup backward"))
    assert restore in {dep.op for dep in update.deps}
    assert next(i for name, i in by_name.items() if name.startswith("stash")) in {
        dep.op for dep in ops[restore].deps
    }


def test_what_is_stashed_is_not_there_while_activations_are() -> None:
    wide = replace(MODEL.dlrm, bottom_mlp=(8192, 8192, 128))
    model = replace(MODEL, dense=wide, batch_size=32768)
    tables = tuple(replace(t, num_embeddings=10_000) for t in model.tables)
    model = replace(model, tables=tables)
    resident, stashed = predicted(model), predicted(stashing(model))
    for before, after in zip(resident.memory, stashed.memory, strict=True):
        assert before.peak is not None
        assert after.peak is not None
        assert after.peak.allocated_bytes <= before.peak.allocated_bytes


@pytest.mark.parametrize("kernel", ["fused_uvm", "fused_uvm_caching"])
def test_tables_on_the_host_are_not_stashed(kernel: str) -> None:
    assert "stash" not in predicted(stashing(MODEL), kernel).breakdown


def test_states_of_the_dense_optimizer_are_stashed() -> None:
    adam = replace(MODEL, dense=replace(MODEL.dlrm, optimizer="adam"))
    resident, stashed = predicted(adam), predicted(replace(adam, stash_optimizer_state=True))
    names = [op.name for op in stashed.graph.ops]
    assert {"restore optimizer states", "stash optimizer states"} <= set(names)
    step = stashed.graph.ops[names.index("optimizer step")]
    assert names.index("restore optimizer states") in {dep.op for dep in step.deps}
    assert stashed.iteration_ms >= resident.iteration_ms
    sgd = predicted(replace(MODEL, stash_optimizer_state=True))
    assert sgd.iteration_ms == predicted(MODEL).iteration_ms, "plain SGD has no states"
