"""UVM kernels are dropped only where device memory is ample, never the last."""

from __future__ import annotations

from predictor.model.memory.ranks import UVM_KERNELS
from predictor.model.plan import ShardingType
from predictor.model.workload import Constraints
from predictor.units import GIB, MIB
from search.problem import Problem
from search.space.enumerate import reduced_space, whole_space
from tests.search.problems import a_problem, a_table, a_workload, hosts


def kernels(problem: Problem) -> set[str]:
    return {str(o.compute_kernel) for opts in reduced_space(problem).options for o in opts}


def test_ample_memory_needs_no_uvm() -> None:
    problem = a_problem(a_workload(a_table()), hosts(2, hbm=GIB))
    assert not kernels(problem) & set(UVM_KERNELS)


def test_scarce_memory_keeps_it() -> None:
    problem = a_problem(a_workload(a_table(rows=2_000_000)), hosts(2, hbm=300 * MIB))
    assert kernels(problem) >= {"fused_uvm", "fused_uvm_caching"}


def test_what_a_constraint_demands_stays() -> None:
    only = Constraints(compute_kernels=("fused_uvm_caching",))
    problem = a_problem(a_workload(a_table(constraints=only), a_table("free")), hosts(2))
    space = reduced_space(problem)
    assert {str(o.compute_kernel) for o in space.options[0]} == {"fused_uvm_caching"}
    assert not {o.compute_kernel for o in space.options[1]} & set(UVM_KERNELS)


def test_rows_of_means_stay_whole_beside_a_table_that_has_no_rows_to_split() -> None:
    """TorchRec would divide the other table's sums, too (docs/decisions/0025-space.md)."""
    table_wise = Constraints(sharding_types=(ShardingType.TABLE_WISE,))
    tables = [
        a_table("mean", 4_000, 64, pooling="mean"),
        a_table("sum", 4_000, 64, constraints=table_wise),
    ]
    means, _ = whole_space(a_problem(a_workload(*tables), hosts(2))).options
    assert means
    assert not any(option.by_row for option in means)
