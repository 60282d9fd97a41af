"""Peaks of plans: what they hold on to, and what is left for shards before there is a plan."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock, PropertyMock, patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.errors import InfeasibleError
from predictor.model.lookup_group import is_stashed
from predictor.model.memory.dense import dense_memory
from predictor.model.memory.iteration import Iteration, exchanges
from predictor.model.memory.peak import (
    DEFAULT_RESERVE,
    UNKNOWN_RESERVE,
    PeakMemory,
    activation_bytes,
    default_reserve,
    least_bytes,
    leave_for_shards,
    memory_of_plan,
    program_of,
    simulated_peak,
)
from predictor.model.memory.ranks import RankMemory, resident_bytes
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import (
    INFERENCE,
    DenseArch,
    DenseTimes,
    Feature,
    MeasuredDense,
    Table,
    Workload,
)
from predictor.units import GIB, MIB
from search.space.enumerate import shard_sizes_and_offsets

DENSE = DenseArch(13, (64, 32), (128, 1), "concat", optimizer="adam")
TOPOLOGY = Topology.uniform(4, 4, hbm_bytes=GIB, ddr_bytes=GIB)
KINDS = (ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE)


def a_workload(batch: int, tables: int, pipeline: str = "base") -> Workload:
    model_tables = (
        Table(f"t{i}", 1000 * (i + 1), 32, (Feature(f"f{i}", 1.0 + i),)) for i in range(tables)
    )
    return Workload("w", batch, tuple(model_tables), DENSE, pipeline)


def a_plan(workload: Workload, ranks: list[int], kinds: list[ShardingType]) -> ShardingPlan:
    """Shards go to the ranks in turn."""
    tables = {}
    for i, table in enumerate(workload.tables):
        kind = kinds[i % len(kinds)]
        sizes, offsets = shard_sizes_and_offsets(table, TOPOLOGY, kind, 16)
        shards = (
            Shard(ranks[(i + j) % 4], offset, size)
            for j, (size, offset) in enumerate(zip(sizes, offsets, strict=True))
        )
        copied = kind is ShardingType.DATA_PARALLEL
        kernel = ComputeKernel.DENSE if copied else ComputeKernel.FUSED
        tables[table.name] = TablePlan(kind, kernel, tuple(shards), table.module)
    return ShardingPlan(tables, 4, 4)


plans = st.tuples(
    st.integers(1, 6),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    st.sampled_from(["base", "sparse_dist", "prefetch_sparse_dist"]),
    st.sampled_from(["cuda", "cpu"]),
)


def peaks(memory: list[RankMemory]) -> list[tuple[int, int]]:
    return [(m.peak.allocated_bytes, m.peak.reserved_bytes) for m in memory if m.peak is not None]


@given(plans)
@settings(max_examples=30, deadline=None)
def test_a_peak_holds_all_that_stays_and_grows_with_the_batch(
    drawn: tuple[int, list[ShardingType], str, str],
) -> None:
    count, kinds, pipeline, device = drawn
    before = [0, 0, 0, 0]
    for batch in (64, 512, 4096):
        workload = a_workload(batch, count, pipeline)
        plan = a_plan(workload, [0, 1, 2, 3], kinds)
        shards = resident_bytes(workload, TOPOLOGY, plan, device)
        program = program_of(workload)
        stays = sum(o.storage_bytes for o in program.resident) + program.state_bytes
        peak_bytes = peaks(memory_of_plan(workload, TOPOLOGY, plan, device))
        for rank, (allocated, reserved) in enumerate(peak_bytes):
            assert reserved >= allocated >= shards[rank] + stays
            assert allocated > before[rank]
        before = [allocated for allocated, _ in peak_bytes]


@given(
    st.lists(st.sampled_from([*KINDS, ShardingType.DATA_PARALLEL]), min_size=1, max_size=5),
    st.sampled_from(["base", "sparse_dist", "prefetch_sparse_dist", "semi_sync"]),
    st.sampled_from(["cuda", "cpu"]),
    st.sampled_from([64, 4096]),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_what_shards_add_at_least_is_never_above_the_peak(
    kinds: list[ShardingType], pipeline: str, device: str, batch: int, drawn: list[bool]
) -> None:
    stashed, weighted, apart, states = drawn
    workload = a_workload(batch, len(kinds), pipeline)
    tables = [
        replace(t, stash_weights=stashed and i > 0, weighted=weighted and not (apart and i % 2))
        for i, t in enumerate(workload.tables)
    ]
    tables = [replace(t, module=f"m{i % 2}") if apart else t for i, t in enumerate(tables)]
    workload = replace(workload, tables=tuple(tables), stash_optimizer_state=states)
    plan = a_plan(workload, [0, 1, 2, 3], kinds)
    least = least_bytes(workload, device)
    for rank in PeakMemory(workload, TOPOLOGY, device).of(plan):
        shards = rank.ddr_bytes if device == "cpu" else rank.hbm_bytes
        assert rank.peak is not None
        assert least + shards <= rank.peak.allocated_bytes


def test_a_peak_is_shared_only_where_all_that_it_depends_on_is_the_same() -> None:
    base = a_workload(256, 3)
    program = program_of(base)
    other_plan = a_plan(base, [0, 1, 2, 3], [ShardingType.ROW_WISE])
    table_wise = a_plan(base, [0, 1, 2, 3], [ShardingType.TABLE_WISE])
    weighted = replace(base, tables=tuple(replace(t, weighted=True) for t in base.tables))
    workloads = [base, replace(base, train_pipeline="sparse_dist"), replace(base, mode=INFERENCE)]
    for workload in (*workloads, weighted, replace(base, name="renamed")):
        for plan in (table_wise, other_plan):
            (exchanges_of_first, *_) = exchanges(base, TOPOLOGY, plan)
            for device, stashed in (("cuda", (0, 0)), ("cuda", (1 << 20, 0)), ("cpu", (0, 0))):
                given = (workload, program, exchanges_of_first, device, frozenset[str](), stashed)
                assert simulated_peak(*given) == Iteration(*given).run()


def test_views_of_tables_are_not_walked_for_every_rank() -> None:
    few, many = (dense_memory(program_of(a_workload(64, n)), trains=True) for n in (3, 30))
    assert len(few.forward) == len(many.forward)
    assert len(few.backward) == len(many.backward)


def test_tables_are_read_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = a_workload(64, 5)
    stashed = tuple(replace(table, stash_weights=True) for table in workload.tables)
    workload = replace(workload, tables=stashed)
    narrow = a_plan(workload, [0, 1, 2, 3], [ShardingType.TABLE_WISE])
    reads = Mock(wraps=is_stashed)
    monkeypatch.setattr("predictor.model.memory.peak.is_stashed", reads)
    counts = []
    for ranks in (4, 64):
        topology = Topology.uniform(ranks, 4, hbm_bytes=GIB, ddr_bytes=GIB)
        wide = replace(narrow, world_size=ranks)
        with patch.object(Feature, "lookups_per_sample", PropertyMock(return_value=2.0)) as ids:
            peak_bytes = PeakMemory(workload, topology).peaks(wide)
        counts.append((ids.call_count, reads.call_count))
        reads.reset_mock()
    assert len(peak_bytes) == 64
    assert counts[1][0] <= counts[0][0]  # those of the batch are kept from the first
    assert counts[0][1] == counts[1][1] == len(workload.tables)


@given(plans, st.permutations([0, 1, 2, 3]))
@settings(max_examples=30, deadline=None)
def test_ranks_can_change_places(
    drawn: tuple[int, list[ShardingType], str, str], order: list[int]
) -> None:
    count, kinds, pipeline, device = drawn
    workload = a_workload(256, count, pipeline)
    plain = peaks(memory_of_plan(workload, TOPOLOGY, a_plan(workload, [0, 1, 2, 3], kinds), device))
    moved = peaks(memory_of_plan(workload, TOPOLOGY, a_plan(workload, order, kinds), device))
    assert [moved[order[rank]] for rank in range(4)] == plain


def test_what_is_left_for_shards() -> None:
    workload = a_workload(256, 3)
    available = leave_for_shards(workload, TOPOLOGY, 0.25, context_bytes=1000)
    limit = GIB * 3 // 4 - 1000
    assert available.limit_bytes == (limit,) * 4
    assert available.installed_bytes == TOPOLOGY.hbm_cap_bytes
    assert available.hbm_cap_bytes == (limit - least_bytes(workload),) * 4
    host = leave_for_shards(workload, TOPOLOGY, 0.25, "cpu")
    assert host.hbm_cap_bytes == TOPOLOGY.hbm_cap_bytes
    assert host.ddr_cap_bytes == (GIB - least_bytes(workload, "cpu"),) * 4
    with pytest.raises(InfeasibleError, match=r"rank 0 has .*a smaller batch"):
        leave_for_shards(workload, replace(TOPOLOGY, hbm_cap_bytes=(1000,) * 4), 0.0)


def test_measured_activations_are_there_until_the_backward() -> None:
    times = DenseTimes(256, 1.0, 1.0, 1.0, 4000 / MIB, 10**6 / GIB)
    workload = replace(a_workload(256, 2), dense=MeasuredDense(times))
    outputs = 2 * 256 * 32 * 4
    assert activation_bytes(workload, program_of(workload)) == 10**6 + outputs
    assert default_reserve(workload) == DEFAULT_RESERVE
    unknown = replace(workload, dense=MeasuredDense(replace(times, activation_gib=None)))
    assert default_reserve(unknown) == UNKNOWN_RESERVE
