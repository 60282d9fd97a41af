"""Instances of the search benchmark: reproducible, and as full as they say."""

from __future__ import annotations

import pytest

from lab.planners.additive import solve_additive
from lab.planners.instances import HOST_GIB, Instance, _whole_bytes, problem_of
from lab.planners.published import TorchRecObjective
from predictor.model.memory.ranks import plan_memory
from predictor.model.plan import ShardingType
from predictor.units import gib
from search.solve import solve
from search.stop import Stop

WHOLE = (ShardingType.TABLE_WISE,)


def test_an_instance_is_the_same_every_time() -> None:
    assert problem_of(Instance(30, 8, 1, 0.4)) == problem_of(Instance(30, 8, 1, 0.4))
    assert problem_of(Instance(30, 8, 2, 0.4)) != problem_of(Instance(30, 8, 1, 0.4))


def test_fill_is_the_share_of_device_memory() -> None:
    problem = problem_of(Instance(30, 8, 1, 0.4))
    need = sum(_whole_bytes(t, problem.workload, problem.topology) for t in problem.workload.tables)
    assert need / sum(problem.topology.hbm_cap_bytes) == pytest.approx(0.4, rel=1e-6)
    assert set(problem.topology.ddr_cap_bytes) == {gib(HOST_GIB)}


@pytest.mark.parametrize("instance", [Instance(24, 8, 3, 0.995, True, WHOLE)])
def test_a_packing_is_known_and_tight(instance: Instance) -> None:
    problem = problem_of(instance)
    need = sum(_whole_bytes(t, problem.workload, problem.topology) for t in problem.workload.tables)
    assert 0.99 < need / sum(problem.topology.hbm_cap_bytes) <= 0.9951
    assert set(problem.topology.ddr_cap_bytes) == {0}
    # a plan that fits by their count exists, and one by ours, which holds more
    result = solve_additive(problem, Stop(effort=0.05), 0)
    tables = [result.plan.tables[key] for key in problem.workload.keys]
    assert TorchRecObjective(problem.workload, problem.topology).fits(tables)
    ours = solve(problem, Stop(effort=0.05), 0).best.plan
    assert all(r.fits for r in plan_memory(problem.workload, problem.topology, ours))


def test_more_gpus_have_hosts_of_eight_and_smaller_batches() -> None:
    small, large = (problem_of(Instance(30, gpus, 1, 0.4)) for gpus in (8, 64))
    assert (large.topology.hosts, large.topology.local_world_size) == (8, 8)
    assert small.workload.batch_size * 8 == large.workload.batch_size * 64


def test_names_tell_instances_apart() -> None:
    instances = [
        Instance(30, 8, 1, 0.4),
        Instance(30, 8, 1, 0.995, True),
        Instance(30, 8, 1, 0.995, True, WHOLE),
        Instance(30, 8, 1, 0.4, train_pipeline="base"),
        Instance(30, 16, 1, 0.4),
    ]
    names = [i.name for i in instances]
    assert names[:3] == ["30x8-fill40-1", "30x8-packed99.5-1", "30x8-packed99.5-tw-1"]
    assert len(set(names)) == len(names)
    assert [i.memory for i in (*instances[:2], Instance(30, 8, 1, 0.9))] == [
        "loose",
        "packed",
        "tight",
    ]
