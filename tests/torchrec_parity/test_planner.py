"""TorchRec's real planner behind our door, against the baseline that is re-derived from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torchrec.distributed.planner.partitioners import MemoryBalancedPartitioner
from torchrec.distributed.planner.proposers import DynamicProgrammingProposer

from predictor.errors import InputError
from predictor.model.plan import ShardingType
from predictor.model.workload import Constraints, Workload
from predictor.units import GIB
from search.baselines.torchrec_planner import torchrec_plan as rederived
from shardopt.training.torchrec_planner import (
    parameter_constraints,
    plan_with_torchrec,
    torchrec_topology,
)
from tests.quick import quick_only
from tests.torchrec_parity import modules

# HBM in GiB that makes the planner move: all fits, or some tables have to go elsewhere
CASES = [
    (modules.dlrm_dcnv2, 8, 80),
    (modules.dlrm_dcnv2, 8, 24),
    (modules.dlrm_dcnv2, 16, 32),
    (modules.criteo_kaggle, 2, 16),
    (modules.criteo_kaggle, 8, 1),
    (modules.rm_like, 8, 4),
    (modules.rm_like, 16, 2),
    (modules.mixed, 2, 80),
    (modules.mixed, 16, 1),
    (modules.constrained, 8, 1),
    (modules.constrained, 16, 1),
    (modules.unpooled, 2, 40),
    (modules.unpooled, 8, 4),
    (modules.weighted, 8, 4),
    (modules.weighted, 16, 4),
]


@pytest.mark.parametrize(
    ("model", "world", "gib"),
    quick_only(
        [(modules.mixed, 16, 1), (modules.constrained, 8, 1), (modules.unpooled, 8, 4)], CASES
    ),
    ids=[f"{m.__name__}-{w}-{g}" for m, w, g in CASES],
)
def test_same_plan_as_the_baseline(model: Callable[[], Workload], world: int, gib: int) -> None:
    workload = modules.once_pooled(model())
    topology = modules.topology(world, hbm=gib * GIB)
    torchrecs, ours = plan_with_torchrec(workload, topology), rederived(workload, topology)
    assert ours is not None
    assert torchrecs.plan is not None
    assert torchrecs.seconds > 0
    assert torchrecs.rating_ms == pytest.approx(ours.rating_ms, rel=1e-9)
    assert (torchrecs.plan.world_size, torchrecs.plan.local_world_size) == (world, min(8, world))
    for key, plan in zip(workload.keys, ours.tables, strict=True):
        real = torchrecs.plan.tables[key]
        assert (real.sharding_type, real.compute_kernel) == (
            plan.sharding_type,
            plan.compute_kernel,
        )
        assert real.shards == plan.shards


def test_uneven_caps_reach_torchrec() -> None:
    ours = modules.topology(2)
    uneven = replace(ours, hbm_cap_bytes=(GIB, 2 * GIB), ddr_cap_bytes=(3 * GIB, 4 * GIB))
    storages = [device.storage for device in torchrec_topology(uneven).devices]
    assert [(s.hbm, s.ddr) for s in storages] == [(GIB, 3 * GIB), (2 * GIB, 4 * GIB)]
    assert [d.storage.hbm for d in torchrec_topology(uneven, "cpu").devices] == [0, 0]


def test_uneven_caps_do_not_split_rows_unevenly() -> None:
    only_rows = Constraints(sharding_types=(ShardingType.ROW_WISE,))
    workload = modules.criteo_kaggle()
    tables = tuple(replace(t, constraints=only_rows) for t in workload.tables)
    topology = modules.topology(2)
    uneven = replace(topology, hbm_cap_bytes=(32 * GIB, 64 * GIB))
    plan = plan_with_torchrec(replace(workload, tables=tables), uneven).plan
    assert plan is not None
    assert [s.size[0] for s in plan.tables["c2"].shards] == [5065614, 5065613]


def test_an_nvlink_domain_of_two_hosts_is_a_pod() -> None:
    rack = replace(modules.topology(16), nvlink_domain=16)
    assert torchrec_topology(rack).intra_group_size == 16
    assert torchrec_topology(modules.topology(16)).intra_group_size == 8


def test_it_logs_nothing_about_replicated_tables(caplog: pytest.LogCaptureFixture) -> None:
    replicated = Constraints(sharding_types=(ShardingType.DATA_PARALLEL,))
    workload = modules.criteo_kaggle()
    tables = tuple(replace(t, constraints=replicated) for t in workload.tables[:1])
    answer = plan_with_torchrec(replace(workload, tables=tables), modules.topology(2))
    assert answer.plan is not None
    assert not caplog.records


def test_no_plan_where_none_fits() -> None:
    workload = modules.rm_like()
    fused = Constraints(compute_kernels=("fused",))
    tables = tuple(replace(table, constraints=fused) for table in workload.tables)
    workload, topology = replace(workload, tables=tables), modules.topology(8, hbm=GIB)
    answer = plan_with_torchrec(workload, topology)
    assert (answer.plan, answer.rating_ms) == (None, None)
    assert answer.seconds > 0
    assert rederived(workload, topology) is None


def test_tables_of_one_name_must_agree() -> None:
    workload = modules.criteo_kaggle()
    first = workload.tables[0]
    twin = replace(first, module="other")
    parameter_constraints(replace(workload, tables=(*workload.tables, twin)))
    feature = replace(first.features[0], pooling_factor=9.0)
    with pytest.raises(InputError, match="'c0'"):
        parameter_constraints(
            replace(workload, tables=(*workload.tables, replace(twin, features=(feature,))))
        )


@pytest.mark.slow
def test_other_proposers_find_other_plans() -> None:
    """The dynamic program takes the least sum of costs; nothing balances the costliest rank."""
    workload, topology = modules.dlrm_dcnv2(), modules.topology(8)
    default, dynamic, by_memory = (
        plan_with_torchrec(workload, topology, proposer=proposer, partitioner=by).rating_ms
        for proposer, by in (
            (None, None),
            (DynamicProgrammingProposer(), None),
            (DynamicProgrammingProposer(), MemoryBalancedPartitioner()),
        )
    )
    assert dynamic != default
    assert by_memory is not None


@pytest.mark.slow
def test_it_ends_at_its_limit_with_what_it_has() -> None:
    workload = modules.dlrm_dcnv2()
    tables = (
        replace(
            table,
            name=f"{table.name}_{i}",
            features=tuple(replace(f, name=f"{f.name}_{i}") for f in table.features),
        )
        for i in range(4)
        for table in workload.tables
    )
    many = replace(workload, tables=tuple(tables))
    answer = plan_with_torchrec(many, modules.topology(8), timeout_seconds=1)
    assert answer.plan is not None
    assert answer.seconds > 1
