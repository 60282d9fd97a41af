"""Knobs: their values by default, what is refused, and what turning them does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from predictor.errors import InfeasibleError, InputError
from predictor.hardware.loader import load_hardware
from predictor.model.topology import FULLY_SHARDED, NetworkLevel, ReplicaGroups, Topology
from predictor.model.workload import Constraints, DenseArch, QComm
from predictor.predict import predict
from predictor.units import GIB
from search.solve import solve
from search.stop import Stop
from search.tune.knobs import PARAMETERS, RARELY, Case, changes, grid_of, steps
from search.tune.knobs import turned as apply_setting
from tests.search.problems import CPU, H100, a_table, a_workload, hosts


def a_case(world: int = 4, local: int | None = 2, **more: Any) -> Case:
    tables = more.pop("tables", (a_table("t0"), a_table("t1", dim=128)))
    return Case(a_workload(*tables, **more), hosts(world, local), H100)


def turned(case: Case, **setting: Any) -> Case:
    values: dict[str, Any] = {
        PARAMETERS[name].user_name or name: (value,) for name, value in setting.items()
    }
    grid_of(case, values)  # which checks them
    return apply_setting(case, setting)


def test_every_knob_has_values_by_default_and_the_case_is_among_them() -> None:
    sequence = a_table("t2", pooling="none", module="ec")
    case = a_case(tables=(a_table("t0"), a_table("t1", dim=128), sequence))
    offered = [knob for knob in PARAMETERS.values() if not knob.refusal(case)]
    assert PARAMETERS.keys() - {knob.name for knob in offered} == {
        *("balance_batches", "id_order", "pairs")
    }
    grid = grid_of(case, dict.fromkeys(knob.user_name or knob.name for knob in offered))
    assert set(grid.values) == {knob.name for knob in offered}
    first = grid.nearest(case)
    assert changes(case, first) == {}
    assert apply_setting(case, first) == case
    assert grid.size > 10_000


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"batch_size": 64}, lambda w: w.batch_size == 64),
        ({"pipeline": "sparse_dist"}, lambda w: w.train_pipeline == "sparse_dist"),
        ({"qcomm_backward": "bf16"}, lambda w: w.qcomm == QComm("fp32", "bf16")),
        ({"bucket": 5.0}, lambda w: w.dense.bucket_cap_mb == 5.0),
        ({"cw_min": 64}, lambda w: [t.constraints.min_partition for t in w.tables] == [64, 64]),
        ({"cache_ratio": 0.1}, lambda w: w.tables[0].constraints.cache_load_factor == 0.1),
        ({"groups": 2}, lambda w: w.replica_groups == ReplicaGroups(2)),
        ({"groups": 2, "sync_interval": 9}, lambda w: w.replica_groups == ReplicaGroups(2, 9)),
    ],
)
def test_a_knob_changes_the_model(setting: dict[str, Any], expected: Any) -> None:
    case = a_case()
    after = turned(case, **setting)
    assert expected(after.workload)
    assert after.installed == case.installed
    assert apply_setting(case, {}) == case


def test_constraints_of_a_table_stay() -> None:
    own = a_table("t0", constraints=Constraints(min_partition=16))
    after = turned(a_case(tables=(own, a_table("t1"))), cw_min=64)
    assert [t.constraints.min_partition for t in after.workload.tables] == [16, 64]


def test_hosts_are_like_those_given_and_memory_scales_after() -> None:
    after = turned(a_case(), hbm=0.5, hosts=3)
    assert (after.installed.world_size, after.installed.local_world_size) == (6, 2)
    assert after.installed.hbm_cap_bytes == (40 * GIB,) * 6
    assert after.installed.nvlink_domain == 2


def test_more_or_fewer_hosts_fill_the_parts_of_a_network() -> None:
    pods = NetworkLevel.of("pod", ["a", "a", "b", "b"], 2, gbit_s=25.0)
    case = a_case(8, 2)
    case = replace(case, installed=replace(case.installed, network=(pods,)))
    parts = {n: [(v.parts, v.ranks, v.gbit_s) for v in levels(case, n)] for n in (1, 2, 4, 8)}
    assert parts == {1: [], 2: [], 4: [(2, 4, 25.0)], 8: [(4, 4, 25.0)]}
    assert grid_of(case, {"hosts": None}).values["hosts"] == (1, 2, 4, 8, 16)
    with pytest.raises(InputError, match=r"hosts cannot be 3: .*'pod'"):
        grid_of(case, {"hosts": (3,)})


def levels(case: Case, hosts: int) -> tuple[NetworkLevel, ...]:
    return turned(case, hosts=hosts).installed.network


def test_groups_divide_the_ranks() -> None:
    case = a_case(12, 4)
    assert grid_of(case, {"groups": None}).values["groups"] == (3, 6, 12)
    two_groups = a_case(8, 4, replica_groups=ReplicaGroups(4, 5, use_inter_host_allreduce=True))
    after = turned(two_groups, groups=2)
    assert after.workload.replica_groups == ReplicaGroups(2, 5, use_inter_host_allreduce=True)
    assert after.problem().topology.world_size == 2
    with pytest.raises(InputError, match=r"groups cannot be 5: .* does not divide 8 ranks"):
        grid_of(two_groups, {"groups": (5,)})
    parts = ReplicaGroups(4, sharding_strategy=FULLY_SHARDED)
    with pytest.raises(InputError, match=r"sync_interval .*fully_sharded"):
        grid_of(a_case(8, 4, replica_groups=parts), {"sync_interval": (5,)})
    wider = turned(two_groups, groups=8, hosts=4).problem().topology
    assert (wider.world_size, wider.whole.world_size) == (8, 16)
    with pytest.raises(InfeasibleError, match="does not divide 12 ranks"):
        turned(two_groups, groups=8, hosts=3).problem()


def test_a_domain_that_joins_hosts_grows_with_them() -> None:
    rack = load_hardware("b200").model_copy()
    case = Case(a_workload(a_table()), Topology.uniform(8, 4, hbm_bytes=1, ddr_bytes=1), rack)
    domain = rack.nvlink_domain
    for count in (1, 2, 4, 3):
        after = turned(case, hosts=count).installed
        assert after.nvlink_domain <= max(domain, 4)
        assert after.world_size % after.nvlink_domain == 0


def test_buckets_of_dense_gradients_set_how_many_all_reduces_there_are() -> None:
    dense = DenseArch(13, (1024, 1024, 64), (2048, 2048, 1), "concat")
    case = Case(replace(a_workload(a_table()), dense=dense), hosts(2), H100)
    problem = case.problem()
    plan = solve(problem, Stop(effort=0.01), 0, searchers=()).best.plan
    times = {}
    for size in (1.0, 25.0, 100.0):
        after = turned(case, bucket=size).problem()
        times[size] = predict(after.workload, after.topology, after.hardware, plan).breakdown
    assert times[1.0] != times[25.0]
    assert (
        times[25.0] == predict(problem.workload, problem.topology, problem.hardware, plan).breakdown
    )


@pytest.mark.parametrize(
    ("case", "knobs", "says"),
    [
        (a_case(), {"batch_size": (0,)}, "batch_size cannot be 0"),
        (a_case(), {"pipeline": ("fast",)}, "pipeline cannot be fast: .*sparse_dist"),
        (a_case(), {"qcomm": ("int8",)}, "qcomm cannot be int8: .*bf16"),
        (a_case(), {"cw_min": (30,)}, "cw_min cannot be 30: .* 4"),
        (a_case(), {"cache_ratio": (1.5,)}, "cache_ratio cannot be 1.5"),
        (a_case(), {"hosts": (10**9,)}, "hosts cannot be"),
        (a_case(1, None), {"bucket": None}, "bucket cannot"),
        (a_case(1, None), {"qcomm": None}, "qcomm cannot"),
        (
            a_case(tables=(a_table(constraints=Constraints(compute_kernels=("fused",))),)),
            {"cache_ratio": None},
            "cache_ratio .*fused_uvm_caching",
        ),
        (
            a_case(tables=(a_table(constraints=Constraints(compute_kernels=("fused",))),)),
            {"pipeline": ("prefetch_sparse_dist",)},
            "pipeline .*prefetch",
        ),
        (
            a_case(tables=(a_table(constraints=Constraints(ranks=(0,))),)),
            {"hosts": None},
            "hosts .*constraints.ranks",
        ),
        (
            a_case(tables=(a_table(constraints=Constraints(min_partition=32)),)),
            {"cw_min": None},
            "cw_min .*min_partition",
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused_with_the_reason(
    case: Case, knobs: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        grid_of(case, knobs)


def test_unequal_ranks_and_cpus() -> None:
    uneven = Topology(2, 2, (GIB, 2 * GIB), (GIB, GIB))
    with pytest.raises(InputError, match=r"hosts .*memory"):
        grid_of(replace(a_case(), installed=uneven), {"hosts": None})
    on_cpu = replace(a_case(), hardware=CPU)
    assert grid_of(on_cpu, {"pipeline": None}).values["pipeline"] == ("base", "sparse_dist")
    with pytest.raises(InputError, match=r"hbm .*memory"):
        grid_of(on_cpu, {"hbm": None})
    unpooled = a_case(tables=(replace(a_table(), pooling="none"),))
    assert grid_of(unpooled, {"index_dedup": None}).values["index_dedup"] == ("false", "true")
    with pytest.raises(InputError, match="index_dedup"):
        grid_of(replace(unpooled, hardware=CPU), {"index_dedup": None})


def test_groups_are_tried_with_copies_that_meet_rarely_where_there_are_none() -> None:
    def tried(case: Case) -> set[ReplicaGroups | None]:
        of_groups = [step for step in steps(case) if step.name == "replica_groups"]
        return {step.turn(case).workload.replica_groups for step in of_groups}

    assert tried(a_case(8, 4)) == {ReplicaGroups(4), ReplicaGroups(4, RARELY)}
    assert tried(a_case(8, 4, replica_groups=ReplicaGroups(8, 5))) == {ReplicaGroups(4, 5)}
