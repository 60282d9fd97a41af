"""Options tile their tables and honour constraints; what repeats or fits nowhere is taken out."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.errors import InfeasibleError, InputError, PlanError
from predictor.model.memory.caches import plan_sharing_bytes
from predictor.model.memory.ranks import plan_memory, shard_memory
from predictor.model.plan import SERVED, ComputeKernel, ShardingPlan, ShardingType
from predictor.model.plan_check import check_plan
from predictor.model.topology import Topology
from predictor.model.workload import (
    INFERENCE,
    Constraints,
    DenseArch,
    Feature,
    Table,
    Workload,
)
from predictor.units import GIB
from search.space.enumerate import column_width, enumerate_space
from search.space.filters import deduplicate, prune
from search.space.option import Option, Partition, Space, place

DENSE = DenseArch(13, (16,), (8, 1), "concat")
T = ShardingType


def a_table(rows: int = 1000, dim: int = 256, name: str = "t", **more: object) -> Table:
    return Table(name, rows, dim, (Feature(f"{name}_f", 2.0),), **more)  # type: ignore[arg-type]


def a_workload(*tables: Table, batch_size: int = 64) -> Workload:
    return Workload("w", batch_size, tables or (a_table(),), DENSE)


def hosts(world: int, local: int | None = None, gib: int = 80) -> Topology:
    return Topology.uniform(world, local, hbm_bytes=gib * GIB, ddr_bytes=256 * GIB)


def space_of(topology: Topology, device: str = "cuda", **constraints: object) -> Space:
    table = a_table(constraints=Constraints(**constraints))  # type: ignore[arg-type]
    return enumerate_space(a_workload(table), topology, device)


def labels(space: Space, table: int = 0) -> set[str]:
    return {o.label for o in space.options[table]}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_inference_has_the_types_of_its_sharders(device: str, pooling: str) -> None:
    workload = replace(a_workload(a_table(pooling=pooling)), mode=INFERENCE)
    (options,) = enumerate_space(workload, hosts(4, 2), device).options
    assert {o.sharding_type for o in options} == {*SERVED}


tables = st.builds(
    lambda rows, lanes, pooling, dtype, optimizer, minimum: Table(
        "t",
        rows,
        4 * lanes,
        (Feature("f", 1.5),),
        pooling=pooling,
        data_type=dtype,
        optimizer=optimizer,
        constraints=Constraints(min_partition=minimum),
    ),
    st.integers(1, 5000),
    st.integers(1, 130),
    st.sampled_from(["sum", "none"]),
    st.sampled_from(["fp32", "fp16"]),
    st.sampled_from(["sgd", "adam", "exact_row_wise_adagrad", "partial_row_wise_adam"]),
    st.sampled_from([None, 4, 32, 100]),
)
topologies = st.sampled_from([hosts(1), hosts(2), hosts(8), hosts(16), hosts(8, 2), hosts(12, 3)])


@given(tables, topologies, st.sampled_from(["cuda", "cpu"]))
@settings(max_examples=60, deadline=None)
def test_shards_tile_the_table(table: Table, topology: Topology, device: str) -> None:
    space = enumerate_space(a_workload(table), topology, device)
    for option in space.options[0]:
        boxes = [
            (r, r + h, c, c + w)
            for (r, c), (h, w) in zip(option.offsets, option.sizes, strict=True)
            if h * w
        ]
        if option.sharding_type is T.DATA_PARALLEL:
            table_box = (0, table.num_embeddings, 0, table.embedding_dim)
            assert boxes == [table_box] * topology.world_size
            continue
        area = sum((r1 - r0) * (c1 - c0) for r0, r1, c0, c1 in boxes)
        assert area == table.num_embeddings * table.embedding_dim
        for r0, r1, c0, c1 in boxes:
            assert 0 <= r0 < r1 <= table.num_embeddings
            assert 0 <= c0 < c1 <= table.embedding_dim
        for a, b in itertools.combinations(boxes, 2):
            assert a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2]


@given(tables, topologies)
@settings(max_examples=40, deadline=None)
def test_memory_adds_up_over_shards(table: Table, topology: Topology) -> None:
    """Weights and state of the shards sum to the table's; asking shard by shard is the same."""
    workload = a_workload(table)
    for option in enumerate_space(workload, topology).options[0]:
        fused = option.compute_kernel is ComputeKernel.FUSED
        if option.sharding_type is T.DATA_PARALLEL or not fused:
            continue
        weights = sum(m.hbm_bytes - m.io_bytes - m.optimizer_bytes for m in option.memory)
        assert weights == table.weight_bytes
        again = shard_memory(
            table, workload, topology, option.sharding_type, option.compute_kernel, option.sizes
        )
        assert tuple(again) == option.memory
        if option.column_width == table.embedding_dim:
            unsharded = shard_memory(
                table,
                workload,
                topology,
                T.TABLE_WISE,
                option.compute_kernel,
                [(table.num_embeddings, table.embedding_dim)],
            )
            assert sum(m.optimizer_bytes for m in option.memory) == unsharded[0].optimizer_bytes


