"""Tables that no device has room for: where they go, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.model.memory.ranks import plan_memory
from predictor.model.plan import ComputeKernel, ShardingPlan, ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Constraints, Table, Workload
from predictor.units import GIB, format_bytes
from search.problem import Result
from search.solve import solve
from search.space.enumerate import whole_space
from search.space.host_memory import memory_notes, split_caches
from search.stop import Stop
from tests.builders import table_wise
from tests.search.problems import a_problem, a_table, a_workload, hosts

HBM = 2 * GIB
CACHED, UNCACHED = ComputeKernel.FUSED_UVM_CACHING, ComputeKernel.FUSED_UVM


def huge(**constraints: object) -> Table:
    wants = Constraints(**constraints)  # type: ignore[arg-type]
    return a_table("huge", 200_000_000, 64, 40.0, alpha=1.1, constraints=wants)


def problem_of(table: Table, pipeline: str) -> tuple[Workload, Topology]:
    small = a_table("small", 200, 64)
    workload = a_workload(table, small, batch_size=1024, train_pipeline=pipeline)
    return workload, hosts(4, hbm=HBM, ddr=100 * GIB)


def searched(table: Table, pipeline: str = "prefetch_sparse_dist") -> Result:
    problem = a_problem(*problem_of(table, pipeline))
    return solve(replace(problem, scenarios=()), Stop(effort=0.02), 0)


@pytest.mark.parametrize("pipeline", ["base", "prefetch_sparse_dist"])
def test_a_table_too_large_for_devices_gets_the_cache_that_is_left_over(pipeline: str) -> None:
    result = searched(huge(), pipeline)
    best = result.best.plan.tables["huge"]
    assert best.compute_kernel is CACHED
    memory = plan_memory(*problem_of(huge(), pipeline), result.best.plan)
    assert 0.75 * HBM < max(rank.hbm_bytes for rank in memory) <= HBM
    assert any("'huge'" in note for note in result.bound_notes)


def test_a_cache_smaller_than_the_usual_ones_is_an_option_where_these_do_not_fit() -> None:
    workload = a_workload(a_table("t", 1_000_000_000, 64))
    space = whole_space(a_problem(workload, hosts(2, hbm=8 * GIB, ddr=2000 * GIB)))
    factors = {o.cache_load_factor for o in space.options[0] if o.compute_kernel is CACHED}
    assert factors
    assert max(f for f in factors if f is not None) < 0.05


def test_constraints_that_keep_a_table_from_devices_are_named() -> None:
    wants = {"ranks": (0,), "sharding_types": (ShardingType.TABLE_WISE,)}
    pinned = a_table("huge", 10_000_000, 64, constraints=Constraints(**wants))  # type: ignore[arg-type]
    notes = [note for note in searched(pinned).bound_notes if "'huge'" in note]
    assert len(notes) == 1
    assert "ranks: [0]" in notes[0]
    free = a_table("huge", 10_000_000, 64)
    assert not any("'huge'" in note for note in searched(free).bound_notes)


def test_host_memory_that_is_asked_for_is_no_news() -> None:
    result = searched(huge(compute_kernels=(UNCACHED,)))
    assert result.best.plan.tables["huge"].compute_kernel is UNCACHED
    assert not any("'huge'" in note for note in result.bound_notes)


@pytest.mark.parametrize("pipeline", ["base", "prefetch_sparse_dist"])
def test_caches_that_hold_nothing_are_named_with_what_a_cache_for_every_width_saves(
    pipeline: str,
) -> None:
    tables = a_table("narrow", 10_000_000, 16), a_table("wide", 100_000, 256)
    workload = a_workload(*tables, train_pipeline=pipeline)
    problem = a_problem(workload, hosts(1))
    plan = ShardingPlan(
        {t.name: replace(table_wise(t), compute_kernel=CACHED) for t in tables}, 1, 1
    )
    notes = memory_notes(problem, plan)
    if pipeline == "prefetch_sparse_dist":
        assert notes == ()
        return
    apart = split_caches(plan)
    before, after = (plan_memory(workload, problem.topology, p)[0].hbm_bytes for p in (plan, apart))
    assert before - after == pytest.approx(0.2 * 10_000_000 * 240 * 4, rel=1e-3)
    assert any(format_bytes(before - after) in note for note in notes)
    assert memory_notes(problem, apart) == ()
