"""TorchRec's real planner behind our door, against the baseline that is re-derived from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("torchrec")


from lab.planners.published import TorchRecObjective
from predictor.errors import InputError
from predictor.model.plan import ShardingType
from predictor.model.workload import Constraints, Workload
from predictor.units import GIB
from search.baselines.torchrec_planner import torchrec_plan as rederived
from shardopt.training.torchrec_planner import (
    Variant,
    parameter_constraints,
    plan_with_torchrec,
    torchrec_topology,
)
from tests.quick import quick_only
from tests.torchrec_parity import modules


def one_dim(workload: Workload) -> Workload:
    """With a dense part that any embedding dims fit, so that the whole model can be built."""
    return replace(workload, dense=replace(workload.dense, interaction="concat"))


@pytest.mark.parametrize(
    ("model", "world", "gib"),
    [
        (modules.criteo_kaggle, 2, 16),
        (modules.mixed, 16, 1),
        (modules.constrained, 8, 1),
        (modules.unpooled, 8, 4),
    ],
)
def test_same_plan_as_the_baseline(model: Callable[[], Workload], world: int, gib: int) -> None:
    workload, topology = one_dim(model()), modules.topology(world, hbm=gib * GIB)
    theirs = plan_with_torchrec(workload, topology)
    ours = rederived(workload, topology)
    assert ours is not None
    assert theirs.plan is not None
    assert theirs.seconds > 0
    assert theirs.rating_ms == pytest.approx(ours.rating_ms, rel=1e-9)
    assert (theirs.plan.world_size, theirs.plan.local_world_size) == (world, min(8, world))
    for key, plan in zip(workload.keys, ours.tables, strict=True):
        real = theirs.plan.tables[key]
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
    topology = modules.topology(2, hbm=1 << 20, ddr=1 << 20)
    answer = plan_with_torchrec(modules.criteo_kaggle(), topology)
    assert (answer.plan, answer.rating_ms) == (None, None)
    assert answer.seconds > 0


def test_tables_of_one_name_must_agree() -> None:
    workload = modules.criteo_kaggle()
    first = workload.tables[0]
    twin = replace(first, module="other")
    parameter_constraints(replace(workload, tables=(*workload.tables, twin)))
    feature = replace(first.features[0], pooling_factor=9.0)
    with pytest.raises(InputError, match="two modules have a table 'c0'"):
        parameter_constraints(
            replace(workload, tables=(*workload.tables, replace(twin, features=(feature,))))
        )


@pytest.mark.parametrize("variant", Variant)
@pytest.mark.parametrize(
    "model", quick_only([modules.mixed], [modules.criteo_kaggle, modules.mixed, modules.unpooled])
)
def test_plans_are_rated_as_torchrec_rates_them(
    model: Callable[[], Workload], variant: Variant
) -> None:
    workload, topology = one_dim(model()), modules.topology(8, hbm=GIB)
    answer = plan_with_torchrec(workload, topology, variant=variant)
    assert answer.plan is not None
    torchrec = TorchRecObjective(workload, topology)
    tables = [answer.plan.tables[key] for key in workload.keys]
    assert torchrec.rating_ms(tables) == pytest.approx(answer.rating_ms, rel=1e-9)
    assert torchrec.fits(tables)
    assert not answer.timed_out


@pytest.mark.slow
def test_the_variants_propose_other_plans() -> None:
    """The dynamic program takes the least sum of costs; nothing balances the costliest rank."""
    workload, topology = one_dim(modules.dlrm_dcnv2()), modules.topology(8)
    ratings = {v: plan_with_torchrec(workload, topology, variant=v).rating_ms for v in Variant}
    assert ratings[Variant.DYNAMIC] != ratings[Variant.DEFAULT]
    assert ratings[Variant.BALANCED] is not None


@pytest.mark.slow
def test_it_ends_at_its_limit_with_what_it_has() -> None:
    workload = one_dim(modules.dlrm_dcnv2())
    many = replace(
        workload,
        tables=tuple(
            replace(
                t,
                name=f"{t.name}_{i}",
                features=tuple(replace(f, name=f"{f.name}_{i}") for f in t.features),
            )
            for i in range(4)
            for t in workload.tables
        ),
    )
    answer = plan_with_torchrec(many, modules.topology(8), timeout_s=1)
    assert answer.timed_out
    assert answer.plan is not None
    assert answer.seconds > 1