@given(tables, topologies)
@settings(max_examples=40, deadline=None)
def test_every_alternative_is_legal_and_places(table: Table, topology: Topology) -> None:
    space = enumerate_space(a_workload(table), topology)
    for option in space.options[0]:
        legal = option.legal_ranks(topology)
        assert not legal.is_empty
        ranks = tuple(r for alternatives in legal.units for r in alternatives[-1])
        assert option.is_legal(ranks, topology)
        plan = place(option, ranks)
        assert plan.ranks == ranks
        assert space.option_of(0, plan) == option


def test_torchrec_width_is_the_smallest_divisor_of_at_least_128() -> None:
    assert [column_width(d) for d in (16, 128, 200, 256, 384, 512, 1000)] == [
        *(16, 128, 200, 128, 128, 128, 200),
    ]
    assert column_width(256, 32) == 32
    assert column_width(200, 24) == 40
    assert column_width(100, 200) == 100


def test_row_blocks_have_a_short_tail_and_empty_shards() -> None:
    space = enumerate_space(a_workload(a_table(rows=5)), hosts(4))
    row_wise = next(o for o in space.options[0] if o.sharding_type is T.ROW_WISE)
    assert [s[0] for s in row_wise.sizes] == [2, 2, 1, 0]
    assert [o[0] for o in row_wise.offsets] == [0, 2, 4, 5]
    assert row_wise.memory[3].io_bytes == 0


def test_added_options_are_marked() -> None:
    space = space_of(hosts(16))
    added = {o.label for o in space.options[0] if o.added_by_shardopt}
    assert {"CW32/fused", "CW64/fused", "TWCW32/fused", "GRID128/fused"} <= added
    assert "CW128/fused" in labels(space) - added
    plain = enumerate_space(a_workload(), hosts(16), extended=False)
    assert labels(plain) == labels(space) - added


def test_no_width_gives_more_shards_than_ranks() -> None:
    added = [o for o in space_of(hosts(2)).options[0] if o.added_by_shardopt]
    usual = {o.way[2:4] for o in space_of(hosts(2)).options[0] if not o.added_by_shardopt}
    assert {o.way[2:4] for o in added} <= usual, "no split but TorchRec's; caches of other sizes"
    assert "CW64/fused" in labels(space_of(hosts(4)))


def test_grid_needs_as_many_groups_as_blocks() -> None:
    assert {o for o in labels(space_of(hosts(16))) if o.startswith("GRID")} == {
        f"GRID128/{k}" for k in ("fused", "fused_uvm", "fused_uvm_caching")
    }
    assert "GRID64/fused" in labels(space_of(hosts(32)))
    assert not any(o.startswith("GRID") for o in labels(space_of(hosts(8))))
    named = space_of(hosts(8), sharding_types=(T.GRID_SHARD,))
    sizes = ("fused_uvm_caching", "fused_uvm_caching@0.05", "fused_uvm_caching@0.5")
    assert labels(named) == {f"GRID128/{k}" for k in ("fused", "fused_uvm", *sizes)}


def test_unpooled_tables_have_no_host_wise_types() -> None:
    space = enumerate_space(a_workload(a_table(pooling="none")), hosts(16))
    kinds = {o.sharding_type for o in space.options[0]}
    assert kinds == {T.DATA_PARALLEL, T.TABLE_WISE, T.COLUMN_WISE, T.ROW_WISE}


def test_dense_beyond_data_parallel_only_where_named() -> None:
    assert labels(space_of(hosts(2), compute_kernels=("dense",))) == {"DP/dense"}
    named = space_of(
        hosts(2), sharding_types=(T.TABLE_WISE, T.DATA_PARALLEL), compute_kernels=("dense",)
    )
    assert labels(named) == {"DP/dense", "TW/dense"}
    table_wise = next(o for o in named.options[0] if o.sharding_type is T.TABLE_WISE)
    assert table_wise.added_by_shardopt
    assert table_wise.memory[0].dense_bytes == 1000 * 256 * 4


def test_row_wise_on_cpu_is_ours() -> None:
    rows = [o for o in space_of(hosts(2), "cpu").options[0] if o.label.startswith("RW")]
    assert [o.added_by_shardopt for o in rows] == [True]
    assert labels(space_of(hosts(2), "cpu", sharding_types=(T.ROW_WISE,))) == {"RW/fused"}


def test_constraints_reach_plan_and_memory() -> None:
    space = space_of(
        hosts(2), compute_kernels=("fused_uvm_caching",), cache_load_factor=0.5, enforce_hbm=True
    )
    option = next(o for o in space.options[0] if o.sharding_type is T.TABLE_WISE)
    plan = place(option, [1])
    assert plan.cache_load_factor == 0.5
    assert plan.parameters["enforce_hbm"] is True
    assert option.memory[0].ddr_bytes == 0


def test_cached_tables_have_caches_of_several_sizes() -> None:
    """Unless a constraint sets one; the default is named, as TorchRec's mean of a launch asks."""
    cached = [o for o in space_of(hosts(2)).options[0] if "caching" in o.compute_kernel]
    factors = [o.cache_load_factor for o in cached if o.sharding_type is T.TABLE_WISE]
    assert factors == [0.2, 0.05, 0.5]
    memory = {o.cache_load_factor: o.memory[0].hbm_bytes for o in cached if len(o.sizes) == 1}
    assert memory[0.05] < memory[0.2] < memory[0.5]
    assert all(place(o, [0] * o.num_shards).cache_load_factor for o in cached)
    fixed = space_of(hosts(2), cache_load_factor=0.3).options[0]
    assert {o.cache_load_factor for o in fixed if "caching" in o.compute_kernel} == {0.3}
    without = enumerate_space(a_workload(a_table()), hosts(2), extended=False).options[0]
    assert {o.cache_load_factor for o in without} == {None}, "TorchRec leaves it open"


def test_tables_of_another_device_are_refused() -> None:
    assert space_of(hosts(2), device_group="cuda").options
    with pytest.raises(InputError, match=r"'t': constraints.device_group is cpu.*cpu-gloo"):
        space_of(hosts(2), device_group="cpu")
    with pytest.raises(
        InputError, match=r"constraints.device_group is cuda, but the ranks are cpu"
    ):
        space_of(hosts(2), "cpu", device_group="cuda")


def test_allowed_ranks() -> None:
    topology = hosts(8, 4)
    space = prune(space_of(topology, ranks=(4, 5, 6, 7)), topology)
    kinds = {o.sharding_type for o in space.options[0]}
    assert T.ROW_WISE not in kinds
    assert T.DATA_PARALLEL not in kinds
    rows = next(o for o in space.options[0] if o.sharding_type is T.TABLE_ROW_WISE)
    assert rows.legal_ranks(topology).units == (((4, 5, 6, 7),),)
    assert not rows.is_legal((0, 1, 2, 3), topology)
    with pytest.raises(InputError, match="ranks 0 to 7"):
        space_of(topology, ranks=(8,))


def test_co_located_tables() -> None:
    same = Constraints(co_locate="a")
    workload = a_workload(
        a_table(name="x", constraints=same), a_table(name="y"), a_table(name="z", constraints=same)
    )
    space = enumerate_space(workload, hosts(4))
    assert space.co_locate == ((0, 2),)
    assert space.co_located([(1,), (2,), (1, 1)])
    assert not space.co_located([(1,), (2,), (1, 2)])


def partitioned(topology: Topology, kind: ShardingType) -> Option:
    space = space_of(topology, sharding_types=(kind,))
    return next(o for o in space.options[0] if o.compute_kernel is ComputeKernel.FUSED)


def test_partitions() -> None:
    topology = hosts(4, 2)
    rows = partitioned(topology, T.ROW_WISE)
    assert rows.partition is Partition.UNIFORM
    assert rows.is_legal((0, 1, 2, 3), topology)
    assert not rows.is_legal((1, 0, 2, 3), topology)
    columns = partitioned(topology, T.TABLE_COLUMN_WISE)
    assert columns.is_legal((3, 2), topology)
    assert columns.is_legal((3, 3), topology)
    assert not columns.is_legal((1, 2), topology)
    grid = partitioned(topology, T.GRID_SHARD)
    assert grid.is_legal((2, 3, 0, 1), topology)
    assert not grid.is_legal((0, 2, 1, 3), topology)
    assert not grid.is_legal((0, 1, 2), topology)
    with pytest.raises(PlanError, match="3 ranks for the 4 shards"):
        place(grid, (0, 1, 2))


def test_duplicates_go() -> None:
    one_host = hosts(8)
    workload = a_workload(a_table(dim=128))
    space = deduplicate(enumerate_space(workload, one_host), one_host)
    assert {o.label for o in space.options[0] if o.compute_kernel is ComputeKernel.FUSED} == {
        *("TW/fused", "CW32/fused", "CW64/fused", "RW/fused"),
    }
    # beside another table that can be split, a whole column joins the exchange of its shards
    pair = a_workload(a_table(dim=128), a_table(dim=128, name="u"))
    shared = deduplicate(enumerate_space(pair, one_host), one_host)
    assert "CW128/fused" in labels(shared)
    two_hosts = hosts(16)
    both = deduplicate(enumerate_space(workload, two_hosts), two_hosts)
    assert {"TWRW/fused", "TWCW32/fused"} <= labels(both)


def test_a_duplicate_stays_when_it_is_the_only_one() -> None:
    topology = hosts(8)
    space = space_of(topology, sharding_types=(T.TABLE_ROW_WISE,), compute_kernels=("fused",))
    assert labels(deduplicate(space, topology)) == {"TWRW/fused"}


def test_shards_larger_than_every_allowed_rank_are_pruned() -> None:
    topology = replace(hosts(2, gib=1), hbm_cap_bytes=(GIB, 16 * GIB))
    big = a_table(rows=2_000_000, dim=256)
    space = prune(enumerate_space(a_workload(big), topology), topology)
    assert "TW/fused" in labels(space)
    assert "DP/dense" not in labels(space)
    pinned = replace(big, constraints=Constraints(ranks=(0,)))
    space = prune(enumerate_space(a_workload(pinned), topology), topology)
    assert "TW/fused" not in labels(space)


def test_nothing_left_says_why_and_what_to_try() -> None:
    topology = hosts(2, gib=1)
    with pytest.raises(InfeasibleError, match=r"'t'.*no sharding option is left"):
        space_of(topology, sharding_types=(T.DATA_PARALLEL,), compute_kernels=("fused",))
    wants = Constraints(compute_kernels=("fused",))
    big = a_workload(a_table(rows=10_000_000, constraints=wants))
    with pytest.raises(InfeasibleError, match=r"(?s)RW/fused: a shard of.*To try: .*add GPUs"):
        prune(enumerate_space(big, topology), topology)


@given(tables, topologies)
@settings(max_examples=30, deadline=None)
def test_placed_options_are_valid_plans_with_the_same_memory(
    table: Table, topology: Topology
) -> None:
    workload = a_workload(table)
    for option in enumerate_space(workload, topology).options[0]:
        legal = option.legal_ranks(topology)
        ranks = [r for alternatives in legal.units for r in alternatives[0]]
        plan = ShardingPlan(
            {"t": place(option, ranks)}, topology.world_size, topology.local_world_size
        )
        memory = plan_memory(workload, topology, check_plan(plan, workload))
        sets = sum(plan_sharing_bytes(workload, plan).values())
        assert sum(m.hbm_bytes for m in memory) == sum(m.hbm_bytes for m in option.memory) + sets
        assert 0 <= sets <= 32 * (4 * table.embedding_dim + 16) * option.num_shards
        assert sum(m.ddr_bytes for m in memory) == sum(m.ddr_bytes for m in option.memory)
